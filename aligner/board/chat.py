"""Chat with models in the board: each is a separate `aligner serve`, whose memory is freed when it is killed.

Imports no torch.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from aligner.board import safe_files
from aligner.board.jobs import command, tail
from aligner.board.runs import Board
from aligner.config.freeze import FILE_NAME
from aligner.config.resolve import quoted
from aligner.errors import AlignerError, DataError
from aligner.foreign import JsonObject, parse_json, read_record, record

MOST = 2  # models at a time
SAMPLING = ("temperature", "top_p", "max_tokens", "seed")
PLAIN = "{{ messages[-1]['content'] }}"  # for a model without a chat template: each message is a prompt of its own
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # before a fork: a child of several threads may not load it
_STARTER = ThreadPoolExecutor(1)  # a child ends with the thread that started it: this one lives as long as the board


@dataclass(frozen=True)
class Model:
    """A model that can be chatted with."""

    folder: Path  # of a run, of Hugging Face, or a checkpoint
    run: Path | None = None  # whose checkpoint it is


def known(board: Board) -> dict[str, Model]:
    """Return models by name: runs that have exported their model, checkpoints, and Hugging Face folders among the
    board's folders and directly in them. Reward models are left out."""
    models = {}
    for name, run in board.runs().items():
        if safe_files.within(run.folder, "hf") and _talks(run.folder / "hf"):
            models[name] = Model(run.folder)
        if safe_files.within(run.folder, "checkpoints") and run.stage != "rm":
            steps = sorted((run.folder / "checkpoints").glob("step-*[0-9]"))
            models |= {f"{name} {folder.name}": Model(folder, run.folder) for folder in steps}
    for root in board.folders:
        with suppress(OSError):  # gone since
            inside = sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink())
            models |= {str(path): Model(path) for path in (root, *inside) if _talks(path)}
    return models


def _talks(folder: Path) -> bool:
    """Return whether the folder has a language model, by its config.json."""
    with suppress(OSError, AlignerError):
        config = parse_json(
            safe_files.content(folder, "config.json", safe_files.CONFIG_BYTES), "config.json", AlignerError, nan=True
        )
        return isinstance(config, dict) and "Classification" not in str(config.get("architectures"))
    return False


@dataclass
class ServedModel:
    """A model that is served. For a checkpoint, its process is first the export of the model."""

    process: subprocess.Popen | None
    folder: tempfile.TemporaryDirectory  # the process's log, and the model that was exported for it
    plain: bool = False
    model: Model | None = None  # to be started
    _url: str = ""
    _over: bool = False  # closed, or failed to start
    _lock: threading.Lock = field(default_factory=threading.Lock)  # held while its address is awaited
    _starting: threading.Lock = field(default_factory=threading.Lock)  # held while its process starts

    @property
    def lives(self) -> bool:
        return not self._over and (self.model is not None or self.process is None or self.process.poll() is None)

    def url(self) -> str:
        """Return the address once the model answers. Raises AlignerError with the process's last words if it ends
        before."""
        with self._lock:
            if self.model is not None:
                try:
                    self._start(self.model)
                except BaseException:
                    self._over = True
                    raise
                self.model = None
            assert self.process is not None and self.process.stdout is not None
            for line in self.process.stdout if not self._url else ():
                if line.startswith("http://"):  # the first line that it prints
                    self._url = line.partition(": ")[0]
                    break
        if not self._url:
            self.process.wait()
            raise AlignerError(self.last_words())
        return self._url

    def _start(self, model: Model) -> None:
        home, hf = Path(self.folder.name), next(path for path in (model.folder / "hf", model.folder) if path.is_dir())
        log, source = home / "log", [str(model.folder)]
        with log.open("wb") as output:
            if model.run is not None:
                hf = home / "hf"
                if self._run(["export", *source, str(hf)], output, output).wait():
                    raise AlignerError(self.last_words())
                source = ["--frozen", str(model.run / FILE_NAME), str(hf)]
            if has_template(hf):
                self.plain = False
            else:
                self.plain = True
                (home / "plain.jinja").write_text(PLAIN, encoding="utf-8")
                source.append(f"data.chat_template={quoted(str(home / 'plain.jinja'))}")
            self._run(["serve", "--port", "0", *source], subprocess.PIPE, output)

    def _run(self, argv: Sequence[str], stdout: Any, stderr: Any) -> subprocess.Popen:
        with self._starting:
            if self._over:
                raise AlignerError("it was closed")
            self.process = _STARTER.submit(_with_the_board, command(argv), stdout, stderr).result()
        return self.process

    def last_words(self) -> str:
        try:
            return _last(tail(Path(self.folder.name) / "log"))
        except FileNotFoundError:
            return "it was closed"

    def close(self) -> None:
        with self._starting:
            self._over = True
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.folder.cleanup()


