"""Experiment trackers: one of the tests, and the real ones where they are installed."""

from __future__ import annotations

import json
import logging
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pydtnn
from pydtnn.callbacks import Callback, MLflow, WandB
from pydtnn.callbacks.trackers import Tracker
from pydtnn.comm import Communicator, Serial
from pydtnn.data.inputs import inputs_of
from pydtnn.train import main
from pydtnn.training.checkpoint import load_checkpoint, save_checkpoint
from pydtnn.utils.errors import AgreedError
from tests.each import each
from tests.small_run import TINY
from tests.small_training import STEPS, small_data, small_fit, small_trainer


class Notes(Tracker):
    """A tracker that keeps what it is told, and can fail."""

    def __init__(self, name: str = "notes", fails: str = "", **options: Any) -> None:
        super().__init__(name, **options)
        self.fails = fails
        self.calls: list[tuple[str, Any]] = []

    def _note(self, what: str, content: Any) -> None:
        self.calls.append((what, content))
        if what == self.fails:
            raise ConnectionError("no route\nto host")

    def begin(self, values: Mapping[str, Any]) -> str:
        self._note("begin", dict(values))
        return self.run_id or "run-1"

    def report(self, values: Mapping[str, float], step: int) -> None:
        self._note("report", (step, dict(values)))

    def report_model(self, folder: Path) -> None:
        self._note("model", sorted(path.name for path in folder.iterdir()))
        self.model = pydtnn.load(folder, backend="numpy")

    def end(self, outcome: str) -> None:
        self._note("end", outcome)


@pytest.mark.threads(1, 2)
def test_rank_0_reports_configuration_results_and_the_model(comm: Communicator) -> None:
    notes = Notes(hyper_parameters={"crop": 4})
    trainer = small_trainer(comm, notes)
    history = small_fit(trainer, epochs=2)
    assert notes.run_id == "run-1"  # on all ranks
    if comm.rank > 0:
        assert notes.calls == []
        return
    assert [name for name, _ in notes.calls] == ["begin", "report", "report", "model", "end"]
    values = notes.calls[0][1]
    assert (values["optimizer"], values["crop"], values["epochs"]) == ("SGD", 4, 2)
    assert values["ranks"] == comm.size
    for epoch, (step, logs) in enumerate((content for _, content in notes.calls[1:3]), 1):
        assert (step, logs.pop("epoch")) == (epoch * STEPS, epoch)
        assert logs.pop("samples_per_second") > 0
        assert logs == pytest.approx(history[epoch - 1])
    assert notes.calls[3][1] == ["SHA256SUMS", "model.json", "weights.safetensors"]
    for name, array in trainer.model.state().items():
        np.testing.assert_array_equal(notes.model.state()[name], array)
    assert notes.calls[-1] == ("end", "finished")


def test_training_that_continues_from_a_checkpoint_is_the_same_run(tmp_path: Path) -> None:
    first = small_trainer(Serial(), Notes())
    small_fit(first, epochs=1)
    save_checkpoint(tmp_path, first)
    again = Notes()
    trainer = small_trainer(Serial(), again)
    load_checkpoint(tmp_path, trainer)
    assert again.run_id == "run-1"
    small_fit(trainer, epochs=2)
    assert [content[0] for name, content in again.calls if name == "report"] == [2 * STEPS]


def test_a_run_that_fails_is_ended_as_such() -> None:
    class Broken(Callback):
        def on_epoch_end(self, trainer: Any) -> None:
            raise RuntimeError("out of luck")

    notes = Notes()
    with pytest.raises(RuntimeError, match="out of luck"):
        small_fit(small_trainer(Serial(), notes, Broken()), epochs=2)
    assert notes.calls[-1] == ("end", "failed")


def test_a_tracker_that_cannot_be_reached_ends_the_run_before_the_first_step() -> None:
    notes = Notes(fails="begin")
    trainer = small_trainer(Serial(), notes)
    with pytest.raises(AgreedError, match="^Notes: cannot start a run: no route to host"):
        small_fit(trainer, epochs=1)
    assert trainer.optimizer.iterations == 0
    assert [name for name, _ in notes.calls] == ["begin"]


