"""Configuration, results and the final model for experiment trackers: MLflow, Weights & Biases."""

from __future__ import annotations

import json
import logging
import tempfile
import time
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.callbacks.tensorboard import describe_training
from pydtnn.comm.agree import on_rank_0
from pydtnn.saving import save_model
from pydtnn.saving.weights import WEIGHTS, write_weights
from pydtnn.training.callback import Callback, Training, evaluated, training_seconds
from pydtnn.utils.imports import import_optional

_log = logging.getLogger("pydtnn.callbacks")

MAX_PARAMETER_CHARACTERS = 500
"""Length to which parameters are cut for MLflow: the limit of older servers."""


class Tracker(Callback):
    """Base class of callbacks that report a run to an experiment tracker, on rank 0.

    When training starts, the configuration is reported; after each epoch, what `Trainer.history`
    contains, and the samples per second, over the number of updates; when training ends, the model
    as `Trainer.save` writes it, or its weights if an option of a layer cannot be saved. Training
    that continues from a checkpoint is reported to the same run.

    Whatever fails when training starts raises an error on all ranks. Later, when the network fails
    for example, the logger "pydtnn.callbacks" emits a warning, and training continues.

    Parameters
    ----------
    name : str
        Of the group of runs in the tracker.
    run_name : str, optional
        By default the tracker invents one.
    hyper_parameters : mapping, optional
        Further values to compare runs by, besides those of the trainer: "optimizer", "lr",
        "weight_decay", "scheme", "ranks", "dtype" and "parameters".
    save_model : bool
        Whether the final model is reported.
    """

    reads_gradients = False

    def __init__(
        self,
        name: str,
        *,
        run_name: str | None = None,
        hyper_parameters: Mapping[str, Any] | None = None,
        save_model: bool = True,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"{type(self).__name__}: name must be text, got {name!r}")
        self.name = name
        self.run_name = run_name
        self.hyper_parameters = dict(hyper_parameters or {})
        self.save_model = save_model
        self.run_id: str | None = None
        self._open = False
        self._samples, self._seconds = 0, 0.0

    @abstractmethod
    def begin(self, values: Mapping[str, Any]) -> str:
        """Start a run with hyper-parameters, or continue the one of `run_id`; return its id."""

    @abstractmethod
    def report(self, values: Mapping[str, float], step: int) -> None:
        """Report results after a number of updates."""

    @abstractmethod
    def report_model(self, folder: Path) -> None:
        """Report the files of the model."""

    @abstractmethod
    def end(self, outcome: str) -> None:
        """End the run: "finished", "interrupted" or "failed"."""

    def on_fit_ready(self, trainer: Training, epochs: int, steps: int) -> None:
        """Start the run. Collective: all ranks call it; rank 0 reports.

        Raises
        ------
        AgreedError
            On all ranks, if the package is missing or the tracker cannot be reached.
        """
        values = {**describe_training(trainer), "epochs": epochs, **self.hyper_parameters}
        found = trainer.comm.gather_object(on_rank_0(trainer.comm, self._begin, values))
        self.run_id = found[0]  # on all ranks, as checkpoints contain it
        self._samples, self._seconds = trainer.samples_seen, training_seconds(trainer)

    def _begin(self, values: Mapping[str, Any]) -> str:
        try:
            run_id = self.begin(values)
        except ImportError:
            raise
        except Exception as error:  # of any type: those of trackers have no common one
            raise OSError(f"{type(self).__name__}: cannot start a run: {_reason(error)}") from error
        self._open = True
        return run_id

    def on_epoch_end(self, trainer: Training) -> None:
        """Report the results of the epoch, on rank 0."""
        if not self._open:
            return
        values = {name: float(value) for name, value in trainer.logs.items()}
        seconds = training_seconds(trainer) - self._seconds
        if seconds > 0:
            values["samples_per_second"] = (trainer.samples_seen - self._samples) / seconds
        self._samples, self._seconds = trainer.samples_seen, training_seconds(trainer)
        values["epoch"] = trainer.epoch
        self._try("results", self.report, values, trainer.optimizer.iterations)

    def on_fit_end(self, trainer: Training) -> None:
        """Report the model and end the run. Collective: all ranks call it; rank 0 reports."""
        if self.save_model:
            with evaluated(trainer):
                state = trainer.model.state()
                if self._open:
                    self._try("the model", self._report_model, trainer, state)
        self._end("finished")

    def _report_model(self, trainer: Training, state: Mapping[str, np.ndarray]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model"
            try:
                save_model(trainer.model, path, state)
            except ValueError:  # an option of a layer that cannot be saved
                path.mkdir(exist_ok=True)
                write_weights(state, path / WEIGHTS)
            self.report_model(path)

    def on_interrupt(self, trainer: Training) -> None:
        """End the run."""
        self._end("interrupted")

    def close(self) -> None:
        """End a run that has failed."""
        self._end("failed")

    def _end(self, outcome: str) -> None:
        if self._open:
            self._open = False
            self._try("the end of the run", self.end, outcome)

    def _try(self, what: str, work: Any, *args: Any) -> None:
        """Call a function; warn if it fails, so that training does not depend on a network."""
        try:
            work(*args)
        except Exception as error:  # of any type
            _log.warning("%s: cannot report %s: %s", type(self).__name__, what, _reason(error))

    def state(self) -> dict[str, Any]:
        """Return the id of the run."""
        return {} if self.run_id is None else {"run_id": self.run_id}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue the run with the id of a checkpoint."""
        self.run_id = state.get("run_id")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


class MLflow(Tracker):
    """Report a run to MLflow: parameters, metrics, and the model as an artifact.

    Requires the package mlflow, or mlflow-skinny for a server. Where runs are stored is configured
    as MLflow describes: by the variable MLFLOW_TRACKING_URI or ``mlflow.set_tracking_uri``.

    Parameters
    ----------
    name : str
        Of the experiment, which is created if necessary.
    run_name, hyper_parameters, save_model
        See `Tracker`.
    """

    def begin(self, values: Mapping[str, Any]) -> str:
        """Create the run and report its parameters."""
        mlflow = import_optional("mlflow", "mlflow", "MLflow")
        self._entities = import_optional("mlflow.entities", "mlflow", "MLflow")
        self._client = client = mlflow.MlflowClient()
        if self.run_id is None:
            found = client.get_experiment_by_name(self.name)
            number = client.create_experiment(self.name) if found is None else found.experiment_id
            run = client.create_run(number, run_name=self.run_name)
            self.run_id = run.info.run_id
        else:
            client.update_run(self.run_id, status="RUNNING")
        known = client.get_run(self.run_id).data.params  # cannot be changed
        parameters = [
            self._entities.Param(name, _text(value)[:MAX_PARAMETER_CHARACTERS])
            for name, value in values.items()
            if name not in known
        ]
        client.log_batch(self.run_id, params=parameters)
        return self.run_id

    def report(self, values: Mapping[str, float], step: int) -> None:
        """Report metrics."""
        now = int(1000 * time.time())
        metrics = [self._entities.Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    def report_model(self, folder: Path) -> None:
        """Report the files as the artifact "model"."""
        self._client.log_artifacts(self.run_id, str(folder), "model")

    def end(self, outcome: str) -> None:
        """Set the status of the run."""
        status = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}[outcome]
        self._client.set_terminated(self.run_id, status)


class WandB(Tracker):
    """Report a run to Weights & Biases: configuration, history, and the model as an artifact.

    Requires the package wandb. Account and server are configured as it describes, by ``wandb
    login`` and its variables; WANDB_MODE=offline writes to WANDB_DIR only.

    Parameters
    ----------
    name : str
        Of the project.
    run_name, hyper_parameters, save_model
        See `Tracker`.
    """

    def begin(self, values: Mapping[str, Any]) -> str:
        """Start the run with its configuration."""
        self._wandb = wandb = import_optional("wandb", "wandb", "WandB")
        self._run = wandb.init(
            project=self.name,
            name=self.run_name,
            id=self.run_id,
            resume=None if self.run_id is None else "allow",
            config=dict(values),
            settings=wandb.Settings(console="off"),  # the progress bar is no record
        )
        return str(self._run.id)

    def report(self, values: Mapping[str, float], step: int) -> None:
        """Report a step of the history."""
        self._run.log(dict(values), step=step)

    def report_model(self, folder: Path) -> None:
        """Report the files as an artifact of the type "model"."""
        artifact = self._wandb.Artifact(f"model-{self.run_id}", type="model")
        artifact.add_dir(str(folder))
        self._run.log_artifact(artifact)

    def end(self, outcome: str) -> None:
        """Finish the run."""
        self._run.finish(exit_code=0 if outcome == "finished" else 1)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