@dataclass
class ServedModels:
    """Open models by name. Calls come from several threads, and none waits for another one's start."""

    by_name: dict[str, ServedModel] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self, name: str, model: Model) -> ServedModel:
        """Return once the model answers. Raises AlignerError, also if it is closed meanwhile."""
        with self._lock:
            for ended in self.by_name.keys() - self.living():
                self._close(ended)
            if name not in self.by_name:
                if len(self.by_name) >= MOST:
                    raise AlignerError(f"{name!r}: expected at most {MOST} models at a time; close one first")
                self.by_name[name] = ServedModel(None, tempfile.TemporaryDirectory(prefix="aligner-chat-"), model=model)
            talk = self.by_name[name]
        talk.url()
        return talk

    def living(self) -> list[str]:
        return [name for name, talk in list(self.by_name.items()) if talk.lives]

    def close(self, *names: str) -> None:
        """Close the named models, or all without names."""
        with self._lock:
            for name in names or list(self.by_name):
                self._close(name)

    def _close(self, name: str) -> None:
        if (talk := self.by_name.pop(name, None)) is not None:
            talk.close()

    def say(self, name: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield {"text"} as it comes, then {"tokens": texts, "logprobs", "reason"}. Raises AlignerError."""
        talk = self.by_name.get(name)
        if talk is None:
            raise DataError(f"{name!r}: expected a model that is open")
        url = talk.url()
        with httpx.Client(trust_env=False, timeout=None) as client:
            try:
                served = _event(client.get(f"{url}/models").read()).list("data")[0]["id"]
                body = {"model": served, "stream": True, "logprobs": True} | body
                with client.stream("POST", f"{url}/chat/completions", json=body) as reply:
                    yield from _stream(reply)
            except httpx.HTTPError as error:
                raise AlignerError(f"{name}: {type(error).__name__}: {talk.last_words()}") from None


def has_template(hf: Path) -> bool:
    if any((hf / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    config = hf / "tokenizer_config.json"
    return config.is_file() and "chat_template" in read_record(config, AlignerError)


def _with_the_board(argv: Sequence[str], stdout: Any, stderr: Any) -> subprocess.Popen:
    """Start a process that ends with this one, in any case."""
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
    )


def _last(text: str) -> str:
    """Return the last line of a command's output."""
    return (text.strip().splitlines() or ["it ended without a message"])[-1].removeprefix("error: ")


def _stream(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    if reply.status_code != 200:
        raise AlignerError(_event(reply.read()).record("error").text("message"))
    ended: dict[str, Any] = {"tokens": [], "logprobs": [], "reason": ""}
    for line in reply.iter_lines():
        data = line.removeprefix("data: ")
        if not data or data == "[DONE]":
            continue
        event = _event(data.encode())
        if "error" in event:
            raise AlignerError(event.record("error").text("message"))
        (choice,) = event.list("choices")
        if text := choice["delta"].get("content"):
            yield {"text": text}
        tokens = (choice.get("logprobs") or {}).get("content", [])
        ended["tokens"] += [one["token"] for one in tokens]
        ended["logprobs"] += [one["logprob"] for one in tokens]
        ended["reason"] = choice["finish_reason"] or ended["reason"]
    yield ended


def _event(data: bytes) -> JsonObject:
    return record(parse_json(data, "aligner serve", AlignerError, nan=True), "aligner serve", AlignerError)


# --- endpoints

TALKS = ServedModels()  # of this process


def talks(board: Board, request: JsonObject) -> Any:
    return {"models": list(known(board)), "open": TALKS.living()}


def open_talk(board: Board, request: JsonObject) -> Any:
    """Open a model. `plain`: it has no chat template."""
    name, models = request.text("model"), known(board)
    if name not in models:
        raise DataError(f"model={name!r}: expected one of the board's {len(models)} models")
    return {"plain": TALKS.open(name, models[name]).plain}


def close_talk(board: Board, request: JsonObject) -> Any:
    TALKS.close(request.text("model"))
    return {}


def say(board: Board, request: JsonObject) -> Any:
    body = {name: request.fields[name] for name in ("messages", *SAMPLING) if name in request}
    return TALKS.say(request.text("model"), body)
