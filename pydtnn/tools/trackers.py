"""Callbacks that report a run: to TensorBoard's files, MLflow, and Weights & Biases."""

from __future__ import annotations

import json
import logging
import tempfile
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.cli.config import TrainConfig
from pydtnn.comm.agree import on_rank_0
from pydtnn.comm.checks import to_host
from pydtnn.saving import save_model
from pydtnn.saving.weights import WEIGHTS, write_weights
from pydtnn.training.callback import Callback, Training, evaluated, training_seconds
from pydtnn.utils import clock
from pydtnn.utils.imports import import_optional
from pydtnn.utils.validate import check_int

_log = logging.getLogger("pydtnn.callbacks")


def create_trackers(config: TrainConfig, folder: Path) -> list[Callback]:
    """Return the trackers that the options of a run on the command line ask for.

    Parameters
    ----------
    config : TrainConfig
    folder : Path
        Of the run.
    """
    # the options that affect results and are set
    values = {n: v for n, v in config.course().items() if v not in (None, {}, "")}
    found: list[Callback] = []
    if config.tensorboard:
        path, histograms = folder / "tensorboard", config.tensorboard_histograms
        found.append(TensorBoard(path, histograms=histograms, hyper_parameters=values))
    for kind, name in ((MLflow, config.mlflow), (WandB, config.wandb)):
        if name is not None:
            found.append(kind(name, run_name=folder.name, hyper_parameters=values))
    return found


class Tracker(Callback):
    """Base class of callbacks that report a run to an experiment tracker, on rank 0.

    When training starts, the configuration is reported; after each epoch, what `Trainer.history`
    contains, and the samples per second of training, without evaluations, over the number of
    updates; when training ends, the model as `Trainer.save` writes it, or its weights if an option
    of a layer cannot be saved. Training that continues from a checkpoint is reported to the same
    run.

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
        "weight_decay", "scheme", "ranks", "dtype", "parameters" and "epochs".
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
        self.name, self.run_name, self.save_model = name, run_name, save_model
        self.hyper_parameters = dict(hyper_parameters or {})
        self.run_id: str | None = None
        self._open = False
        self._samples, self._seconds = 0, 0.0

    @abstractmethod
    def begin(self, values: Mapping[str, Any]) -> str | None:
        """Start a run with hyper-parameters, or continue the one of `run_id`; return its id."""

    @abstractmethod
    def report(self, values: Mapping[str, float], step: int) -> None:
        """Report results after a number of updates."""

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
        values = {
            "optimizer": type(trainer.optimizer).__name__,
            "lr": trainer.optimizer.lr_now,
            "weight_decay": trainer.optimizer.weight_decay,
            "scheme": type(trainer.exchange).__name__,
            "ranks": trainer.comm.size,
            "dtype": str(trainer.model.dtype),
            "parameters": trainer.model.whole.size,
            "epochs": epochs,
            **self.hyper_parameters,
        }
        found = trainer.comm.gather_object(on_rank_0(trainer.comm, self._begin, values))
        self.run_id = found[0]  # on all ranks, as checkpoints contain it
        self._samples, self._seconds = trainer.samples_seen, training_seconds(trainer)

    def _begin(self, values: Mapping[str, Any]) -> str | None:
        self._end("finished")  # a run of an earlier fit
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
        values = {name: float(value) for name, value in trainer.logs.numbers.items()}
        seconds = training_seconds(trainer) - self._seconds
        if seconds > 0:  # not if the last step was complete when the epoch was resumed
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

    def _try(self, what: str, work: Callable[..., object], *args: Any) -> bool:
        """Call a function; warn if it fails, so that training does not depend on a network."""
        try:
            work(*args)
        except Exception as error:  # of any type
            _log.warning("%s: cannot report %s: %s", type(self).__name__, what, _reason(error))
            return False
        return True

    def state(self) -> dict[str, Any]:
        """Return the id of the run."""
        return {} if self.run_id is None else {"run_id": self.run_id}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue the run with the id of a checkpoint."""
        self.run_id = state.get("run_id")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


