"""Experiment trackers: what Weights & Biases is told, and MLflow where it is installed."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

import pydtnn
from pydtnn.comm import Serial
from pydtnn.data.inputs import inputs_of
from pydtnn.tools.trackers import MLflow, WandB
from pydtnn.train import main
from pydtnn.training.checkpoint import load_checkpoint, save_checkpoint
from pydtnn.utils.errors import AgreedError
from tests.each import each
from tests.small_run import TINY
from tests.small_training import STEPS, Interrupt, Interrupted, small_data, small_fit, small_trainer

UNREACHABLE = ConnectionError("no route\nto host")


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The functions of the package that are called, without it."""

    def add_dir(folder: str) -> None:
        module.files = sorted(path.name for path in Path(folder).iterdir())
        module.model = pydtnn.load(folder, backend="numpy")

    module = MagicMock()
    module.init.return_value.id = "run-7"
    module.Artifact.return_value.add_dir = add_dir
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.mark.threads(1, 2)
def test_rank_0_reports_configuration_results_and_the_model(comm, wandb):
    tracker = WandB("small", run_name="a", hyper_parameters={"crop": 4})
    trainer = small_trainer(comm, tracker)
    history = small_fit(trainer, epochs=2)
    assert tracker.run_id == "run-7"  # on all ranks
    comm.barrier()
    wandb.init.assert_called_once()
    begun = wandb.init.call_args.kwargs
    assert [begun[key] for key in ("project", "name", "id", "resume")] == ["small", "a", None, None]
    given = [begun["config"][key] for key in ("optimizer", "crop", "epochs", "ranks")]
    assert given == ["SGD", 4, 2, comm.size]
    run = wandb.init.return_value
    assert run.log.call_count == 2
    for epoch, call in enumerate(run.log.call_args_list, 1):
        logs = dict(call.args[0])
        assert (call.kwargs["step"], logs.pop("epoch")) == (epoch * STEPS, epoch)
        assert logs.pop("samples_per_second") > 0
        assert logs == pytest.approx(history[epoch - 1])
    wandb.Artifact.assert_called_once_with("model-run-7", type="model")
    assert wandb.files == ["SHA256SUMS", "model.json", "weights.safetensors"]
    for name, array in trainer.model.state().items():
        np.testing.assert_array_equal(wandb.model.state()[name], array)
    run.finish.assert_called_once_with(exit_code=0)


def test_training_that_continues_from_a_checkpoint_is_the_same_run(wandb, tmp_path):
    first = small_trainer(Serial(), WandB("small", save_model=False))
    small_fit(first, epochs=1)
    save_checkpoint(tmp_path, first)
    assert wandb.Artifact.call_count == 0
    trainer = small_trainer(Serial(), WandB("small"), Interrupt(2 * STEPS))
    load_checkpoint(tmp_path, trainer)
    with pytest.raises(Interrupted):
        small_fit(trainer, epochs=3)
    begun, run = wandb.init.call_args.kwargs, wandb.init.return_value
    assert (begun["id"], begun["resume"]) == ("run-7", "allow")
    assert [call.kwargs for call in run.finish.call_args_list] == [
        {"exit_code": 0},
        {"exit_code": 1},  # as a run that has failed
    ]


def test_the_option_reports_a_run_of_the_command_line(wandb, tmp_path):
    folder = tmp_path / "runs" / "a"
    assert main([*TINY, "--wandb=small", "--quiet", f"--output-dir={folder}"]) == 0
    begun, run = wandb.init.call_args.kwargs, wandb.init.return_value
    assert (begun["name"], begun["config"]["model"]) == ("a", "mlp")
    logged = [call.args[0]["loss"] for call in run.log.call_args_list]
    history = json.loads((folder / "history.json").read_text())
    assert logged == pytest.approx([logs["loss"] for logs in history])


def test_a_tracker_that_cannot_be_reached_ends_the_run_before_the_first_step(wandb):
    wandb.init.side_effect = UNREACHABLE
    trainer = small_trainer(Serial(), WandB("small"))
    with pytest.raises(AgreedError, match="^WandB: cannot start a run: no route to host"):
        small_fit(trainer, epochs=1)
    assert trainer.optimizer.iterations == wandb.init.return_value.finish.call_count == 0


@pytest.mark.parametrize("what", ["log", "log_artifact", "finish"])
def test_a_tracker_that_fails_later_is_a_warning(what, wandb, caplog):
    getattr(wandb.init.return_value, what).side_effect = UNREACHABLE
    with caplog.at_level(logging.WARNING, "pydtnn.callbacks"):
        assert len(small_fit(small_trainer(Serial(), WandB("small")), epochs=1)) == 1
    [told] = [one.getMessage() for one in caplog.records if one.name == "pydtnn.callbacks"]
    assert told.startswith("WandB: cannot report ")
    assert told.endswith(": no route to host")


@each("kind", [MLflow, WandB])
def test_a_tracker_needs_a_name_and_its_package(kind, monkeypatch):
    package = kind.__name__.lower()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(AgreedError, match=f"{kind.__name__} requires {package}; install it with"):
        small_fit(small_trainer(Serial(), kind("digits")), epochs=1)
    with pytest.raises(ValueError, match=f"{kind.__name__}: name must be text, got ''"):
        kind("")


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of MLflow with a store in a local database."""
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'runs.db'}")
    mlflow.set_tracking_uri(None)
    return mlflow.MlflowClient()


@pytest.mark.filterwarnings("ignore")  # those of MLflow and its dependencies
def test_mlflow_has_parameters_metrics_and_the_model_of_a_run_that_is_continued(client, tmp_path):
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