@each("what", ["report", "model", "end"])
def test_a_tracker_that_fails_later_is_a_warning(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    notes = Notes(fails=what, save_model=what == "model")
    with caplog.at_level(logging.WARNING, "pydtnn.callbacks"):
        assert len(small_fit(small_trainer(Serial(), notes), epochs=1)) == 1
    [told] = [one.getMessage() for one in caplog.records if one.name == "pydtnn.callbacks"]
    assert told.startswith("Notes: cannot report ")
    assert told.endswith(": no route to host")
    assert ("model" in [name for name, _ in notes.calls]) == (what == "model")


@each("kind", [MLflow, WandB])
def test_a_tracker_needs_a_name_and_its_package(
    kind: type[Tracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = kind.__name__.lower()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(AgreedError, match=f"{kind.__name__} requires {package}; install it with"):
        small_fit(small_trainer(Serial(), kind("digits")), epochs=1)
    with pytest.raises(ValueError, match=f"{kind.__name__}: name must be text, got ''"):
        kind("")


# -- the real packages


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of MLflow with a store in a local database."""
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'runs.db'}")
    mlflow.set_tracking_uri(None)
    return mlflow.MlflowClient()


@pytest.mark.filterwarnings("ignore")  # those of MLflow and its dependencies
def test_mlflow_has_parameters_metrics_and_the_model_of_a_run_that_is_continued(
    client: Any, tmp_path: Path
) -> None:
    """The parameters with which it began are kept."""
    first = small_trainer(Serial(), MLflow("small", hyper_parameters={"long": "x" * 900}))
    small_fit(first, epochs=1)
    save_checkpoint(tmp_path / "saved", first)
    trainer = small_trainer(Serial(), MLflow("small", hyper_parameters={"new": 1}))
    load_checkpoint(tmp_path / "saved", trainer)
    trainer.model.inputs = inputs_of(small_data()[0])
    history = small_fit(trainer, epochs=2)
    experiment = client.get_experiment_by_name("small")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert (run.data.params["optimizer"], run.data.params["epochs"]) == ("SGD", "1")
    assert (run.data.params["long"], run.data.params["new"]) == ("x" * 500, "1")
    for name in history[0]:
        points = client.get_metric_history(run.info.run_id, name)
        assert {p.step: p.value for p in points} == pytest.approx(
            {(i + 1) * STEPS: logs[name] for i, logs in enumerate(history)}
        )
    folder = client.download_artifacts(run.info.run_id, "model", str(tmp_path))
    model = pydtnn.load(folder, backend="numpy")
    for name, array in trainer.model.state().items():
        np.testing.assert_array_equal(model.state()[name], array)
    assert model.inputs is not None


@pytest.mark.filterwarnings("ignore")
def test_the_option_reports_a_run_of_the_command_line_to_mlflow(
    client: Any, tmp_path: Path
) -> None:
    options = ["--mlflow=small", "--quiet", f"--output-dir={tmp_path / 'runs' / 'a'}"]
    assert main([*TINY, *options]) == 0
    [run] = client.search_runs([client.get_experiment_by_name("small").experiment_id])
    assert run.info.run_name == "a"
    assert run.data.params["model"] == "mlp"
    assert "val_accuracy" in run.data.metrics


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Weights & Biases without a network."""
    module = pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.chdir(tmp_path)
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    for name in ("CACHE_DIR", "DATA_DIR", "CONFIG_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / name.lower()))
    return module


HEADER_B, BLOCK_B, LAST_PARTS = 7, 32768, (1, 4)


def records(folder: Path) -> Iterator[Any]:
    """The records of an offline run: a log of LevelDB, in blocks with parts of records."""
    from wandb.proto.wandb_internal_pb2 import Record

    [file] = folder.glob("wandb/offline-run-*/*.wandb")
    data, place, parts = file.read_bytes(), HEADER_B, b""
    while place < len(data):
        if BLOCK_B - place % BLOCK_B < HEADER_B:  # the rest of a block is not used
            place += BLOCK_B - place % BLOCK_B
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + HEADER_B : place + HEADER_B + length]
        place += HEADER_B + length
        if kind in LAST_PARTS:
            yield Record.FromString(parts)
            parts = b""


@pytest.mark.filterwarnings("ignore")
def test_wandb_has_configuration_history_and_the_model(wandb: Any, tmp_path: Path) -> None:
    options = ["--wandb=small", "--quiet", f"--output-dir={tmp_path / 'runs' / 'a'}"]
    assert main([*TINY, *options]) == 0
    expected = json.loads((tmp_path / "runs" / "a" / "history.json").read_text())
    wandb.teardown()  # its service writes the rest
    found = [*records(tmp_path)]
    [run] = [record.run for record in found if record.HasField("run")]
    assert (run.project, run.display_name) == ("small", "a")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["optimizer"] == "sgd"
    rows = [
        {
            item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json)
            for item in record.history.item
        }
        for record in found
        if record.HasField("history")
    ]
    assert [row["loss"] for row in rows] == pytest.approx([logs["loss"] for logs in expected])
    [artifact] = [
        record.request.log_artifact.artifact
        for record in found
        if record.request.HasField("log_artifact")
    ] or [record.artifact for record in found if record.HasField("artifact")]
    assert artifact.type == "model"
    names = {entry.path for entry in artifact.manifest.contents}
    assert {"model.json", "weights.safetensors"} <= names
    [end] = [record.exit for record in found if record.HasField("exit")]
    assert end.exit_code == 0
