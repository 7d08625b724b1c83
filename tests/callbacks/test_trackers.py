"""Experiment trackers: one of the tests, and the real ones where they are installed."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

import pydtnn
from pydtnn.callbacks import MLflow, WandB
from pydtnn.callbacks.trackers import Tracker
from pydtnn.comm import Communicator, Serial
from pydtnn.data.inputs import inputs_of
from pydtnn.train import main
from pydtnn.training.checkpoint import load_checkpoint, save_checkpoint
from pydtnn.utils.errors import AgreedError
from tests.each import each
from tests.small_run import TINY
from tests.small_training import STEPS, Interrupt, Interrupted, small_data, small_fit, small_trainer


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


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The functions of Weights & Biases that are called, without the package."""
    module = MagicMock()
    module.init.return_value.id = "run-7"
    module.Artifact.return_value.add_dir = lambda folder: module.found(pydtnn.load(folder))
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@each("fails", [False, True])
def test_wandb_has_configuration_history_and_the_model(
    fails: bool, wandb: Any, tmp_path: Path
) -> None:
    wandb.reset_mock()
    expected, own = [], ["--wandb=small", "--quiet", f"--output-dir={tmp_path / 'runs' / 'a'}"]
    if not fails:
        assert main([*TINY, *own]) == 0
        expected = json.loads((tmp_path / "runs" / "a" / "history.json").read_text())
    else:
        stop = Interrupt(1)
        with pytest.raises(Interrupted):
            small_fit(small_trainer(Serial(), WandB("small", run_name="a"), stop))
    run, begun = wandb.init.return_value, wandb.init.call_args.kwargs
    assert (begun["project"], begun["name"], begun["resume"]) == ("small", "a", None)
    assert begun["config"]["optimizer"] == ("SGD" if fails else "sgd")
    logged = [(call.args[0]["loss"], call.kwargs["step"]) for call in run.log.call_args_list]
    assert logged == [(pytest.approx(logs["loss"]), 8 * logs["epoch"]) for logs in expected]
    assert run.finish.call_args.kwargs == {"exit_code": int(fails)}
    assert [call.args for call in wandb.Artifact.call_args_list] == [("model-run-7",)] * (not fails)
