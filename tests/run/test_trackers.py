"""Trackers: each package's own reader finds every step once and in order, over a resume, and the samples as tables. The
packages are real, and without a network."""

from __future__ import annotations

import ast
import json
import math
import struct
import sys
import time
from pathlib import Path

import pytest

from aligner.config.sections.logging import TRACKERS, LoggingConfig
from aligner.errors import ConfigError, MissingExtraError, TrackerCodeError
from aligner.run.metrics import MetricsLogger, read_jsonl
from aligner.run.trackers.sending import FILE, check
from tests import stages
from tests.needs import lacking

FOLDER = Path(__file__).parents[2] / ".trackers-python"  # made by launchers/te_python.sh
CONFIG = {"seed": 7, "model": {"init": "x" * 9}, "sampling": {"stop": []}}
STEPS = range(1, 8)  # of the first start; its checkpoint is of step 4


@pytest.fixture
def packages(tmp_path, monkeypatch):
    if not FOLDER.exists():
        lacking("the packages of trackers are not in .trackers-python: launchers/te_python.sh")
    monkeypatch.syspath_prepend(sys.path[0])  # restores the path at the end
    sys.path.append(str(FOLDER))
    for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "SWANLAB_API_KEY", "SWANLAB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "SWANLAB_SAVE_DIR", "TRACKIO_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_SILENT", "true")


def sample(step: int) -> dict:
    scores = {"right": float(step), "short": None}
    texts = {"prompt": "a | b", "response": f"<b>{step}</b>\nand more"}
    return texts | {"step": step, "reward": 0.5, "advantage": None, "finished": True, "scores": scores}


def train(log: MetricsLogger, resumed: int, steps: range, offset: float = 0.0) -> None:
    log.resume_at(resumed)
    for step in steps:
        log.log(step, {"sft/loss": step + offset, "eval/pass@2": step / 4, "nothing": math.nan})
        if step % 2 == 0:
            log.samples(step, [sample(step), sample(step)])
        log.log(step, {"time/save_s": 0.25})
    log.close()


def wandb_records(path: Path):
    """All records of a file, once the last one is there: another process writes them."""
    until = time.monotonic() + 60
    while True:
        records = list(wandb_log(path))
        if any(one.HasField("exit") for one in records) or time.monotonic() > until:
            return records
        time.sleep(0.1)


