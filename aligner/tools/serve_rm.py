"""`aligner serve-rm RUN`: a trained reward model over HTTP, in the format of OpenRLHF's servers, for reward `http`.

POST anywhere: {"query": [prompt + response], "prompts": [...]} -> {"rewards", "scores": [...], "extra_logs"}

Scores are those of `reward.model`: centred and scaled. Tokens are the same too, if a query begins with its prompt and
the tokenizer encodes its own text alike. One process, one request at a time; no key. By default it listens on the
loopback, and answers only this machine's own names, so that no page in a browser can use it.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import socket
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from aligner.builders.job import Job, start
from aligner.builders.models import make_reward_model
from aligner.cluster.env import RankEnv
from aligner.config.schema import Config, StageConfig
from aligner.config.sections.debug import DebugConfig
from aligner.config.sections.engine import EngineConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.config.sections.rewards import RewardConfig
from aligner.errors import DataError
from aligner.foreign import parse_json
from aligner.megatron.groups import leave_distributed
from aligner.tools.generate import model_folder
from aligner.types import Prompt, Sample

MAX_BYTES = 64 << 20  # of a request
DIGITS = 19  # of its length
IDLE_S = 60.0  # for which a client may be silent


def main(cfg: Config, host: str, port: int) -> int:
    """Serve until interrupted."""
    job, answer = scorer(cfg)
    try:
        with server(answer, host, port) as serving:
            print(f"http://{host}:{serving.server_address[1]}: scores by {job.cfg.reward.model}", flush=True)
            serving.serve_forever()
    finally:
        leave_distributed()
    return 0


def scorer(cfg: Config) -> tuple[Job, Any]:
    """Load the reward model of a run on this process alone, as a function of the body of a request."""
    folder = str(model_folder(cfg))
    model = dataclasses.replace(cfg.model, init=folder, tokenizer="")
    alone = {"parallel": ParallelConfig(), "engine": EngineConfig(), "debug": DebugConfig()}
    reward = RewardConfig(model=folder, model_standardize=cfg.reward.model_standardize)
    job = start(dataclasses.replace(cfg, model=model, stage=StageConfig("rm"), reward=reward, **alone), RankEnv())
    scores, one_at_a_time = make_reward_model(job), threading.Lock()
    assert scores is not None

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        queries, prompts = _texts(body, "query"), _texts(body, "prompts") if body.get("prompts") else []
        if prompts and len(prompts) != len(queries):
            raise DataError(f"prompts: expected {len(queries)}, one for each query, found {len(prompts)}")
        samples = [_sample(job.tokenizer, q, p) for q, p in zip(queries, prompts or [""] * len(queries), strict=True)]
        limit = job.initial.config.max_position
        for number, sample in enumerate(samples):
            if not 0 < len(sample.prompt.tokens + sample.tokens) <= limit:
                count = len(sample.prompt.tokens + sample.tokens)
                raise DataError(f"query[{number}]: expected 1 to {limit} tokens (model.max_position), found {count}")
        with one_at_a_time:
            totals = scores(samples)
        return {"rewards": totals, "scores": totals, "extra_logs": {}}

    return job, answer


def _texts(body: dict[str, Any], name: str) -> list[str]:
    texts = body.get(name) if isinstance(body, dict) else None
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise DataError(f"{name}: expected a list of texts, found {str(texts)[:80]!r}")
    return texts


def _sample(tokenizer: Any, query: str, prompt: str) -> Sample:
    """Return the sample, ended with EOS like one that was generated to its end."""
    prompt = prompt if query.startswith(prompt) else ""
    head, tail = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, query[len(prompt) :]))
    if not tail or tail[-1] != tokenizer.eos_token_id:
        tail = [*tail, tokenizer.eos_token_id]
    return Sample(Prompt(0, tuple(head), prompt), 0, query[len(prompt) :], tuple(tail), True)


def names(host: str) -> set[str]:
    """Return the names by which clients may ask a server that listens there, beside numeric addresses. A page in a
    browser may point its own name here, and has no other way to reach this machine."""
    known = {"localhost", host.lower()}
    if not is_address(host) or not ipaddress.ip_address(host).is_loopback:
        known |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    return known


def is_address(text: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(text))
    return False


def server(answer: Any, host: str, port: int) -> ThreadingHTTPServer:
    """Return the server."""
    known = names(host)

    class Handler(BaseHTTPRequestHandler):
        timeout = IDLE_S

        def do_POST(self) -> None:
            try:
                status, body = self.answered()
                data = json.dumps(body, allow_nan=False).encode()
            except DataError as error:
                status, data = 400, json.dumps({"error": str(error)}).encode()
            except OSError:  # of the connection: nobody can be answered
                raise
            except Exception as error:  # no number, or a device without memory
                print(f"warning: no score: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                status, data = 500, json.dumps({"error": f"no score: {type(error).__name__}"}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def answered(self) -> tuple[int, dict[str, Any]]:
            name, length = _name(self.headers.get("Host", "")), self.headers.get("Content-Length", "")
            if not is_address(name) and name not in known:
                expected = f"one of {', '.join(sorted(known))}, or an address; --host gives a further name"
                return 421, {"error": f"Host={name[:80]!r}: expected {expected}"}
            if not (length.isascii() and length.isdigit() and len(length) <= DIGITS and int(length) <= MAX_BYTES):
                return 413, {"error": f"Content-Length={length[:80]!r}: expected at most {MAX_BYTES} bytes"}
            return 200, answer(parse_json(self.rfile.read(int(length)), "the request", DataError))

        def log_message(self, *args: Any) -> None:
            """Print no line for a request."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, *unused: Any) -> None:
            """Ignore a client that leaves; print one line for any other error."""
            error = sys.exception()
            if not isinstance(error, ConnectionError | TimeoutError):
                print(f"warning: a request was not answered: {type(error).__name__}: {error}", file=sys.stderr)

    return Server((host, port), Handler)


def _name(host: str) -> str:
    """Return the name of a header `Host`: without its port, and without the brackets of an IPv6 address."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].rstrip(".")
