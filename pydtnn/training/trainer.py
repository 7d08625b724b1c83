"""The training loop."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from pydtnn.comm import create_communicator
from pydtnn.data import Batch, Dataset, Loader
from pydtnn.data.augment import Augmentation
from pydtnn.model import Model
from pydtnn.optimizers import Optimizer
from pydtnn.optimizers.loss_scale import LossScale
from pydtnn.parallel.exchange import AllReduce, GradientExchange
from pydtnn.parallel.sums import average
from pydtnn.training import checks
from pydtnn.training.callback import Callback, evaluated
from pydtnn.training.capture import create_steps
from pydtnn.training.evaluation import evaluate
from pydtnn.training.fingerprint import check_data, check_loaded
from pydtnn.training.metric_sums import Totals
from pydtnn.training.objective import Losses, Metrics, Objective
from pydtnn.training.setup import Setup
from pydtnn.training.steps import Eager, Result, Steps
from pydtnn.training.tuning import autotune
from pydtnn.utils.guess import Answering
from pydtnn.utils.validate import whole

Logs = dict[str, float]


class Trainer(Answering):
    """Train a model on the ranks of a communicator.

    Parameters
    ----------
    model : Model
    optimizer : Optimizer
    loss : Loss or str
        A list with one loss per output if the model has several.
    metrics : sequence of Metric or str, optional
        By default the accuracy. A list of metrics per output if the model has several; by default
        none.
    loss_weights : sequence of float, optional
        Factors of the losses in the sum over several outputs; by default 1.
    exchange : GradientExchange, optional
        The parallel scheme; by default gradients are summed over the ranks of an MPI launcher, if
        any.
    callbacks : sequence of Callback
    accumulation : int
        Micro-batches into which each rank divides its part of a step, to save memory.
    sync_batch_norm : bool
        Whether batch norm normalises with the statistics of the whole batch of all ranks; otherwise
        with those of each rank, micro-batch or shard.
    graph : bool
        Whether steps on a GPU are captured as one CUDA graph, if possible.

    Attributes
    ----------
    epoch, step : int
        Epochs completed, and steps of the current epoch completed.
    logs : dict
        The current epoch's losses and metrics so far, over all ranks; if steps are captured,
        without the last step, which is not complete, and empty after the first.
    history : list of dict
        One entry per epoch completed.
    stop : bool
        Set by a callback, on all ranks, to stop training after this epoch.
    objective : Objective
        Losses, metrics and their names.
    loss_scale : LossScale or None
        Factor on the loss of a float16 model.
    setup : Setup
        The parts above, passed to steps and evaluations.
    totals : Totals
        Losses and metrics of the current epoch, summed.
    seconds : dict
        Wall time on this rank so far: in training "steps", of that in "communication", waiting for
        "data", in "evaluation".
    samples_seen : int
        Samples of all ranks that training steps have consumed in this process.
    binding : object
        The optimizer's `binding` to this trainer.
    global_batch_size : int
        Samples of all ranks in a step of `fit`, except the last of an epoch; 0 before.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        *,
        loss: Losses = "cross_entropy",
        metrics: Metrics | None = None,
        loss_weights: Sequence[float] | None = None,
        exchange: GradientExchange | None = None,
        callbacks: Sequence[Callback] = (),
        accumulation: int = 1,
        sync_batch_norm: bool = False,
        graph: bool = True,
    ) -> None:
        checks.check_parts(model, optimizer, exchange, callbacks, metrics or ())
        self.model = model
        self.optimizer = optimizer
        outputs = len(model.graph.outputs)
        self.objective = Objective(model.backend, outputs, loss, loss_weights, metrics)
        self.exchange = exchange or AllReduce(create_communicator())
        self.comm = self.exchange.comm
        self.callbacks = list(callbacks)
        self.accumulation = whole("Trainer", "accumulation", accumulation, at_least=1)
        self.sync_batch_norm = sync_batch_norm
        half = model.dtype == np.float16
        self.loss_scale = LossScale(model.backend) if half else None
        self.setup = Setup(
            model, optimizer, self.exchange, self.objective, self.loss_scale, sync_batch_norm
        )
        checks.check_options(self.setup, self.accumulation)
        self._graph = graph
        self._results: deque[Result] = deque()
        self.epoch = self.step = 0
        self.logs: Logs = {}
        self.history: list[Logs] = []
        self.stop = False
        self._plan: dict[str, int] = {}
        self._loaded = False
        self.global_batch_size = 0
        self.totals = self.setup.new_totals()
        self.seconds = {"steps": 0.0, "communication": 0.0, "data": 0.0, "evaluation": 0.0}
        self.samples_seen = 0
        model.choose_buckets(self.exchange.bucket_bytes)
        optimizer.bind(model.backend, model.buffers, self.exchange)
        optimizer.groups.check(model.parameters)
        optimizer.scale_loss(self.loss_scale)
        self.binding = optimizer.binding

    def fit(
        self,
        train: Dataset,
        validation: Dataset | None = None,
        *,
        epochs: int = 1,
        batch_size: int = 64,
        global_batch_size: int | None = None,
        augment: Sequence[Augmentation] = (),
        steps_per_epoch: int | None = None,
        seed: int = 0,
        loader_threads: int = 1,
    ) -> list[Logs]:
        """Train until `epochs` epochs are complete, starting from the trainer's current state.

        Collective: all ranks call it. At the end all ranks have the same parameters and running
        statistics. Every call starts from the parameters of rank 0, so weights that rank 0 has
        loaded in between are sent to all ranks. State of optimizer and exchange (momentum,
        residuals of compression, delayed gradients) is kept; to start without it, create a new
        trainer.

        Parameters
        ----------
        train, validation : Dataset
            `validation` is evaluated after every epoch.
        epochs : int
            Counted from the beginning, also after resuming.
        batch_size : int
            Samples per rank and step.
        global_batch_size : int, optional
            Samples of all ranks per step; by default ``batch_size * ranks``.
        augment : sequence of Augmentation
        steps_per_epoch : int, optional
            By default, the number of steps for one pass over all samples; the last step may be
            smaller.
        seed : int
            Seed of the order of the samples, their augmentation and dropout.
        loader_threads : int
            Threads that prepare batches in advance; with 0 each is prepared when it is needed.

        Returns
        -------
        list of dict
            `history`: per epoch the loss and metrics, those of the validation prefixed with "val_".
        """
        checks.check_binding(self.optimizer, self.binding)
        checks.check_validation(train, validation)
        checks.check_trainable(self.model)
        self.rebind()
        whole("Trainer", "epochs", epochs, at_least=0)
        total = batch_size * self.comm.size if global_batch_size is None else global_batch_size
        loader = self.setup.loader(
            train,
            total,
            self.exchange.sums.shards or self.comm.size * self.accumulation,
            seed=seed,
            augment=augment,
            steps_per_epoch=steps_per_epoch,
            threads=max(loader_threads, 1),
            prefetch=2 * loader_threads,
        )
        checks.check_shards(self.setup, loader, self.accumulation)
        shards = self.exchange.sums.shards or 0
        run = {"seed": seed, "global_batch_size": total, "samples": len(train), "shards": shards}
        others = {"epochs": epochs, "steps": len(loader), "validated": len(validation or ())}
        checks.check_plan(self.setup, run, self._plan if self._loaded else {}, **others)
        check_data(self.comm, [("training set", train), ("validation set", validation)])
        if not self._loaded:
            check_loaded(self.comm, self.model.loaded, before_broadcast=True)
            self.exchange.begin(self.model.buckets)
            for buffer in self.model.frozen_buffers:
                self.comm.broadcast(buffer.values)
            if self.model.statistics.statistics:
                self.comm.broadcast(self.model.statistics.running)
        self.model.loaded = None
        self._plan, self._loaded, self.stop = run, False, False
        self.global_batch_size = total
        self._results.clear()
        largest = -(-min(total, len(train)) // loader.shards)
        autotune(self.model, self.comm, largest, training=True)
        try:
            self._notify("on_fit_start", epochs, len(loader))
            with loader:
                while self.epoch < epochs and not self.stop:
                    self._run_epoch(loader, seed, validation, total)
            self.synchronise()
            if not self.exchange.equal:
                self.exchange.average_parameters()
            self._notify("on_fit_end")
        finally:
            for callback in self.callbacks:
                callback.close()
        return self.history

    def _run_epoch(
        self, loader: Loader, seed: int, validation: Dataset | None, batch_size: int
    ) -> None:
        self.logs = {}
        self._notify("on_epoch_start")
        batches = loader.epoch(self.epoch, start=self.step)
        while (batch := self._clocked("data", next, batches, None)) is not None:
            before = self.comm.traffic.seconds
            self._results.append(self._clocked("steps", self._begin, batch, self.epoch, seed))
            self.samples_seen += batch.total
            self.step += 1
            self.drain(self.steps.late)
            self.seconds["communication"] += self.comm.traffic.seconds - before
            self._notify("on_step_end")
        self.drain()
        checks.check_scale(self.setup)
        self.logs = self.totals.means() | {"lr": self.optimizer.lr_now}
        with self.averaged():
            if validation is not None:
                results = self.evaluate(validation, batch_size=batch_size)
                self.logs |= {f"val_{name}": value for name, value in results.items()}
            self.history.append(self.logs)
            self.epoch, self.step, self.totals = self.epoch + 1, 0, self.setup.new_totals()
            self._notify("on_epoch_end")

    def rebind(self) -> None:
        """Bind the optimizer to the trainable parameters, if they have changed, with its state.

        Collective: all ranks call it. Called by `fit`, and by `load_checkpoint`.
        """
        if self.optimizer.is_bound_to(self.model.buffers):
            return
        self.optimizer.rebind(self.model.buffers, self.exchange)
        self.binding = self.optimizer.binding
        vars(self).pop("steps", None)  # a captured graph contains the addresses of the arrays

    @cached_property
    def steps(self) -> Steps:
        """The implementation of steps, selected before the first."""
        return create_steps(self.setup, self._graph)

    @np.errstate(all="ignore")  # overflow is reported by `not_finite`
    def _begin(self, batch: Batch, epoch: int, seed: int) -> Result:
        checks.check_binding(self.optimizer, self.binding)
        steps = self.steps
        if batch.total < self.global_batch_size:  # the last of an epoch
            self.drain()  # in order
            steps = Eager(self.setup)
        return steps(batch, epoch, seed)

    def drain(self, late: int = 0) -> None:
        """Wait until at most `late` steps are incomplete, and add the losses of the others."""
        while len(self._results) > late:
            self.totals += self._clocked("steps", self._results.popleft())
            self.logs = self.totals.means()

    def train_step(self, batch: Batch, epoch: int = 0, seed: int = 0) -> Totals:
        """Run one step on this rank's part of a global batch.

        Collective: all ranks call it.

        Returns
        -------
        Totals
            Loss and metrics summed over all ranks.

        Raises
        ------
        NotFiniteError
            On all ranks, if the loss is NaN or infinite; the parameters are not changed.
        """
        return self._begin(batch, epoch, seed)()

    def evaluate(self, dataset: Dataset, *, batch_size: int = 256) -> Logs:
        """Compute loss and metrics of a data set, without augmentation or dropout.

        Collective: all ranks call it; each reads its part.

        Parameters
        ----------
        dataset : Dataset
        batch_size : int
            Samples of all ranks per pass.

        Returns
        -------
        dict
            Means over all samples, equal on all ranks.

        Raises
        ------
        NotFiniteError
            On all ranks, if the loss or a metric is NaN or infinite.
        """
        whole("Trainer", "batch_size", batch_size, at_least=1)
        check_loaded(self.comm, self.model.loaded, before_broadcast=False)
        with evaluated(self):
            return self._clocked("evaluation", evaluate, self.setup, dataset, batch_size)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Context in which all ranks have the same parameters and statistics.

        Collective: all ranks call it. If ranks train with different parameters, each restores its
        own afterwards.
        """
        self.synchronise()
        with self.exchange.averaged():
            yield

    def synchronise(self) -> None:
        """Make running statistics equal on all ranks.

        Collective: all ranks call it. They are averaged, weighted by the samples each rank has
        seen.
        """
        statistics = self.model.statistics
        if self.setup.equal_statistics or not statistics.statistics:
            return
        with statistics.constant():
            average(self.comm, [statistics.running], statistics.samples)
        statistics.samples = 0.0

    def state(self) -> dict[str, Any]:
        """Return the epoch, step, history and the current epoch's sums."""
        checks.check_binding(self.optimizer, self.binding)
        self.drain()
        return {
            "epoch": self.epoch,
            "step": self.step,
            "history": self.history,
            "metrics": list(self.totals.names),
            "totals": self.totals.values.copy(),
            "plan": self._plan,
            "frozen": [*self.model.frozen],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the state returned by `state`, after the exchange has been started and loaded.

        Raises
        ------
        ValueError
            If it has other metrics, or invalid numbers; nothing is changed.
        """
        if tuple(state["metrics"]) != self.totals.names:
            raise ValueError(
                f"Trainer: metrics must be {', '.join(state['metrics'])}, as in the training to "
                f"continue, got {', '.join(self.totals.names)}; continue with the same metrics"
            )
        epoch, step = (
            whole("Trainer", name, state[name], at_least=0) for name in ("epoch", "step")
        )
        totals, history = self.setup.new_totals(), [dict(logs) for logs in state["history"]]
        totals.load(state["totals"])
        self._plan, self._loaded = dict(state["plan"]), True
        self.epoch, self.step, self.history, self.totals = epoch, step, history, totals

    def _notify(self, event: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *args)

    def _clocked(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args)
        finally:
            self.seconds[what] += time.perf_counter() - start
