"""The training loop."""

from __future__ import annotations

import contextlib
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn import data
from pydtnn.comm.agree import on_rank_0, require_equal
from pydtnn.data import Augmentation, Batch, Dataset, Loader
from pydtnn.data.comparison import check_data
from pydtnn.data.loader import samples_of_step
from pydtnn.layers import StepContext
from pydtnn.model import Model
from pydtnn.optimizers import Optimizer, get_optimizer
from pydtnn.parallel.exchange import GradientExchange, averaged, make_equal
from pydtnn.parallel.mesh import Mesh
from pydtnn.training import batch_checks, checks
from pydtnn.training.batch_checks import micro_batches_of
from pydtnn.training.callback import (
    Callback,
    Function,
    as_callback,
    evaluated,
    take_over,
    training_seconds,
)
from pydtnn.training.checks import last_epoch, refuse
from pydtnn.training.equality import CheckEqual, create_check
from pydtnn.training.examination import check_loaded
from pydtnn.training.logs import History, Logs
from pydtnn.training.metric_sums import Totals
from pydtnn.training.nonfinite import NotFiniteError, not_finite
from pydtnn.training.objective import Losses, Metrics, Objective
from pydtnn.training.preparation import autotune, prepare, read_position, start_equal
from pydtnn.training.progress import create_progress
from pydtnn.training.setup import (
    Setup,
    bind_optimizer,
    create_setup,
    may_use_up,
    represent_setup,
)
from pydtnn.training.steps import Eager, Result, TrainingSteps
from pydtnn.utils import clock
from pydtnn.utils.collective import collective
from pydtnn.utils.errors import Interrupted
from pydtnn.utils.names import SuggestsNames
from pydtnn.utils.observer import Observer, combine
from pydtnn.utils.split import even_cut
from pydtnn.utils.validate import check_bool, check_int


