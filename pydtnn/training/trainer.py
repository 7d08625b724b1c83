"""The training loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from pydtnn.data import Augmentation, Dataset, Loader, Mixing
from pydtnn.data.inputs import inputs_of
from pydtnn.data.loader import samples_of_step
from pydtnn.model import Model
from pydtnn.optimizers import Optimizer, get_optimizer
from pydtnn.parallel.exchange import GradientExchange
from pydtnn.parallel.mesh import Mesh
from pydtnn.parallel.pipeline import Schedule, find
from pydtnn.saving.samples import inputs_from_json, inputs_to_json
from pydtnn.training import checks
from pydtnn.training.averaging import Averaging
from pydtnn.training.callback import Callback, evaluated
from pydtnn.training.equality import compare_ranks, create_check
from pydtnn.training.evaluation import evaluate
from pydtnn.training.fingerprint import check_loaded
from pydtnn.training.fit_arguments import last_epoch, refuse
from pydtnn.training.logs import History, Logs
from pydtnn.training.nonfinite import NotFiniteError
from pydtnn.training.objective import Losses, Metrics, Objective
from pydtnn.training.pipeline_checks import micro_batches_of
from pydtnn.training.preparation import prepare, read_position, start_equal
from pydtnn.training.progress import create_progress
from pydtnn.training.setup import bind_optimizer, create_setup, represent_setup
from pydtnn.training.stepping import Stepping
from pydtnn.training.steps import Result
from pydtnn.training.tuning import autotune
from pydtnn.utils.clock import virtual_time
from pydtnn.utils.foreign_names import SuggestsNames
from pydtnn.utils.observer import Observer, combine
from pydtnn.utils.validate import truth, whole


class Trainer(SuggestsNames, Averaging, Stepping):
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
    callbacks : sequence of Callback
    accumulation : int
        Micro-batches into which each rank divides its part of a step, to save memory.
    micro_batches : int, optional
        The same for the stages of a pipeline, which compute different ones at a time; by default
        four per stage.
    pipeline_schedule : Schedule or str
        Order of the micro-batches in each stage: "1f1b", "eager_1f1b", "gpipe", or a
        function of `pydtnn.parallel.pipeline`.
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
    observers : sequence of Observer
        Receive phases, layers, messages and batches during `fit`, `evaluate` and `train_step`:
        docs/tracing.md.

    Attributes
    ----------
    epoch, step : int
        Epochs completed, and steps of the current epoch completed.
    logs : dict
        The current epoch's losses and metrics so far, over all ranks; of the last `own_steps`, over
        the samples of this rank only. If steps are captured, without the last step, which is not
        complete, and empty after the first.
    history : list of dict
        One entry per epoch completed.
    losses : list of float
        The loss of each step that this process has trained, over the samples of all ranks and equal
        on all of them; in the last `own_steps`, over the samples of this rank. If steps are
        captured, the last one is added after the next step has begun. Not saved in checkpoints.
    own_steps : int
        Steps whose losses have not been summed over the ranks. 0 if the scheme sums them in every
        step (`GradientExchange.sums_losses`); schemes whose ranks train independently, such as
        local SGD and gossip, sum them when all ranks have averaged, before checkpoints, and in the
        last step of an epoch. `history` is therefore that of all ranks.
    stop : bool
        Set by a callback, on all ranks, to stop training after this epoch.
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
        callbacks: Sequence[Callback] = (),
        accumulation: int = 1,
        micro_batches: int | None = None,
        pipeline_schedule: str | Schedule = "1f1b",
        sync_batch_norm: bool = False,
        graph: bool = True,
        check_equal: int | None = None,
        progress: str | bool = "auto",
        observers: Sequence[Observer] = (),
    ) -> None:
        optimizer = get_optimizer(optimizer) if isinstance(optimizer, str) else optimizer
        checks.check_parts(model, optimizer, exchange, callbacks, metrics or ())
        self.model = model
        self.optimizer = optimizer
        self.objective = Objective(
            model.backend, len(model.output_shapes), loss, loss_weights, metrics, auxiliary_weights
        )
        self.setup = create_setup(
            model,
            optimizer,
            self.objective,
            exchange,
            mesh,
            sync_batch_norm=sync_batch_norm,
            schedule=find(pipeline_schedule),
            observer=combine(observers),
        )
        self.exchange, self.loss_scale = self.setup.exchange, self.setup.loss_scale
        self.comm = self.setup.comm
        self.callbacks = list(callbacks)
        self._progress = create_progress(progress)
        self._check = create_check(check_equal, self.setup)
        self.accumulation = micro_batches_of(self.setup, accumulation, micro_batches)
        self.sync_batch_norm = sync_batch_norm
        checks.check_options(self.setup, self.accumulation)
        checks.warn_of_probabilities(self.setup)
        self._graph = graph
        self._results: deque[Result] = deque()
        self._forget_own()
        self.epoch = self.step = 0
        self.logs = Logs()
        self.history = History()
        self.losses: list[float] = []
        self._plan: dict[str, int] = {}
        self.stop = self._loaded = self._warned = False
        self.global_batch_size = 0
        self.totals = self.setup.new_totals()
        self.seconds = {"steps": 0.0, "communication": 0.0, "data": 0.0, "evaluation": 0.0}
        self.samples_seen = 0
        bind_optimizer(self.setup)
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
        mix: Sequence[Mixing] = (),
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
            `history`: per epoch the loss and metrics, those of the validation prefixed with "val_".
        """
        checks.check_binding(self.optimizer, self.binding)
        refuse(others)
        epochs = last_epoch(self.epoch, epochs, more_epochs)
        ranks = self.exchange.comm.size
        with self.setup.observed(), self.setup.interruptible():
            return self._fit(
                train,
                validation,
                batch_size=samples_of_step(train, ranks, batch_size, global_batch_size),
                epochs=epochs,
                loader_threads=loader_threads,
                seed=seed,
                augment=augment,
                mix=mix,
                steps_per_epoch=steps_per_epoch,
                drop_last=truth("Trainer", "drop_last", drop_last),
            )

    def _fit(
        self,
        train: Dataset,
        validation: Dataset | None,
        *,
        epochs: int,
        seed: int,
        **options: Any,
    ) -> History:
        with self.setup.phase("start"):
            loader = self._start(train, validation, epochs=epochs, seed=seed, **options)
        try:
            self._notify("on_fit_start", epochs, len(loader))
            with loader:
                while self.epoch < epochs and not self.stop:
                    with self.setup.phase("epoch"):
                        self._run_epoch(loader, seed, validation)
            self.synchronise()
            if not self.exchange.equal:
                self.exchange.average_parameters()
            self._notify("on_fit_end")
        except NotFiniteError:
            self.compare_ranks()  # a difference may be the cause
            raise
        finally:
            for callback in self._all_callbacks():
                callback.close()
        return self.history

    def _start(self, train: Dataset, validation: Dataset | None, **options: Any) -> Loader:
        """Check everything before the first step, and make all ranks equal."""
        was = self._plan if self._loaded else {}
        loader, plan = prepare(
            self.setup, train, validation, was, accumulation=self.accumulation, **options
        )
        rebound = self.rebind()
        self.model.inputs = self.comm.gather_object(inputs_of(train))[0]
        self._warned = checks.warn_of_statistics(self.setup, validation)
        if self.epoch < options["epochs"]:
            checks.warn_of_small_batches(self.setup, loader)
        if rebound or not self._loaded:
            start_equal(self.setup)
        self.model.loaded, self.model.given = None, {}
        self._plan, self._loaded, self.stop = plan, False, False
        self.global_batch_size = loader.global_batch_size
        self._results.clear()
        self._forget_own()
        largest = -(-min(loader.global_batch_size, len(train)) // loader.shards)
        autotune(self.model, self.comm, largest, training=True)
        return loader

    def _run_epoch(self, loader: Loader, seed: int, validation: Dataset | None) -> None:
        self.logs = Logs()
        self._notify("on_epoch_start")
        self._run_steps(loader, seed)
        checks.check_scale(self.setup)
        self.logs = self.totals.means() | {"lr": self.optimizer.lr_now} | virtual_time()
        with self.averaged():
            if validation is not None:
                results = self.evaluate(validation, global_batch_size=self.global_batch_size)
                self.logs |= {f"val_{name}": value for name, value in results.items()}
            self.history.append(self.logs)
            self.epoch, self.step, self.totals = self.epoch + 1, 0, self.setup.new_totals()
            self._notify("on_epoch_end")

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
            Means over all samples, equal on all ranks.

        Raises
        ------
        NotFiniteError
            On all ranks, if the loss or a metric is NaN or infinite.
        """
        total = 256 if global_batch_size is None else global_batch_size
        if batch_size is not None and global_batch_size is None:
            ranks = self.exchange.comm.size
            total = whole("Trainer", "batch_size", batch_size, at_least=1) * ranks
        whole("Trainer", "global_batch_size", total, at_least=1)
        check_loaded(self.comm, self.model.loaded, before_broadcast=False)
        self._warned = self._warned or checks.warn_of_statistics(self.setup, dataset)
        with self.setup.observed(), self.setup.phase("evaluation"), evaluated(self):
            return self._clocked("evaluation", evaluate, self.setup, dataset, total)

    def compare_ranks(self) -> None:
        """Compare the ranks now, if they are compared (`CheckEqual`) and `fit` runs.

        Collective: all ranks call it. Checkpoints are saved after a comparison.

        Raises
        ------
        AgreedError
            On all ranks, if they differ.
        """
        compare_ranks(self, self._all_callbacks())

    def state(self) -> dict[str, Any]:
        """Return the epoch, step, history and the current epoch's sums.

        Collective: all ranks call it after the same step.
        """
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
            self.model.inputs = inputs_from_json(state["trained_on"])[1]
        self._plan, self._loaded = dict(state["plan"]), True
        self.epoch, self.step, self.history, self.totals = position
        self._forget_own()
