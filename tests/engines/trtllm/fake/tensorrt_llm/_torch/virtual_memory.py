"""Memory by tag. One executor per process here, the last one made."""

from tensorrt_llm._torch.pyexecutor.py_executor import LATEST
from tensorrt_llm.calls import note
from tensorrt_llm.llmapi.llm_args import ExecutorMemoryType


def release_with_tag(*tags: ExecutorMemoryType) -> int:
    return _change("release", tags, False)


def materialize_with_tag(*tags: ExecutorMemoryType) -> int:
    return _change("materialize", tags, True)


def _change(name: str, tags: tuple, there: bool) -> int:
    tags = tuple(ExecutorMemoryType(tag) for tag in tags)  # enum members and their names
    note(name, " ".join(tag.value for tag in tags))
    executor = LATEST[-1]
    executor.require_control(name)
    if not executor.args.sleeps:
        raise RuntimeError("the engine was created without sleep")
    if any(tag.value.startswith("_") for tag in tags):
        raise ValueError(f"{tags}: a mark of the start is no tag to {name}")
    for tag in tags:
        if (tag.value in executor.away) == (not there):
            raise RuntimeError(f"{name} of {tag.value} in that state")
        (executor.away.discard if there else executor.away.add)(tag.value)
        if tag.value == "model_weights":
            executor.model_engine.model.mapped = there
            if executor.args.restore_mode(tag) == "NONE":
                executor.model_engine.model.forget()
        if tag is ExecutorMemoryType.KV_CACHE:
            executor.kv_there = there
            if there:
                executor.kv_dirty = bool(executor.prefixes)
    return len(tags)