class Trainer(SuggestsNames):
    """Train a model on the ranks of a communicator.

    Parameters
    ----------
    model : Model
    optimizer : Optimizer or str
    loss : Loss or str
        A list with one loss per output if the model has several.
    metrics : sequence of Metric or str, optional
        By default those of the loss: `Loss.metrics`, such as the accuracy of cross-entropy. A list
        of metrics per output if the model has several.
    loss_weights : sequence of float, optional
        Factors of the losses in the sum over several outputs; by default 1.
    auxiliary_weights : sequence of float, optional
        Factors of the losses of all outputs after the first, if these have its loss and its targets
        and are not evaluated, as the auxiliary classifiers of `googlenet`.
    exchange : GradientExchange, optional
        The parallel scheme; by default gradients are summed over the ranks of an MPI launcher, if
        any, or over the axis "data" of the mesh.
    mesh : Mesh, optional
        The ranks, if the network is distributed too; by default that of the model. A scheme is then
        constructed with ``mesh.data``.
    callbacks : sequence of Callback or callable
        A function is called with the trainer after every epoch, see `FunctionCallback`.
    accumulation : int
        Micro-batches into which each rank divides its part of a step, to save memory.
    micro_batches : int, optional
        The same for the stages of a pipeline, which compute different ones at a time; by default
        four per rank along the axis.
    sync_batch_norm : bool
        Whether batch norm normalises with the statistics of the whole batch of all ranks; otherwise
        with those of each rank, micro-batch or shard.
    graph : bool
        Whether steps on a GPU are captured as one CUDA graph, if possible.
    check_equal : int, optional
        Steps from one comparison of the ranks to the next (`CheckEqual`): by default 100 if there
        are several ranks, and they must be equal; with 0 they are not compared. A `CheckEqual`
        among the callbacks replaces it.
    progress : {"auto", "bar", "plain", "none"} or bool
        How rank 0 shows the progress of `fit`: "auto" (or True) is a bar on a terminal and plain
        lines elsewhere, "none" (or False) shows nothing. A `ProgressBar` among the callbacks
        replaces it.
    keep_gradients : bool
        Whether `Parameter.grad` has the gradients after a step. They are kept in any case for
        callbacks that may read them (`Callback.reads_gradients`), with observers, accumulation or
        `clip_norm`, on several ranks and on GPUs. Otherwise each bucket is updated as soon as
        backward has completed its gradients, and its memory is used again.
    observers : sequence of Observer
        Receive phases, layers, messages and batches during `fit`, `evaluate` and `train_step`:
        docs/tracing.md.

    Attributes
    ----------
    epoch, step : int
        Epochs completed, and steps of the current epoch completed.
    logs : dict
        The current epoch's losses and metrics so far, over all ranks; of the last `own_steps`, over
        the samples of this rank only. If steps are captured or overlap, without the last step,
        which is not complete, and empty after the first.
    history : list of dict
        One entry per epoch completed.
    losses : list of float
        The loss of each step that this process has trained, over the samples of all ranks and equal
        on all of them; in the last `own_steps`, over the samples of this rank. If steps are
        captured or overlap, the last one is added after the next step has begun. Not saved in
        checkpoints.
    own_steps : int
        Steps whose losses have not been summed over the ranks. 0 if the scheme sums them in every
        step (`GradientExchange.sums_losses`); schemes whose ranks train independently, such as
        local SGD and gossip, sum them when all ranks have averaged, before checkpoints, and in the
        last step of an epoch. `history` is therefore that of all ranks.
    stop : bool
        Set by a callback, on any rank, to stop training of all ranks after this epoch.
    pending : tuple of str and int, or None
        The event at the end of a step or an epoch in progress, and the number of the callback that
        is called. Training that continues after ranks have failed completes it first.
    recovered : bool
        Whether training continues after ranks have failed: no algorithm is measured again.
    objective : Objective
        Losses, metrics and their names.
    loss_scale : LossScale or None
        Factor on the loss of a float16 model.
    setup : Setup
        The parts above, passed to steps and evaluations.
    totals : Totals
        Losses and metrics of the current epoch, summed over the samples of all ranks; without
        those of `own_steps`.
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
        optimizer: Optimizer | str,
        *,
        loss: Losses = "cross_entropy",
        metrics: Metrics | None = None,
        loss_weights: Sequence[float] | None = None,
        auxiliary_weights: Sequence[float] | None = None,
        exchange: GradientExchange | None = None,
        mesh: Mesh | None = None,
        callbacks: Sequence[Callback | Function] = (),
        accumulation: int = 1,
        micro_batches: int | None = None,
        sync_batch_norm: bool = False,
        graph: bool = True,
        check_equal: int | None = None,
        progress: str | bool = "auto",
        keep_gradients: bool = False,
        observers: Sequence[Observer] = (),
    ) -> None:
        optimizer = get_optimizer(optimizer) if isinstance(optimizer, str) else optimizer
        own: Any = callbacks  # checked below
        if isinstance(callbacks, list | tuple):
            own = [as_callback(callback) for callback in callbacks]
        checks.check_parts(model, optimizer, exchange, own, metrics or ())
        self.model = model
        self.optimizer = optimizer
        self.objective = Objective(
            model.backend, model.output_shapes, loss, loss_weights, metrics, auxiliary_weights
        )
        self.setup = create_setup(
            model,
            optimizer,
            self.objective,
            exchange,
            mesh,
            combine(observers),
            sync_batch_norm=sync_batch_norm,
            accumulation=accumulation,
            micro_batches=micro_batches,
        )
        self.exchange, self.loss_scale = self.setup.exchange, self.setup.loss_scale
        self.comm = self.setup.comm
        self.callbacks: list[Callback] = list(own)
        self._progress = create_progress(progress)
        self._check = create_check(check_equal, self.setup)
        self.sync_batch_norm = sync_batch_norm
        checks.check_options(self.setup)
        self.accumulation = micro_batches_of(self.setup)
        checks.warn_of_probabilities(self.setup)
        self._graph = graph
        self._eager: Callable[..., Eager] = Eager
        self._keep_gradients = check_bool("Trainer", "keep_gradients", keep_gradients)
        self._results: deque[Result] = deque()
        self._forget_own()
        self.epoch = self.step = 0
        self.logs = Logs()
        self.history = History()
        self.losses: list[float] = []
        self._plan: dict[str, int] = {}
        self.pending: tuple[str, int] | None = None
        self.recovered = False
        self.stop = self._loaded = self._warned = False
        self._tuned_for = 0  # samples of the largest pass, for which algorithms have been selected
        self.global_batch_size = 0
        self._validation: Dataset | None = None
        self.totals = self.setup.new_totals()
        self.seconds = {"steps": 0.0, "communication": 0.0, "data": 0.0, "evaluation": 0.0}
        self.samples_seen = 0
        bind_optimizer(self.setup, self._uses_up())
        self.binding = optimizer.binding

    def __repr__(self) -> str:
        return represent_setup(self.setup, self.callbacks, self.epoch)

    def fit(
        self,
        train: Dataset,
        validation: Dataset | None = None,
        *,
        epochs: int | None = None,
        more_epochs: int | None = None,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        augment: Sequence[Augmentation] = (),
        mix: Sequence[data.Mixing] = (),
        targets: str = "moved",
        steps_per_epoch: int | None = None,
        drop_last: bool = False,
        seed: int = 0,
        loader_threads: int = 1,
        **others: object,
    ) -> History:
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
        epochs : int, optional
            Counted from the beginning, also after resuming; by default 1. If they are complete,
            nothing is trained, which one line reports.
        more_epochs : int, optional
            Instead of `epochs`: train this number of further epochs.
        batch_size : int, optional
            Samples per rank of the scheme and step; by default 64, or fewer if the data set has
            fewer samples.
        global_batch_size : int, optional
            Samples of all ranks per step; by default ``batch_size * ranks``.
        augment : sequence of Augmentation
        mix : sequence of Mixing
            Such as ``[Mixup(0.2)]``; of several, each sample is mixed by one.
        targets : {"moved", "unchanged"}
            Whether masks are moved with augmented images, and other targets with positions refused:
            see `pydtnn.data.Loader`.
        steps_per_epoch : int, optional
            By default, the number of steps for one pass over all samples; the last step may be
            smaller.
        drop_last : bool
            Whether a last step with fewer samples than the others is omitted.
        seed : int
            Seed of the order of the samples, their augmentation and dropout.
        loader_threads : int
            Threads that prepare batches in advance; with 0 each is prepared when it is needed.
        **others
            Raise TypeError, with the name of the argument to use instead.

        Returns
        -------
        list of dict
            `history`: per epoch the loss and metrics, those of the validation with the prefix
            ``val_``.
        """
        checks.check_binding(self.optimizer, self.binding)
        refuse(others)
        epochs = last_epoch(self.epoch, epochs, more_epochs)
        ranks = self.exchange.comm.size
        within = collective(self.comm, "Trainer.fit")
        with within, self.setup.observed(), self.setup.interruptible():
            with self.setup.phase("start"):
                take_over(self)
                loader = self._start(
                    train,
                    validation,
                    batch_size=samples_of_step(train, ranks, batch_size, global_batch_size),
                    epochs=epochs,
                    loader_threads=loader_threads,
                    seed=seed,
                    augment=augment,
                    mix=mix,
                    targets=targets,
                    steps_per_epoch=steps_per_epoch,
                    drop_last=check_bool("Trainer", "drop_last", drop_last),
                )
            self._run(loader, validation, epochs, seed)
        return self.history

    def _run(self, loader: Loader, validation: Dataset | None, epochs: int, seed: int) -> None:
        """Train until epochs are complete."""
        try:
            self._notify("on_fit_start", epochs, len(loader))
            self._notify("on_fit_ready", epochs, len(loader))
            with loader:
                if self.pending is not None and self.step == 0:
                    with self.averaged():
                        self._notify_of_end("on_epoch_end")
                while not self._ends(epochs):
                    with self.setup.phase("epoch"):
                        self._run_epoch(loader, seed, validation)
            self.synchronise()
            make_equal(self.exchange)
            self._notify("on_fit_end")
            self.optimizer.apply_average()
            self._notify("finish")
        except NotFiniteError:
            self.compare_ranks()  # a difference may be the cause
            raise
        finally:
            self._validation = None
            for callback in self._all_callbacks():
                callback.close()

    def _ends(self, epochs: int) -> bool:
        """Return whether training is over, as any rank may `stop` it. Collective."""
        self.stop = any(self.comm.gather_object(self.stop))
        return self.stop or self.epoch >= epochs

    def _start(self, train: Dataset, validation: Dataset | None, **options: Any) -> Loader:
        """Check everything before the first step, and make all ranks equal."""
        was = self._plan if self._loaded else {}
        loader, plan = prepare(
            self.setup, train, validation, was, accumulation=self.accumulation, **options
        )
        if was:
            batch_checks.warn_of_statistics(self.setup, train)
        rebound = self.rebind()
        self.model.inputs = self.comm.gather_object(self.objective.describe(train))[0]
        self._warned = batch_checks.warn_of_statistics(self.setup, validation)
        if rebound or not self._loaded:
            start_equal(self.setup)
        self.model.loaded, self.model.given = None, {}
        self._plan, self._loaded, self.stop = plan, False, False
        self.global_batch_size = loader.global_batch_size
        self._validation = validation
        self._results.clear()
        self._forget_own()
        largest = -(-min(loader.global_batch_size, len(train)) // loader.shards)
        if not self.recovered and (rebound or was or largest != self._tuned_for):
            autotune(self.model, self.comm, largest, training=True)
            self._tuned_for = largest
        return loader

    def _run_epoch(self, loader: Loader, seed: int, validation: Dataset | None) -> None:
        if self.pending is None:
            self.logs = Logs()
        self._notify("on_epoch_start")
        self._run_steps(loader, seed)
        checks.check_scale(self.setup)
        self.logs = self.totals.means() | {"lr": self.optimizer.lr_now}
        if clock.virtual():
            self.logs[clock.VIRTUAL_SECONDS] = training_seconds(self)
        with self.averaged():
            if validation is not None:
                results = self.evaluate(validation, global_batch_size=self.global_batch_size)
                self.logs |= {f"val_{name}": value for name, value in results.items()}
            self.history.append(self.logs.numbers)
            self.epoch, self.step, self.totals = self.epoch + 1, 0, self.setup.new_totals()
            self._notify_of_end("on_epoch_end")

    def evaluate(
        self,
        dataset: Dataset,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
    ) -> Logs:
        """Compute loss and metrics of a data set, without augmentation or dropout.

        Collective: all ranks call it; each reads its part.

        Parameters
        ----------
        dataset : Dataset
        batch_size : int, optional
            Samples per rank of the scheme and pass.
        global_batch_size : int, optional
            Samples of all ranks per pass; by default ``batch_size * ranks``, or 256.

        Returns
        -------
        dict
            Means over all samples, equal on all ranks; arrays for metrics such as
            `pydtnn.metrics.ConfusionMatrix`.

        Raises
        ------
        NotFiniteError
            On all ranks, if the loss or a metric is NaN or infinite.
        """
        total = 256 if global_batch_size is None else global_batch_size
        if batch_size is not None and global_batch_size is None:
            ranks = self.exchange.comm.size
            total = check_int("Trainer", "batch_size", batch_size, at_least=1) * ranks
        check_int("Trainer", "global_batch_size", total, at_least=1)
        with (
            collective(self.comm, "Trainer.evaluate"),
            self.setup.observed(),
            self.setup.phase("evaluation"),
            contextlib.ExitStack() as stack,
        ):
            check_loaded(self.comm, self.model.loaded, before_broadcast=False)
            batch_checks.check_samples(self.setup, dataset, "the training")
            if dataset is not self._validation:  # which has been compared when training started
                facts = {"global batch size": total}
                require_equal(self.comm, "Trainer", facts, "give every rank the same")
                check_data(self.comm, "Trainer", [("data set", dataset)])
            self._warned = self._warned or batch_checks.warn_of_statistics(self.setup, dataset)
            stack.enter_context(evaluated(self))
            return self._clocked("evaluation", evaluate, self.setup, dataset, total)

    def compare_ranks(self) -> None:
        """Compare the ranks now, if they are compared (`CheckEqual`) and `fit` runs.

        Collective: all ranks call it. Checkpoints are saved after a comparison.

        Raises
        ------
        AgreedError
            On all ranks, if they differ.
        """
        with collective(self.comm, "Trainer.compare_ranks", nested=True):
            for callback in self._all_callbacks():
                if isinstance(callback, CheckEqual):
                    callback.compare(self)

    def state(self) -> dict[str, Any]:
        """Return the epoch, step, history and the current epoch's sums.

        Collective: all ranks call it after the same step.
        """
        from pydtnn.saving.models import inputs_to_json  # of checkpoints and saved models only

        checks.check_binding(self.optimizer, self.binding, self.model)
        self.add_up_losses()
        return {
            "epoch": self.epoch,
            "step": self.step,
            "history": self.history,
            "metrics": list(self.totals.names),
            "totals": self.totals.values.copy(),
            "plan": self._plan,
            "frozen": [*self.model.frozen],
            "trained_on": inputs_to_json(self.model.description.inputs, self.model.inputs),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the state returned by `state`, after the exchange has been started and loaded.

        Raises
        ------
        ValueError
            If it has other metrics, or invalid numbers; nothing is changed.
        """
        position = read_position(self.setup, state)
        if "trained_on" in state:  # not in checkpoints of earlier versions
            from pydtnn.saving.models import inputs_from_json

            self.model.inputs = inputs_from_json(state["trained_on"])[1]
        self._plan, self._loaded = dict(state["plan"]), True
        self.epoch, self.step, self.history, self.totals = position
        self._forget_own()

    def use_steps(self, eager: Callable[..., Eager]) -> None:
        """Create steps by a function or class in place of `Eager`, except in CUDA graphs."""
        self._eager = eager
        vars(self).pop("steps", None)

    @cached_property
    def steps(self) -> TrainingSteps:
        """The implementation of steps, selected before the first."""
        if self.setup.asynchronous:
            from pydtnn.training.asynchronous import AsynchronousSteps  # only with stages

            return AsynchronousSteps(self.setup)
        if self.setup.model.backend.name != "cuda":
            return self._eager(self.setup, uses_up=self._uses_up)
        from pydtnn.training.capture import create_steps  # only here: it imports GPU code

        return create_steps(self.setup, self._graph)

    def _run_steps(self, loader: Loader, seed: int) -> None:
        """Run the remaining steps of an epoch."""
        setup, observer = self.setup, self.setup.observer
        loader.equal_numbers = setup.equal_numbers
        batches = loader.epoch(self.epoch, start=self.step)
        if clock.virtual():
            self.comm.barrier()  # what was beside training takes none of its time
        if self.pending is not None:
            self._notify_of_end("on_step_end")
        while self.step < len(loader):
            self._end_if_signalled()
            if observer is not None:
                observer.step(self.epoch, self.step)
            with setup.phase("data"):
                batch = self._clocked("data", next, batches)
            before = self.comm.traffic.seconds
            with setup.phase("step"):
                self._results.append(self._clocked("steps", self._begin, batch, self.epoch, seed))
                self.samples_seen += batch.total
                self.step += 1
                with setup.phase("loss"):
                    self.drain(self.steps.late)
                    alone = not self.exchange.sums_losses
                    if alone and (self.exchange.met or self.step == len(loader)):
                        self.add_up_losses()
            self.seconds["communication"] += self.comm.traffic.seconds - before
            self._notify_of_end("on_step_end")
        self._end_if_signalled()  # before the evaluation
        self.drain()

    def _end_if_signalled(self) -> None:
        """End training if a signal has asked for it and all ranks have completed their last step.

        Raises
        ------
        Interrupted
            On all ranks.
        """
        supervision = self.comm.supervision
        last = None if supervision is None else supervision.last_step.passed()
        if last is not None:
            self.add_up_losses()
            self._notify("on_interrupt")
            name = signal.Signals(last.signal).name
            raise Interrupted(
                f"rank {last.rank} received {name}: training has ended after step {self.step} of "
                f"epoch {self.epoch + 1}",
                last.signal,
            )

    def _notify(self, event: str, *args: Any) -> None:
        """Call a method of every callback."""
        for callback in self._all_callbacks():
            self._call(callback, event, *args)

    def _notify_of_end(self, event: str) -> None:
        """Call a method of every callback, or complete these calls after ranks have failed."""
        first = 0 if self.pending is None else self.pending[1]
        for number, callback in enumerate(self._all_callbacks()[first:], first):
            self.pending = event, number
            self._call(callback, event)
        self.pending = None

    def _call(self, callback: Callback, event: str, *args: Any) -> None:
        name, traffic = f"callback {type(callback).__name__}", self.comm.traffic
        before, traffic.caller = traffic.caller, name
        with self.setup.phase(name):
            getattr(callback, event)(self, *args)
        traffic.caller = before

    @np.errstate(all="ignore")  # overflow is reported by `not_finite`
    def _begin(self, batch: Batch, epoch: int, seed: int) -> Result:
        checks.check_binding(self.optimizer, self.binding, self.model)
        steps = self.steps
        if batch.total < self.global_batch_size:  # the last of an epoch
            self.drain()  # in order
            steps = self._eager(self.setup, uses_up=self._uses_up)
        return steps(batch, epoch, seed)

    def _uses_up(self) -> bool:
        """Return whether gradients are used up in backward, and not kept."""
        reads = any(callback.reads_gradients for callback in self._all_callbacks())
        return not (self._keep_gradients or self.accumulation > 1 or reads) and may_use_up(
            self.setup
        )

    def drain(self, late: int = 0) -> None:
        """Wait until at most `late` steps are incomplete, and add the losses of the others."""
        while len(self._results) > late:
            step = self._clocked("steps", self._results.popleft())
            self.losses.append(step.means()["loss"])
            if self.exchange.sums_losses:
                self.totals += step
            else:
                self._own.append(step)
                self._own_sum += step
            self.logs = (self.totals + self._own_sum).means()

    @property
    def own_steps(self) -> int:
        """The last steps of which `losses` and `logs` have those of this rank's samples only."""
        return len(self._own)

    def add_up_losses(self) -> None:
        """Complete all steps, and sum the losses of `own_steps` over all ranks.

        Collective, unless the scheme sums them in every step: all ranks call it after the same one.
        """
        self.drain()
        steps = self._own
        self._forget_own()
        if not steps:
            return
        values = np.concatenate([step.values for step in steps])
        self._clocked("steps", self.setup.data.allreduce, values)
        for step, summed in zip(steps, np.split(values, len(steps)), strict=True):
            step.values[:] = summed
            self.totals += step
        self.losses[-len(steps) :] = [step.means()["loss"] for step in steps]
        self.logs = self.totals.means()

    def _forget_own(self) -> None:
        self._own: list[Totals] = []
        self._own_sum = self.setup.new_totals()

    def train_step(self, batch: Batch, epoch: int = 0, seed: int = 0) -> Totals:
        """Run one step on this rank's part of a global batch.

        Collective: all ranks call it.

        Returns
        -------
        Totals
            Loss and metrics, summed over all ranks if the scheme sums them in every step
            (`GradientExchange.sums_losses`); otherwise those of this rank.

        Raises
        ------
        NotFiniteError
            On all ranks, if the loss is NaN or infinite; the parameters are not changed.
        LocalNotFiniteError
            The same on one rank, if the scheme does not sum losses.
        """
        with self.setup.observed(), self.setup.phase("step"):
            return self._begin(batch, epoch, seed)()

    def rebind(self) -> bool:
        """Bind the optimizer with its state to other trainable parameters; return whether needed.

        Collective: all ranks call it. Called by `fit`, which then starts the exchange anew, and by
        `load_checkpoint`.
        """
        if self.optimizer.is_bound_to(self.model.buffers):
            return False
        self.exchange.in_flight.wait()
        if self._uses_up():
            self.model.share_gradients()
        self.optimizer.rebind(self.model.buffers, self.exchange)
        self.binding = self.optimizer.binding
        vars(self).pop("steps", None)  # a captured graph contains the addresses of the arrays
        return True

    def _clocked(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        start = clock.now()
        try:
            return call(*args)
        finally:
            self.seconds[what] += clock.now() - start

    def _all_callbacks(self) -> list[Callback]:
        """Return the callbacks after a progress bar and before a check, unless they include one."""

        def missing(own: list[Callback]) -> list[Callback]:
            return [] if any(isinstance(c, type(o)) for c in self.callbacks for o in own) else own

        return [*missing(self._progress), *self.callbacks, *missing(self._check)]

    def save(self, path: str | Path) -> None:
        """Write the model to a folder, such as "digits.pydtnn", for `pydtnn.load`.

        Collective: all ranks call it; rank 0 writes, and an existing model is replaced. The
        parameters are those that are evaluated: the average of the ranks if they train with
        different ones, or that of a callback.

        Raises
        ------
        AgreedError
            On all ranks, if it cannot be written, or an option of a layer cannot be saved.
        """
        from pydtnn.saving import save_model

        with collective(self.comm, "Trainer.save"), evaluated(self):
            state = self.model.state()
            on_rank_0(self.comm, save_model, self.model, path, state)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Context in which all ranks have the same parameters and statistics.

        Collective: all ranks call it. If ranks train with different parameters, each restores its
        own afterwards.
        """
        with collective(self.comm, "Trainer.averaged", nested=True):
            self.drain()
            self.synchronise()
            with averaged(self.exchange):
                yield

    def synchronise(self) -> None:
        """Make running statistics equal on all ranks.

        Collective: all ranks call it. They are averaged, weighted by the samples each rank has
        seen.
        """
        with collective(self.comm, "Trainer.synchronise", nested=True):
            self.setup.synchronise()


CONTEXT = StepContext(training=False)


@np.errstate(all="ignore")  # overflow is reported by `not_finite`
def evaluate(setup: Setup, dataset: Dataset, batch_size: int) -> dict[str, float]:
    """Compute loss and metrics of a data set. Collective; see `Trainer.evaluate`."""
    model, data, sums = setup.model, setup.data, setup.exchange.sums
    at_least = sums.shards or data.size
    if not model.backend.autotuner.frozen:
        largest = -(-min(batch_size, len(dataset)) // at_least)
        autotune(model, setup.comm, largest, training=False)
    with setup.loader(
        dataset, max(batch_size, at_least), at_least, shuffle=False, lanes="evaluation loader"
    ) as loader:
        cuts = [even_cut(at_least, data.size, rank) for rank in (data.rank, data.rank + 1)]
        present = min(at_least, len(dataset))  # shards that have a sample; the others come last
        own = range(cuts[0], min(cuts[1], present))
        parts = _new_parts(setup, own)
        for batch in loader.epoch(0):
            _add_batch(setup, batch, parts)
        totals = setup.new_totals(model.backend.xp)
        sums.begin(present)
        own_sums = [(number, part.values) for number, part in parts.items()]
        totals.values, request = sums.add_up(own_sums or [(None, totals.values)])
        request.wait()
        result = setup.to_host(totals)
        if not np.isfinite(result.values).all():
            broken = _first_broken(setup, loader.epoch(0), own)
            raise not_finite(setup, broken, CONTEXT, result, "in the evaluation")
    return result.means()


def _new_parts(setup: Setup, shards: range) -> dict[int, Totals]:
    return {number: setup.new_totals(setup.model.backend.xp) for number in shards}


def _add_batch(setup: Setup, batch: Batch, parts: Mapping[int, Totals]) -> None:
    """Add the contributions of the shards of a batch."""
    model, context = setup.model, CONTEXT
    if model.pipeline is None:  # other stages receive whole outputs
        context = replace(context, cut_outputs=setup.objective.takes_parts(batch.y))
    for number, rows in batch.shards:
        assert number is not None
        setup.report_samples(rows.stop - rows.start)
        y, _ = model.forward(batch.inputs(model.backend, rows), context, keep=False)
        setup.objective.compute(y, batch.targets(rows), 1.0, parts[number], training=False)


def _first_broken(setup: Setup, batches: Iterator[Batch], shards: range) -> Batch:
    """Find this rank's first batch with a loss or metric that is not finite, or its last batch."""
    for batch in batches:
        parts = _new_parts(setup, shards)
        _add_batch(setup, batch, parts)
        if not all(np.isfinite(setup.to_host(t).values).all() for t in parts.values()):
            break
    return batch