def wandb_log(path: Path):
    """The records of a log in LevelDB's format: blocks of 32 KiB, in which a piece has crc, length and type."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def read_tensorboard(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    texts = {e.step: e.tensor_proto.string_val[0].decode() for e in events.Tensors("samples/text_summary")}
    assert "seed: 7" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "nothing" not in events.Tags()["scalars"]
    assert (
        texts[2].splitlines()[0] == "| prompt | response | reward | advantage | finished | score/right | score/short |"
    )
    row = "| a &#124; b | &lt;b&gt;2&lt;/b&gt;<br>and more | 0.5 | None | True | 2 | None |"
    assert texts[2].splitlines()[2:] == [row, row]
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}, set(texts)


def read_wandb(folder: Path):
    files = sorted((folder / "wandb").rglob("*.wandb"))
    kept, tables, ids = {}, {}, set()
    for record in (one for path in files for one in wandb_records(path)):
        if record.HasField("run"):
            ids.add(record.run.run_id)
            assert record.run.display_name == "run"
        items = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
        step = items.pop("_step", record.history.step.num)
        for name, value in items.items():
            if name.startswith("samples"):
                tables[step] = value
            elif not name.startswith("_"):
                kept.setdefault(name, []).append((step, value))
    assert len(files) == 2 and ids == {json.loads((folder / FILE).read_text())["id"]}
    stored = [json.loads(path.read_text()) for path in (folder / "wandb").rglob("*.table.json")]
    assert {"prompt", "score/right"} < set(stored[0]["columns"]) and stored[0]["data"][0][0] == "a | b"
    return kept, set(tables)


def read_mlflow(folder: Path):
    import mlflow

    client = mlflow.MlflowClient((folder / "mlflow").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert run.data.params["model.init"] == "x" * 9 and run.data.params["sampling.stop"] == "[]"
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    files = [file.path for file in client.list_artifacts(run.info.run_id, "samples")]
    stored = mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/{files[0]}")
    assert stored["columns"][-2:] == ["score/right", "score/short"] and stored["data"][1][-2:] == [2.0, None]
    kept = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    values = {name: [(m.step, m.value) for m in history] for name, history in kept.items()}
    values["eval/pass@2"] = values.pop("eval/pass_2")
    return values, {int(Path(file).stem) for file in files}


def read_trackio(folder: Path):
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = SQLiteStorage.get_run_records("mine")
    assert (folder / "trackio" / "mine.db").exists()
    kept, tables = {}, {}
    for row in SQLiteStorage.get_logs("mine", run["name"], run_id=run["id"]):
        for name, value in row.items():
            if name == "samples":
                tables[row["step"]] = value["_value"]
            elif name not in ("step", "timestamp"):
                kept.setdefault(name, []).append((row["step"], value))
    assert tables[2][0]["prompt"] == "a | b" and tables[2][1]["score/right"] == 2.0
    assert SQLiteStorage.get_run_config("mine", run["name"])["seed"] == 7
    return kept, set(tables)


def read_swanlab(folder: Path):
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    kept, tables, ids = {}, {}, set()
    for path in sorted((folder / "swanlab").glob("*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(str(path))
        for record in map(Record.FromString, reader):
            if record.HasField("start"):
                ids.add((record.start.id, record.start.name, record.start.project))
            elif record.HasField("scalar") and not record.scalar.key.startswith("__"):
                kept.setdefault(record.scalar.key, []).append((record.scalar.step, record.scalar.value.number))
            elif record.HasField("media"):
                (item,) = record.media.value.items
                (stored,) = path.parent.rglob(item.filename)
                tables[record.media.step] = json.loads(stored.read_text())
        reader.close()
    assert ids == {(json.loads((folder / FILE).read_text())["id"], "run", "mine")}
    assert tables[2]["rowData"][1]["prompt"] == "a | b" and tables[2]["rowData"][1]["score/right"] == 2.0
    return kept, set(tables)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_resumed_run_has_each_step_once_and_in_order(name, tmp_path, packages, capfd):
    folder, cfg = tmp_path / "run", LoggingConfig(trackers=[name], project="mine")
    train(MetricsLogger(folder, cfg, CONFIG, 0), -1, STEPS)
    train(MetricsLogger(folder, cfg, CONFIG, 0), 4, range(5, 10), 100.0)
    assert "warning: the tracker" not in capfd.readouterr().err
    values, samples = globals()[f"read_{name}"](folder)
    assert set(values) == {"sft/loss", "eval/pass@2", "time/save_s"} and samples == {2, 4, 6, 8}
    rewritten = 5 if name == "tensorboard" else 8  # the first step of the second start that is seen
    assert values["sft/loss"] == [(step, step + 100.0 * (step >= rewritten)) for step in range(1, 10)]
    assert values["eval/pass@2"] == [(step, step / 4) for step in range(1, 10)]
    assert values["time/save_s"] == [(step, 0.25) for step in range(1, 10)]


OWN = """
class Lines:
    def __init__(self, path="lines.txt", fails=()):
        self.path, self.fails = path, fails

    def start(self, run):
        self.file = open(run.folder / self.path, "a")
        self.put("start", run.id, run.after, run.config["seed"])

    def put(self, *words):
        print(*words, file=self.file, flush=True)

    def log(self, step, metrics):
        if step in self.fails:
            raise ConnectionError("no network")
        self.put("log", step, sorted(metrics))

    def samples(self, step, rows):
        self.put("samples", step, len(rows))

    def finish(self):
        self.put("finish")


class Rewinds(Lines):
    rewinds = True


class Short(Lines):
    def log(self, metrics):
        pass


class Half:
    def start(self, run):
        pass


def no_class():
    pass
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def lines(folder: Path, name: str = "lines.txt") -> list[list[str]]:
    return [line.split(maxsplit=2) for line in (folder / name).read_text().splitlines()]


def test_a_tracker_that_fails_warns_once_and_gets_the_rest_at_the_next_start(tmp_path, own, capsys):
    folder = tmp_path / "run"
    cfg = LoggingConfig(trackers=[f"{own}:Lines", f"{own}:Rewinds"], args={"Lines": {"fails": [3, 4]}})
    cfg.args["Rewinds"] = {"path": "all.txt"}
    train(MetricsLogger(folder, cfg, CONFIG, 0), -1, range(1, 7))
    output = capsys.readouterr().err.splitlines()
    assert len(output) == 1 and "own.py:Lines gets nothing more before the next start: ConnectionError" in output[0]
    assert [line[1] for line in lines(folder) if line[0] == "log"] == ["1", "1", "2", "2"]
    cfg.args["Lines"] = {}
    train(MetricsLogger(folder, cfg, CONFIG, 0), 4, range(5, 7))
    assert capsys.readouterr().err == ""
    second = lines(folder)[6:]
    assert second[0][0] == "start" and second[0][1] == lines(folder)[0][1] and second[0][2] == "2 7"
    assert [line[1] for line in second if line[0] == "log"] == ["3", "4", "5", "5", "6", "6"]
    again = lines(folder, "all.txt")
    begins = [i for i, line in enumerate(again) if line[0] == "start"]
    assert again[begins[1]][2] == "4 7" and again[-1][0] == "finish"
    assert [line[1] for line in again[begins[1] :] if line[0] == "log"] == ["5", "5", "6", "6"]


