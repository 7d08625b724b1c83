"""The training loop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pydtnn.callbacks import Callback
from pydtnn.comm import create_communicator
from pydtnn.comm.exchange import AllReduce, GradientExchange
from pydtnn.comm.schemes.partition import Partition
from pydtnn.cuts import even_cuts
from pydtnn.data import Batch, Dataset, Loader
from pydtnn.data.augment import Augmentation
from pydtnn.errors import AgreedError
from pydtnn.finite import not_finite
from pydtnn.kernels.reference.family import Array
from pydtnn.layers import StepContext
from pydtnn.losses import Loss, get_loss
from pydtnn.metrics import Metric, get_metric
from pydtnn.model import Model
from pydtnn.optimizers import Optimizer
from pydtnn.step import Passes
from pydtnn.totals import Totals
from pydtnn.tuning import settle_choices

Logs = dict[str, float]


class Trainer:
    """Train a model on the ranks of a communicator.

    Parameters
    ----------
    model : Model
    optimizer : Optimizer
    loss : Loss or str
    metrics : sequence of Metric or str
    exchange : GradientExchange, optional
        The parallel scheme; by default gradients are summed over the ranks that an MPI launcher
        started, if any.
    callbacks : sequence of Callback
    accumulation : int
        Micro-batches into which each rank cuts its part of a step, to save memory.
    sync_batch_norm : bool
        Whether batch norm normalises with the statistics of the whole batch of all ranks; otherwise
        with those of each rank, micro-batch or shard.

    Attributes
    ----------
    epoch, step : int
        Epochs completed, and steps of the current epoch completed.
    logs : dict
        The current epoch's losses and metrics so far, over all ranks.
    history : list of dict
        One entry per epoch completed.
    stop : bool
        Set by a callback, on all ranks alike, to end training after this epoch.
    totals : Totals
        Losses and metrics of the current epoch, summed.
    seconds : dict
        Wall time on this rank so far: in training "steps", of that in "communication", waiting for
        "data", in "evaluation".
    samples_seen : int
        Samples of all ranks that training steps have consumed in this process.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        *,
        loss: Loss | str = "cross_entropy",
        metrics: Sequence[Metric | str] = ("accuracy",),
        exchange: GradientExchange | None = None,
        callbacks: Sequence[Callback] = (),
        accumulation: int = 1,
        sync_batch_norm: bool = False,
    ) -> None:
        if accumulation < 1:
            raise ValueError(f"Trainer: accumulation must be at least 1, not {accumulation}")
        self.model = model
        self.optimizer = optimizer
        self.loss = get_loss(loss)
        self.metrics = [get_metric(m) for m in metrics]
        self.exchange = exchange or AllReduce(create_communicator())
        self.comm = self.exchange.comm
        self.callbacks = list(callbacks)
        self.accumulation = accumulation
        self.sync_batch_norm = sync_batch_norm
        self._check_exact()
        self.epoch = self.step = 0
        self.logs: Logs = {}
        self.history: list[Logs] = []
        self.stop = False
        self._plan: dict[str, int] = {}
        self._loaded = False
        self.totals = self.new_totals()
        self.seconds = {"steps": 0.0, "communication": 0.0, "data": 0.0, "evaluation": 0.0}
        self.samples_seen = 0
        optimizer.bind(model.backend, model.buffers, self.exchange)

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
        """Train until `epochs` epochs are complete, from wherever this trainer stands.

        Collective: all ranks call it. In the end all ranks hold the same parameters and running
        statistics.

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
            By default, as many as it takes to see every sample once; the last step may be smaller.
        seed : int
            Of the order of the samples, their augmentation and dropout.
        loader_threads : int
            Threads that prepare batches ahead; with 0 each is prepared when it is needed.

        Returns
        -------
        list of dict
            `history`: per epoch the loss and metrics, those of the validation prefixed with "val_".
        """
        total = batch_size * self.comm.size if global_batch_size is None else global_batch_size
        loader = self._loader(
            train,
            total,
            self.exchange.sums.shards or self.comm.size * self.accumulation,
            seed=seed,
            augment=augment,
            steps_per_epoch=steps_per_epoch,
            threads=max(loader_threads, 1),
            prefetch=2 * loader_threads,
        )
        shards = self.exchange.sums.shards or 0
        plan = {"seed": seed, "global_batch_size": total, "samples": len(train), "shards": shards}
        self._check_plan(plan)
        if not self._loaded:
            self.exchange.start(self.model.buckets)
        self._plan, self._loaded, self.stop = plan, False, False
        largest = -(-min(total, len(train)) // loader.shards)
        settle_choices(self.model, self.comm, largest, training=True)
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

    def _check_exact(self) -> None:
        """Refuse what would make exact training depend on ranks or machines."""
        if self.exchange.sums.shards is None:
            return
        if self.accumulation > 1:
            raise ValueError(
                "Trainer: exact training computes shard by shard, so accumulation must be 1; use "
                "more shards to save memory"
            )
        if self.optimizer.clip_norm is not None and isinstance(self.exchange, Partition):
            raise ValueError(
                f"Trainer: {type(self.exchange).__name__} adds up the norm for clip_norm over the "
                "parts of the ranks, which is not exact; leave clip_norm out or use AllReduce"
            )
        if self.model.backend.choices.mode == "measure":
            raise ValueError(
                "Trainer: exact training needs algorithms that are not chosen by measurement; make "
                'the backend with tuning="fixed"'
            )

    def _check_plan(self, plan: dict[str, int]) -> None:
        """Refuse to continue with other batches: the position in them would mean nothing."""
        if self._loaded:
            for name, was in self._plan.items():
                if plan[name] != was:
                    raise AgreedError(
                        f"Trainer: the training to continue had {name.replace('_', ' ')} {was}, "
                        f"not {plan[name]}; continue with the same"
                    )

    def _run_epoch(
        self, loader: Loader, seed: int, validation: Dataset | None, batch_size: int
    ) -> None:
        self._notify("on_epoch_start")
        batches = loader.epoch(self.epoch, start=self.step)
        while (batch := self._clocked("data", next, batches, None)) is not None:
            before = self.comm.traffic.seconds
            self.totals += self._clocked("steps", self.train_step, batch, self.epoch, seed)
            self.seconds["communication"] += self.comm.traffic.seconds - before
            self.samples_seen += batch.total
            self.step += 1
            self.logs = self.totals.means()
            self._notify("on_step_end")
        self.logs = self.totals.means() | {"lr": self.optimizer.lr_now}
        with self.averaged():
            if validation is not None:
                results = self.evaluate(validation, batch_size=batch_size)
                self.logs |= {f"val_{name}": value for name, value in results.items()}
            self.history.append(self.logs)
            self.epoch, self.step, self.totals = self.epoch + 1, 0, self.new_totals()
            self._notify("on_epoch_end")

    @np.errstate(all="ignore")  # what overflows is told in one sentence, by `not_finite`
    def train_step(self, batch: Batch, epoch: int = 0, seed: int = 0) -> Totals:
        """Make one step on this rank's part of a global batch.

        Collective: all ranks call it.

        Returns
        -------
        Totals
            Loss and metrics summed over all ranks.

        Raises
        ------
        NotFiniteError
            On all ranks, if the loss is NaN or infinite; the parameters are left as they were.
        """
        exchange = self.exchange
        passes = Passes(self, batch, epoch, seed)
        passes.run()
        if not np.isfinite(passes.totals.values).all():
            exchange.abandon()
            context = StepContext(training=True, seed=seed, epoch=epoch, samples=batch.samples)
            raise not_finite(self, batch, context, f"at epoch {epoch + 1}, step {batch.index + 1}")
        self.model.statistics.update()
        exchange.samples += len(batch)
        exchange.update(self.optimizer)
        return passes.totals

    def judge(self, y: Array, target: np.ndarray, scale: float, totals: Totals) -> Array:
        """Add loss and metrics of an output to `totals`; return the gradient of the scaled loss."""
        backend = self.model.backend
        target = backend.asarray(target)
        loss, dy = self.loss(backend, y, target, scale)
        totals.add(len(target), loss, *(metric(backend.xp, y, target) for metric in self.metrics))
        return dy

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
        with self.averaged():
            return self._clocked("evaluation", self._evaluate, dataset, batch_size)

    @np.errstate(all="ignore")
    def _evaluate(self, dataset: Dataset, batch_size: int) -> Logs:
        model, context, broken = self.model, StepContext(training=False), None
        sums, totals = self.exchange.sums, self.new_totals()
        at_least = sums.shards or self.comm.size
        if not self.model.backend.choices.frozen:
            largest = -(-min(batch_size, len(dataset)) // at_least)
            settle_choices(self.model, self.comm, largest, training=False)
        with self._loader(dataset, max(batch_size, at_least), at_least, shuffle=False) as loader:
            own = range(*even_cuts(at_least, self.comm.size)[self.comm.rank :][:2])
            parts: dict[int | None, Totals] = {number: self.new_totals() for number in own}
            for batch in loader.epoch(0):
                for number, rows in batch.shards:
                    y, _ = model.forward(model.backend.asarray(batch.x[rows]), context, keep=False)
                    self.judge(y, batch.y[rows], 1.0, parts[number])
                if broken is None and not all(np.isfinite(t.values).all() for t in parts.values()):
                    broken = batch
        sums.begin(at_least)
        totals.values, request = sums.add_up([(n, part.values) for n, part in parts.items()])
        request.wait()
        if not np.isfinite(totals.values).all():
            raise not_finite(self, broken or batch, context, "in the evaluation")
        return totals.means()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Hold the same parameters and statistics on all ranks, to evaluate or save them.

        Collective: all ranks call it. Where ranks train with different parameters each goes on with
        its own afterwards.
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
        shared = self.sync_batch_norm or self.exchange.sums.shards is not None
        if shared or not statistics.statistics:
            return  # they are equal as it is
        weight = np.array([statistics.samples])
        self.comm.allreduce(weight)
        if weight[0] > 0:
            statistics.running *= statistics.samples / weight[0]
            self.comm.allreduce(statistics.running)
            statistics.samples = 0.0

    def state(self) -> dict[str, Any]:
        """Where training stands: epoch, step, history and the current epoch's sums."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "history": self.history,
            "metrics": list(self.totals.names),
            "totals": self.totals.values.copy(),
            "plan": self._plan,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take what `state` returned; the exchange has been started and loaded before.

        Raises
        ------
        ValueError
            If it has other metrics, whose sums cannot be continued; nothing is changed then.
        """
        if tuple(state["metrics"]) != self.totals.names:
            raise ValueError(
                f"Trainer: the training to continue has sums of {', '.join(state['metrics'])}, not "
                f"{', '.join(self.totals.names)}; continue with the same metrics"
            )
        self.epoch, self.step = int(state["epoch"]), int(state["step"])
        self.history = [dict(logs) for logs in state["history"]]
        self.totals = self.new_totals()
        self.totals.values[:] = state["totals"]
        self._plan, self._loaded = dict(state["plan"]), True

    def new_totals(self) -> Totals:
        """Return sums of the loss and the metrics that are still 0."""
        return Totals(["loss", *(m.name for m in self.metrics)])

    def _loader(self, dataset: Dataset, batch_size: int, shards: int, **options: Any) -> Loader:
        return Loader(
            dataset,
            global_batch_size=batch_size,
            shards=shards,
            rank=self.comm.rank,
            size=self.comm.size,
            dtype=self.model.dtype,
            **options,
        )

    def _notify(self, event: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *args)

    def _clocked(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args)
        finally:
            self.seconds[what] += time.perf_counter() - start
