"""The vLLM engine over the real package, in the environment of `launchers/engine_env.sh vllm`. One process serves all
engines of a test session, one after the other: starting vLLM takes longer than anything that is tested."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import tempfile
from dataclasses import replace
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

import aligner.engines.child.engine as child
from aligner.config.sections.engine import EngineConfig
from aligner.config.sections.model.latent import LatentConfig
from aligner.config.sections.model.linear import LinearConfig
from aligner.config.sections.model.rope import RopeScalingConfig
from aligner.config.sections.vllm import VllmConfig
from aligner.engines.child.buckets import MemoryFile
from aligner.engines.child.process import clean_environment, interpreter
from aligner.engines.vllm.engine import VARIABLES, VllmEngine
from aligner.families import served_by
from tests import tiny
from tests.engines import contract
from tests.engines.vllm.lent import fork

PYTHON = Path(__file__).parents[3] / VllmConfig().python
REASON = "vLLM's environment is missing (./launchers/engine_env.sh vllm makes it)"
needs_vllm = pytest.mark.skipif(not PYTHON.exists() and os.environ.get("ALIGNER_TEST_ALL") != "1", reason=REASON)


CREATE = MemoryFile.create

# with linear layers only in bfloat16, of heads of 64 and more
LINEAR = {
    name: replace(
        tiny.MORE[name],
        vocab_size=53,
        hidden_size=128,
        head_dim=32,
        max_position=512,
        tie_embeddings=name == "qwen3_5",
        linear=LinearConfig(2, 4, 64, 64, 4, attention_every=2),
    )
    for name in ("qwen3_5", "qwen3_5_moe", "qwen3_next")
}
# what its CPU build lacks is in stand_ins.py
LACKING = ("nemotron_h", "deepseek_v32", "glm_moe_dsa")
MAMBA = LinearConfig(2, 4, 16, 32, 4, rule="mamba2")
# its kernels on a CPU know no heads narrower than 32, its Qwen 2 none but the hidden size's share
FURTHER = {
    name: replace(tiny.MORE[name], vocab_size=53)
    for name in (*served_by("vllm"), "gemma4-experts", "gemma4-inputs", "nemotron_h-dense")
    if name in tiny.MORE and name not in LINEAR
}
for name in ("gemma4-experts", "gemma4-inputs"):
    attention = replace(FURTHER[name].attention, global_head_dim=64)
    FURTHER[name] = replace(FURTHER[name], attention=attention)
for name in ("deepseek_v3", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa"):
    latent, indexer = LatentConfig(512, 20, plain_dim=12, rotary_dim=64, value_dim=10), FURTHER[name].indexer
    if indexer.heads:  # which choose all tokens of the tests' rows
        indexer = replace(indexer, head_dim=128, top_k=64)
    FURTHER[name] = replace(FURTHER[name], latent=latent, indexer=indexer, tie_embeddings=False)
FURTHER["glm4_moe_lite"] = replace(FURTHER["glm4_moe_lite"], rope_scaling=RopeScalingConfig())  # as published
for name in ("nemotron_h", "nemotron_h-dense"):
    FURTHER[name] = replace(FURTHER[name], linear=MAMBA)
moe = replace(FURTHER["gpt_oss"].moe, ffn_hidden_size=64)
FURTHER["gpt_oss"] = replace(FURTHER["gpt_oss"], norm_eps=1e-5, tie_embeddings=False, moe=moe)
FURTHER["phi3"] = replace(FURTHER["phi3"], rope_scaling=RopeScalingConfig())  # its factors are of a narrower head
MODELS = {
    name: replace(cfg, hidden_size=128, head_dim=0 if cfg.latent.kv_rank else 32)
    for name, cfg in (contract.MODELS | FURTHER).items()
}
LLAMA = MODELS["llama"]


class Lent:
    """A connection and its child that outlive an engine: what would end them is kept back, and an engine like the last
    one is the last one."""

    def __init__(self, child, connection: Connection):
        self.child, self.connection, self.asked, self.answer = child, connection, None, None

    def send(self, message):
        name, arguments = message
        self.known = False
        if name == "start":
            config = (Path(arguments[0].folder) / "config.json").read_text()
            asked = config, replace(arguments[0], folder="")
            self.known, self.asked = self.answer is not None and asked == self.asked, asked
        if name != "close" and not self.known:
            self.connection.send(message)

    def poll(self, seconds):
        return self.known or self.connection.poll(seconds)

    def recv(self):
        if self.known:
            return self.answer
        content = self.connection.recv()
        if isinstance(content[1], dict) and "score_rows" in content[1]:
            self.answer = content
        return content

    def close(self): ...

    def stop(self, wait_s):
        if not wait_s:  # it hangs
            self.child.stop(0)

    def ended(self):
        return self.child.ended()

    def last_words(self):
        return self.child.last_words()


class Kept(MemoryFile):
    def close(self): ...

    def __reduce__(self):
        return MemoryFile, (self.size, self.fd, self.pid)


@cache
def server() -> str:
    """The path of the server that forks engines (see lent.py), which ends with this process. Its cache is new."""
    folder = tempfile.TemporaryDirectory(prefix="vllm-")
    environ = clean_environment(os.environ, VARIABLES | {"VLLM_CACHE_ROOT": folder.name, "OMP_NUM_THREADS": "1"})
    executable, environ = interpreter(str(PYTHON), environ, VllmConfig.KEY)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder.name}/socket")
        listener.listen()
        command = [executable, "-m", "tests.engines.vllm.lent", str(listener.fileno())]
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
        process = subprocess.Popen(command, env=environ, pass_fds=[listener.fileno()], **streams)
    atexit.register(folder.cleanup)
    atexit.register(process.communicate)
    return f"{folder.name}/socket"


class Shared:
    """An engine's process that other engines take over, and the memory that all get their weights through."""

    lent: Lent | None = None
    file: MemoryFile | None = None

    @classmethod
    def start(cls, device, python):
        if cls.lent is None or cls.lent.ended():
            engine = VllmEngine.__new__(VllmEngine)
            engine.options, engine.device = VllmConfig(), torch.device("cpu")
            engine._group, engine._devices = None, [""]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(child, "spawn", partial(fork, server()))
                cls.lent = Lent(*engine._process(torch.device("cpu"), python))
            atexit.register(cls.lent.child.stop, 0)
        return cls.lent, cls.lent

    @classmethod
    def memory(cls, size):
        if cls.file is None:
            cls.file = CREATE(1 << 26)
        assert size <= cls.file.size
        return Kept(size, cls.file.fd, cls.file.pid)


def make_engine(cfg, decode=None, *, process=False, kind=VllmEngine, start=Shared.start, bucket_bytes=2048, **config):
    options = {k: config.pop(k) for k in list(config) if k in VllmConfig.__dataclass_fields__}
    fields = {k: config.pop(k) for k in ("checksums", "dtype", "group", "max_seq_len") if k in config}
    settings = EngineConfig(name="vllm", vllm=VllmConfig(**options), **{"kv_cache_bytes": 1 << 24, **config})
    fields = {
        "dtype": torch.float32,
        "device": "cpu",
        "pad_id": 0,
        "decode": decode,
        "bucket_bytes": bucket_bytes,
        **fields,
    }
    if process:
        return kind(cfg, settings, **fields)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child.MemoryFile, "create", Shared.memory)
        return kind(cfg, settings, start=start, **fields)