def test_only_what_is_new_of_the_checkpoints_step_is_sent_after_a_resume(tmp_path, own):
    """An evaluation that failed is repeated. A tracker that has later steps does not go back."""
    folder, cfg = tmp_path / "run", LoggingConfig(trackers=[f"{own}:Lines"])
    train(MetricsLogger(folder, cfg, CONFIG, 0), -1, range(1, 4))
    before = len(lines(folder))
    for resumed in (3, 2):
        log = MetricsLogger(folder, cfg, CONFIG, 0)
        log.resume_at(resumed)
        log.log(resumed, {"eval/accuracy": 0.5, "sft/loss": 9.0})
    assert [line for line in lines(folder)[before:] if line[0] == "log"] == [["log", "3", "['eval/accuracy']"]]


def test_a_start_from_the_first_step_is_another_run(tmp_path, own):
    folder, cfg = tmp_path / "run", LoggingConfig(trackers=[f"{own}:Lines"])
    for _ in range(2):
        train(MetricsLogger(folder, cfg, CONFIG, 0), -1, range(1, 2))
    starts = [line for line in lines(folder) if line[0] == "start"]
    assert len({line[1] for line in starts}) == 2 and [line[2] for line in starts] == ["-1 7"] * 2
    assert [line[1] for line in lines(folder) if line[0] == "log"] == ["1"] * 4


@pytest.mark.parametrize(
    ("cfg", "error", "message"),
    [
        ({"trackers": ["{own}:Half"]}, TrackerCodeError, "a class with a method log of 2 arguments"),
        ({"trackers": ["{own}:Short"]}, TrackerCodeError, "a class with a method log of 2 arguments"),
        ({"trackers": ["{own}:no_class"]}, TrackerCodeError, "expected a class"),
        ({"trackers": ["{own}:Absent"]}, TrackerCodeError, "which has Lines, Rewinds, Short, Half"),
        ({"trackers": ["{own}:Lines"], "args": {"Lines": {"x": 1}}}, ConfigError, "unexpected keyword argument 'x'"),
        ({"trackers": ["{own}:Lines"], "args": {"Lines": 3}}, ConfigError, "expected arguments by name"),
        ({"trackers": ["mlflow"], "args": {"wandb": {}}}, ConfigError, "logging.args.wandb={}: expected the name of"),
    ],
)
def test_trackers_that_a_run_cannot_use_are_refused(own, cfg, error, message):
    cfg = LoggingConfig(**cfg | {"trackers": [name.format(own=own) for name in cfg["trackers"]]})
    with pytest.raises(error, match=r"^logging") as caught:
        check(cfg)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", [name for name in TRACKERS if name != "tensorboard"])
def test_a_package_that_is_not_installed_is_one_line_with_its_extra(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        MissingExtraError, match=rf"logging.trackers={name} needs `{name}`: pip install 'aligner\[{name}\]'$"
    ):
        check(LoggingConfig(trackers=[name]))


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_server_without_an_account_or_address_is_one_line(name, tmp_path, packages, monkeypatch):
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    log = MetricsLogger(tmp_path / "run", LoggingConfig(trackers=[name], offline=False), CONFIG, 0)
    with pytest.raises(
        ConfigError, match=rf"logging.trackers='{name}': .*Set (WANDB_API_KEY|MLFLOW_TRACKING_URI)"
    ) as error:
        log.resume_at(-1)
    assert "\n" not in str(error.value)


def test_a_server_that_is_not_there_is_a_warning(tmp_path, packages, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    folder = tmp_path / "run"
    train(MetricsLogger(folder, LoggingConfig(trackers=["mlflow"], offline=False), CONFIG, 0), -1, range(1, 3))
    assert capsys.readouterr().err.count("warning: the tracker mlflow gets nothing more") == 1
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_stage_sends_what_it_writes(tiny_data, tmp_path, own):
    common = [f"logging.trackers=['{own}:Lines']", "run.samples_every=1", "logging.samples_shown=2"]
    run = stages.stage("grpo", tiny_data, tmp_path / "run", "run.steps=2", *common)
    sent = lines(run)
    records = read_jsonl(run / "metrics.jsonl")
    assert {line[1] for line in sent if line[0] == "log"} == {str(one["step"]) for one in records}
    names = {name for line in sent if line[:2] == ["log", "2"] for name in ast.literal_eval(line[2])}
    assert names == {name for name, value in records[-1].items() if value is not None} - {"step", "wall_time"}
    assert [line[1:] for line in sent if line[0] == "samples"] == [["1", "2"], ["2", "2"]] and sent[-1] == ["finish"]
