"""Harbor's trials in terminals, without Docker: `harbor run --env aligner.environments.harbor:HarborTerminal`.

Harbor's agents and verifiers work in a sandbox (aligner/sandbox/terminal.py) over an image of the task.
"""

from __future__ import annotations

import asyncio
import base64
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from aligner.environments.task_folders import read_environment
from aligner.environments.terminal import expect_done, open_sandbox
from aligner.errors import MissingExtraError, SandboxError
from aligner.sandbox.proxy import HostList
from aligner.sandbox.terminal import TerminalLimits, TerminalSandbox, lacks

try:
    from harbor.environments.base import BaseEnvironment, ExecResult
    from harbor.environments.capabilities import EnvironmentCapabilities
    from harbor.environments.tar_transfer import extract_dir_from_bytes, pack_dir_to_bytes
except ImportError as cause:
    raise MissingExtraError("harbor", "harbor", "a trial of Harbor") from cause

ARCHIVE = "/tmp/.transfer.tar.gz"
PIECE = 4 << 20  # bytes of a file that is read from the sandbox
OUTPUT = 2 * PIECE  # characters of a command's output, whose middle is cut
USUAL_MB = 2048  # of memory and of disk, where a task names none
LONG_S = 1e6  # of a command for which Harbor has no limit: the trial's ends it
TIMED_OUT = 124


class HarborTerminal(BaseEnvironment):
    """An environment of Harbor over an image (aligner/sandbox/images.py); "": the task's, else this machine's programs.

    hosts: that programs reach by HTTP, besides those of the task. processes: of the sandbox.
    """

    def __init__(self, *args: Any, image: str = "", hosts: Sequence[str] = (), processes: int = 256, **kwargs: Any):
        self._image, self._hosts, self._processes = image, list(hosts), processes
        self._sandbox: TerminalSandbox | None = None
        self._turn = asyncio.Lock()
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "aligner"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        names = {"network_allowlist_hostnames": True, "network_allowlist_wildcard_hostnames": True}
        return EnvironmentCapabilities(disable_internet=True, network_allowlist=True, **names)

    @classmethod
    def preflight(cls, kwargs: dict[str, Any] | None = None) -> None:
        super().preflight(kwargs)
        if why := lacks():
            raise SystemExit(why)

    def _validate_definition(self) -> None:
        """Raise ValueError for what needs Docker."""
        if (compose := self.environment_dir / "docker-compose.yaml").exists():
            raise ValueError(f"{compose}: expected a task of one container")
        HostList(self._hosts)
        self._definition = read_environment(self.environment_dir, self._image)

    async def start(self, force_build: bool) -> None:
        self._sandbox = await asyncio.to_thread(self._made)
        await self.ensure_dirs(self._mount_targets(writable_only=True))
        if self._definition[0] == self._image:  # else an image is among the files
            await self._upload_environment_dir_after_start()

    def _made(self) -> TerminalSandbox:
        image, folder, files = self._definition
        hosts = [*self._hosts, *self.network_policy.allowed_hosts]
        if self._network_is_public:
            self.logger.warning(f"a terminal has no network but {hosts or 'none'} by HTTP: see `hosts`")
        memory, disk = self._effective_memory_mb or USUAL_MB, self._effective_storage_mb or USUAL_MB
        limits = TerminalLimits(memory_mb=memory, disk_mb=disk, processes=self._processes, output_chars=OUTPUT)
        folder = self.task_env_config.workdir or folder or "/app"
        sandbox = open_sandbox(limits, image, folder, HostList(hosts) if hosts else None)
        expect_done(sandbox.write(files), "environment")
        return sandbox

    async def stop(self, delete: bool) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await asyncio.to_thread(sandbox.close)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command. Its time is what it computes, and what it waits; processes in the background go on while
        another command runs."""
        if self._resolve_user(user) not in (None, "root", 0, "0"):
            raise ValueError(f"user={self._resolve_user(user)!r}: expected root: a terminal has no other user")
        variables = [f"{name}={value}" for name, value in (self._merge_env(env) or {}).items()]
        words = shlex.join(["env", *variables, "bash", "-c", command])
        text = f"(cd {quote(cwd or self._open.folder)} && exec {words})"
        seconds = float(timeout_sec or LONG_S)
        answer = await self._asked(self._open.bash, text, cpu_s=seconds, waits_s=seconds)
        code = answer["status"] if not answer["why"] else TIMED_OUT
        return ExecResult(stdout=answer["out"], stderr=answer["why"], return_code=code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        data, mode = Path(source_path).read_bytes(), Path(source_path).stat().st_mode & 0o777
        expect_done(await self._asked(self._open.write, {target_path: data}), target_path)
        await self._own(f"chmod {mode:o} {quote(target_path)}")

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        packed = await asyncio.to_thread(pack_dir_to_bytes, source_dir, compress=True)
        expect_done(await self._asked(self._open.write, {ARCHIVE: packed.getvalue()}), ARCHIVE)
        await self._own(f"mkdir -p {quote(target_dir)} && tar -xzf {ARCHIVE} --no-same-owner -C {quote(target_dir)}")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        data = await self._bytes(source_path)
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        Path(target_path).write_bytes(data)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self._own(f"tar -czf {ARCHIVE} -C {quote(source_dir)} .")
        await asyncio.to_thread(extract_dir_from_bytes, await self._bytes(ARCHIVE), target_dir)

    async def _bytes(self, path: str) -> bytes:
        """Return a file of the sandbox, where programs may be the agent's: no answer of theirs fills the memory."""
        data, name = b"", quote(path)
        while len(data) <= self._open.limits.disk_mb << 20:
            text = await self._own(f"test -f {name} && tail -c +{len(data) + 1} {name} | head -c {PIECE} | base64")
            piece = base64.b64decode(text)
            data += piece
            if len(piece) < PIECE:
                return data
        raise RuntimeError(f"{path}: expected a file of at most {self._open.limits.disk_mb} MiB")

    async def _own(self, command: str) -> str:
        """Run a command of ours, while processes of the agent are stopped. Return its output."""
        answer = await self._asked(self._open.run, ["bash", "-c", command], LONG_S, {})
        expect_done(answer, command)
        return answer["out"]

    async def _asked(self, ask: Callable[..., dict[str, Any]], *args: Any, **keywords: Any) -> dict[str, Any]:
        """Ask the sandbox, one request at a time. A request that Harbor gives up ends the sandbox."""
        async with self._turn:
            try:
                return await asyncio.to_thread(ask, *args, **keywords)
            except asyncio.CancelledError:
                self._open.kill()
                raise

    @property
    def _open(self) -> TerminalSandbox:
        if self._sandbox is None:
            raise SandboxError("a trial's environment has not been started")
        return self._sandbox
