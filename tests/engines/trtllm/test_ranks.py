"""A TensorRT-LLM engine of several ranks over the strict fake: a real child process of each rank."""

import os
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist

from aligner.config.resolve import compose
from aligner.config.validate import validate_engines
from aligner.config.validate_model import check_node
from aligner.engines.trtllm.torch_worker import Worker
from aligner.errors import ConfigError, EngineError, LayoutError, RefitError
from aligner.ops.kernels.checksum import tensor_checksum
from aligner.types import SamplingParams
from tests.engines.contract import LLAMA, PROMPTS, check_logprobs, fill, reference, seeds_for
from tests.engines.trtllm.setup import FAKE, ROOT, make_engine
from tests.ranks import on_ranks
from tests.tiny import hf_weights


def of_ranks(body):
    return pytest.mark.slow(pytest.mark.multirank(on_ranks(2)(body)))


@contextmanager
def engine_of_all(folder: Path, node: str = "one", **settings: str):
    """One engine of all ranks, whose children have the fake's `settings`, with `rank1_` those of rank 1 alone. This
    rank seems to be on `node`."""
    rank = dist.get_rank()
    settings = {n.removeprefix("rank1_"): v for n, v in settings.items() if rank or not n.startswith("rank1_")}
    settings |= {"log": str(folder / f"log{rank}")}
    environ = {f"FAKE_TRTLLM_{name.upper()}": value for name, value in settings.items()}
    environ["PYTHONPATH"] = os.pathsep.join([str(FAKE), str(ROOT)])
    on_node = patch("aligner.engines.child.engine.node", lambda: node)
    with patch.dict(os.environ, environ), patch("aligner.engines.trtllm.torch_backend.require_package"), on_node:
        engine = make_engine(LLAMA, tensor_parallel=2, process=True, group=dist.group.WORLD)
        yield engine
        engine.close()


def calls(folder: Path) -> list[str]:
    return [line.split()[0] for line in (folder / f"log{dist.get_rank()}").read_text().splitlines()]


@of_ranks
def test_ranks_hold_shares_and_generate_together(tmp_path):
    model, other, sampling = reference(LLAMA), reference(LLAMA, 1), SamplingParams(7, top_k=20)
    with engine_of_all(tmp_path) as engine:
        for number, weights in enumerate((model, other)):
            fill(engine, weights, number)  # every rank starts with the prefixes of the one before
            assert dict(engine.checksums()) == {n: tensor_checksum(t) for n, t in hf_weights(weights).items()}
            out = engine.generate(PROMPTS, seeds_for(PROMPTS), sampling)
            check_logprobs(weights, PROMPTS, 1, replace(out, logprobs=out.full_logprobs))
            engine.sleep()
            engine.wake()
        child = engine._channel.child.process
    assert child.poll() == 0  # both end well
    own = [call for call in calls(tmp_path) if call not in ("run", "reload")]
    sweep = ["begin", "modules", "finalize", "modules", "reset_prefix_cache"]
    scores = ["reset_prefix_cache"] * 2 * len(PROMPTS)  # the rows of both ranks
    moves = ["release", "materialize", "reset_prefix_cache"]
    assert own == ["LLM", *2 * [*sweep, *scores, *moves], "shutdown"]


@of_ranks
def test_the_end_of_one_process_ends_all_and_is_told_on_all_ranks(tmp_path):
    with engine_of_all(tmp_path, rank1_crash="run:2") as engine:
        fill(engine, reference(LLAMA))
        assert len(engine.generate([[1]], [[0]], SamplingParams(2)).tokens) == 1
        for _ in range(2):
            with pytest.raises(EngineError, match=r"(?s)ended by signal 6 in generate.*illegal memory access"):
                engine.generate([[1]], [[0]], SamplingParams(2))
        with pytest.raises(RefitError, match="ended by signal 6"):
            engine.begin_update(2)
        how = "ended by signal 6" if dist.get_rank() else "ended with exit code 76"
        assert engine._channel.child.ended() == how


@of_ranks
def test_an_error_of_one_rank_fails_the_update_on_all(tmp_path):
    """Of ranks on two nodes, which meet by the name of the first one's."""
    model = reference(LLAMA)
    with engine_of_all(tmp_path, f"node {dist.get_rank()}", rank1_raise="reload:2") as engine:
        assert not engine._on_one_node
        with pytest.raises(RefitError, match="bucket failed: RuntimeError: out of memory in reload"):
            fill(engine, model)
        with pytest.raises(RefitError, match="no complete weights"):
            engine.generate([[1]], [[0]], SamplingParams(1))
        out = fill(engine, model, 2).generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(4))
        check_logprobs(model, PROMPTS, 1, out)
        assert calls(tmp_path).count("abort") == 1


@of_ranks
def test_a_control_action_that_one_rank_stays_out_of_is_refused(tmp_path):
    """By the fake: a package's executors would wait for it."""
    with engine_of_all(tmp_path, action_s="1") as engine:
        engine._ledger.begin(1)
        failed = "begin failed: RuntimeError: not all ranks entered control action 1"
        with pytest.raises(RefitError, match=failed) if dist.get_rank() == 0 else nullcontext():
            if dist.get_rank() == 0:
                engine._channel.call("begin", timeout_s=100, key="", error=RefitError)
        dist.barrier()


@of_ranks
def test_a_start_that_fails_on_one_rank_fails_on_all(tmp_path):
    """At once: the first rank waits in its start for the other, as long as it may."""
    wanted = pytest.raises(EngineError, match="start failed: RuntimeError: out of memory in LLM")
    with wanted, engine_of_all(tmp_path, rank1_raise="LLM"):
        pass


@of_ranks
def test_a_version_whose_ranks_cannot_be_started_one_by_one(tmp_path):
    expected = r"engine.tensor_parallel=2: expected 1 with TensorRT-LLM 1.2.1.*The doctor names what is missing"
    with pytest.raises(ConfigError, match=expected), engine_of_all(tmp_path, version="1.2.1"):
        pass


def test_replicas_have_one_size_and_equal_parts_on_nodes_where_they_share_memory():
    several = ["stage=grpo", "engine=trtllm", "engine.tensor_parallel=4"]
    check_node(compose(several), range(2), 4)
    check_node(compose([*several, "engine.ranks=4"]), range(4), 6)
    with pytest.raises(LayoutError, match=r"engine.tensor_parallel=4: .*trtllm and engine.ranks: ranks 0 to 4, of a"):
        check_node(compose([*several, "engine.ranks=4"]), range(5), 6)
    with pytest.raises(LayoutError, match=r"engine.tensor_parallel=4: expected a divisor of .*6"):
        validate_engines(compose(several), 6)


def test_an_orphan_of_several_ranks_does_not_close_its_engine():
    worker = Worker.__new__(Worker)
    worker.line, worker.llm = Mock(), Mock()
    worker.line.end.side_effect = SystemExit
    with pytest.raises(SystemExit):
        worker.orphaned()
    assert not worker.llm.method_calls and [call[0] for call in worker.line.method_calls] == ["end"]
