"""The environment that `openenv init` makes, unchanged, behind its own server."""

import sys
import threading
import time
from pathlib import Path

import pytest

from aligner.answers import AnswerLog
from aligner.config.sections.environment import EnvironmentConfig
from aligner.environments.pool import Pool, Session
from aligner.environments.tools import load_tools, schemas
from aligner.errors import EnvironmentCodeError

PATH = "aligner.environments.openenv:OpenEnv"


@pytest.fixture
def url(tmp_path, monkeypatch):
    """Of a server with one session at a time, which the next one may have to wait for."""
    openenv, uvicorn = pytest.importorskip("openenv"), pytest.importorskip("uvicorn")
    template = Path(openenv.__file__).parent / "cli" / "templates" / "openenv_env"
    for name in ("models.py", "server/app.py", "server/__ENV_NAME___environment.py"):
        text = (template / name).read_text().replace("__ENV_NAME__", "echoing").replace("__ENV_CLASS_NAME__", "Echoing")
        copy = tmp_path / "echoing" / name.replace("__ENV_NAME__", "echoing")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    from echoing.server.app import app

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + 120
    while not server.started and time.monotonic() < until:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(120)
    for name in [name for name in sys.modules if name.partition(".")[0] == "echoing"]:
        del sys.modules[name]


def test_sessions_are_played_and_given_back(url, tmp_path):
    cfg = EnvironmentConfig(path=PATH, args={"url": url, "show": "echoed_message"}, workers=1, retries=50)
    reported = schemas(load_tools(cfg))
    pool = Pool(cfg, reported, AnswerLog(tmp_path, 0))
    for number in ("1", "2"):
        session = Session(number, 3, {}, logged=False)
        opening = pool.ask(session, "reset", seed=3, row={"answer": 1}).result(300)["value"]
        first, *fields = opening.splitlines()
        assert first.endswith("environment ready!")
        assert fields == ["Fields of an action: message (string): Message to echo back"]
        calls = [{"name": "act", "arguments": {"action": action}} for action in ({"message": "hello"}, {"text": "x"})]
        result = pool.ask(session, "turn", calls=calls).result(300)["value"]
        assert result["texts"][0] == "hello" and result["reward"] == 0.5 and not result["done"]
        assert result["texts"][1].startswith("error: Server error: ") and "message" in result["texts"][1]
        assert pool.ask(session, "score").result(300)["value"] == 0.0  # all of it is in the turns
        pool.forget(session)


def test_without_the_package_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "openenv", None)
    monkeypatch.setitem(sys.modules, "openenv.core.generic_client", None)
    monkeypatch.delitem(sys.modules, "aligner.environments.openenv", raising=False)
    with pytest.raises(EnvironmentCodeError, match=r"environment\.path=.*pip install 'aligner\[openenv\]'"):
        load_tools(EnvironmentConfig(path=PATH))
