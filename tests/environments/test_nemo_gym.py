"""An environment of NeMo-Gym, unchanged, on its own resources server. The model is a server with a script."""

import asyncio
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture
def counter(monkeypatch):
    """The address of the package's example of a server with state, and a row of its data."""
    pytest.importorskip("nemo_gym")
    uvicorn = pytest.importorskip("uvicorn")
    from nemo_gym.config_types import BaseServerConfig
    from nemo_gym.server_utils import ServerClient
    from omegaconf import OmegaConf
    from resources_servers.example_session_state_mgmt import app

    here = {"host": "127.0.0.1", "port": 1}
    nobody = ServerClient(head_server_config=BaseServerConfig(**here), global_config_dict=OmegaConf.create({}))
    config = app.StatefulCounterResourcesServerConfig(**here, entrypoint="", name="counter")
    made = app.StatefulCounterResourcesServer(config=config, server_client=nobody)
    server = uvicorn.Server(uvicorn.Config(made.setup_webserver(), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + 120
    while not server.started and time.monotonic() < until:
        time.sleep(0.01)
    row = json.loads((Path(app.__file__).parent / "data" / "example.jsonl").read_text().splitlines()[0])
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", row
    server.should_exit = True
    thread.join(120)


def completion(text, *calls):
    called = [
        {"id": f"call-{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": text} | ({"tool_calls": called} if calls else {})
    return 200, {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}]}


def test_its_calls_sessions_and_verdicts(counter, server):
    """From three to the six that the row expects, or not; each trajectory counts alone."""
    from aligner.environments.nemo_gym import play

    url, row = counter
    assert (row["initial_count"], row["expected_count"]) == (3, 6)
    add = [("increment_counter", '{"count": 1}'), ("increment_counter", '{"count": 2}')]
    wrong = [("verify", "{}"), ("increment_counter", '{"count"')]
    task = SimpleNamespace(messages=row["responses_create_params"]["input"], row=row, seed=1)

    def played(*replies):
        script = iter(replies)
        server.bodies.clear()
        server.reply = lambda body: next(script)
        return asyncio.run(play(task, f"{server.base_url}/v1", {"model": "policy", "max_tokens": 9}, url))

    assert played(completion("", *add), completion("", ("get_counter_value", "{}")), completion("Six.")) == 1.0
    first, second, third = server.bodies
    assert first["max_tokens"] == 9 and [tool["function"]["name"] for tool in first["tools"]] == [
        "increment_counter",
        "get_counter_value",
    ]
    assert [one["content"] for one in second["messages"][-2:]] == ['{"success":true}'] * 2
    assert third["messages"][-1] == {"role": "tool", "tool_call_id": "call-0", "content": '{"count":6}'}
    assert played(completion("", add[0]), completion("Four.")) == 0.0
    assert played(completion("", *add, *wrong), (400, {})) == 1.0  # refused by a limit, and verified all the same
    assert played(completion("", *wrong), completion("?")) == 0.0
    texts = [one["content"] for one in server.bodies[1]["messages"][-2:]]
    assert "there is no tool 'verify'" in texts[0] and "Invalid tool call arguments" in texts[1]