class TensorBoard(Tracker):
    """Write event files for TensorBoard (``tensorboard --logdir directory``) on rank 0.

    - Curves: after every epoch what `Trainer.history` contains ("loss", "val_accuracy", "lr", ...)
      and "samples_per_second"; during an epoch "step/loss", "step/lr" and
      "step/samples_per_second". The horizontal axis is the number of updates since the beginning of
      training, so that runs that are resumed continue their curves. "step/loss" is over the samples
      of all ranks; schemes whose ranks train independently sum it every few steps
      (`Trainer.own_steps`), until when its points are not written.
    - Histograms of each parameter and its gradient, if requested. Gradients are those of the last
      step as rank 0 has them: the sums over all ranks or, in schemes that distribute or do not
      compute these sums, its own part. On a mesh, both are those of rank 0's part of the network.
    - Hyper-parameters with the results, when training ends.

    Requires the package tensorboardX (``pip install tensorboardX``). Its `SummaryWriter` is not
    used, as it writes in a thread whose errors are lost.

    Parameters
    ----------
    directory : str or Path
        Created if necessary; one folder per run.
    every_steps : int, optional
        Steps between two points of the curves within epochs; None writes none.
    histograms : int, optional
        Epochs between two histograms; by default there are none.
    hyper_parameters : mapping, optional
        See `Tracker`.
    """

    HISTOGRAM_BINS = 64

    def __init__(
        self,
        directory: str | Path,
        *,
        every_steps: int | None = 10,
        histograms: int | None = None,
        hyper_parameters: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(str(directory), hyper_parameters=hyper_parameters, save_model=False)
        self.directory = Path(directory)
        self.every_steps, self.histograms = (
            None if value is None else check_int("TensorBoard", name, value, at_least=1)
            for name, value in (("every_steps", every_steps), ("histograms", histograms))
        )
        self.reads_gradients = self.histograms is not None
        self._first = self._updates = 0  # updates before the first of `Trainer.losses`, and so far
        self._points: deque[int] = deque()  # of these losses, those that are to be written
        self._seen, self._time = 0, 0.0  # samples and time at the last point
        self._results: dict[str, float] = {}
        self._works = True  # whether the last points could be written

    def on_fit_ready(self, trainer: Training, epochs: int, steps: int) -> None:
        """Create the file. Collective: all ranks call it; rank 0 writes."""
        self._updates = trainer.optimizer.iterations
        self._first = self._updates - len(trainer.losses)
        self._points.clear()
        super().on_fit_ready(trainer, epochs, steps)

    def begin(self, values: Mapping[str, Any]) -> None:
        """Create a file, which hides what others of the folder have of later steps."""
        self._summary, self._messages, writer = (
            import_optional(f"tensorboardX.{name}", "tensorboardX", "TensorBoard")
            for name in ("summary", "proto.event_pb2", "event_file_writer")
        )
        self._values, self._results = values, {}
        self.directory.mkdir(parents=True, exist_ok=True)
        path = str(self.directory / "events")
        self._writer = writer.EventsWriter(path, f".{self._updates}")
        start = self._messages.SessionLog(status=self._messages.SessionLog.START)
        self._write(self._updates + 1, session_log=start)
        self._writer.flush()

    def _write(self, step: int, **content: Any) -> None:
        event = self._messages.Event(wall_time=time.time(), step=step, **content)
        self._writer.write_event(event)

    def _curves(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._write(step, summary=self._summary.scalar(name, float(value)))

    def on_epoch_start(self, trainer: Training) -> None:
        """Start the clock."""
        self._seen, self._time, self._works = trainer.samples_seen, clock.now(), True

    def on_step_end(self, trainer: Training) -> None:
        """Write points of curves, if it is time."""
        every, step = self.every_steps, trainer.optimizer.iterations
        if not (self._open and self._works and every and trainer.losses) or step % every:
            return
        now, place = clock.now(), len(trainer.losses) - 1  # a captured step is not complete yet
        speed = (trainer.samples_seen - self._seen) / (now - self._time)
        self._seen, self._time = trainer.samples_seen, now
        self._points.append(place)
        values = {"step/lr": trainer.optimizer.lr_now, "step/samples_per_second": speed}
        self._works = self._try("a step", self._write_points, trainer, step, values)

    def _write_points(self, trainer: Training, step: int, values: Mapping[str, float]) -> None:
        """Write values of a step, and the losses of steps that are those of all ranks."""
        while self._points and self._points[0] < len(trainer.losses) - trainer.own_steps:
            place = self._points.popleft()
            self._curves(self._first + place + 1, {"step/loss": trainer.losses[place]})
        self._curves(step, values)
        self._writer.flush()

    def on_epoch_end(self, trainer: Training) -> None:
        """Write the results of the epoch, on rank 0."""
        if self._open and self._works:
            self._try("losses", self._write_points, trainer, 0, {})
        if self._open and self.histograms and trainer.epoch % self.histograms == 0:
            self._try("histograms", self._write_histograms, trainer)
        super().on_epoch_end(trainer)

    def _write_histograms(self, trainer: Training) -> None:
        for name, p in reversed(trainer.model.parameters.items()):
            for what, array in (("parameters", p.master), ("gradients", p.grad)):
                if array is not None:
                    self.histogram(trainer.optimizer.iterations, f"{what}/{name}", to_host(array))

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        """Write a histogram of the finite elements of an array, if there are any."""
        finite = values[np.isfinite(values)]
        if len(finite):
            self._write(step, summary=self._summary.histogram(name, finite, self.HISTOGRAM_BINS))

    def report(self, values: Mapping[str, float], step: int) -> None:
        """Write a point of each curve."""
        curves = {name: value for name, value in values.items() if name != "epoch"}
        rates = ("lr", "samples_per_second")
        self._results = {name: value for name, value in curves.items() if name not in rates}
        self._curves(step, curves)
        self._writer.flush()

    def end(self, outcome: str) -> None:
        """Write the hyper-parameters with the results, and close the file."""
        plain = {
            name: value if isinstance(value, bool | int | float) else _text(value)
            for name, value in self._values.items()
            if value is not None
        }
        for part in self._summary.hparams(plain, self._results) if outcome == "finished" else ():
            self._write(0, summary=part)
        self._writer.close()


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

    MAX_CHARACTERS = 500  # of a parameter on older servers

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
            self._entities.Param(name, _text(value)[: self.MAX_CHARACTERS])
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
