"""The base class of callbacks, and their interface to training."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

from pydtnn.comm import Communicator
from pydtnn.comm.agree import on_rank_0
from pydtnn.model import Model
from pydtnn.optimizers import Optimizer
from pydtnn.optimizers.loss_scale import LossScale
from pydtnn.parallel.exchange import GradientExchange
from pydtnn.training.logs import History, Logs
from pydtnn.training.metric_sums import Totals
from pydtnn.training.objective import Objective
from pydtnn.training.setup import Setup
from pydtnn.utils.arguments import StoresArguments
from pydtnn.utils.errors import describe
from pydtnn.utils.names import SuggestsNames, unknown

_log = logging.getLogger("pydtnn.training")


class Training(Protocol):
    """The interface of a `Trainer` for callbacks and checkpoints, documented there."""

    model: Model
    optimizer: Optimizer
    exchange: GradientExchange
    comm: Communicator
    objective: Objective
    loss_scale: LossScale | None
    setup: Setup
    epoch: int
    step: int
    logs: Logs
    history: History
    losses: list[float]
    totals: Totals
    seconds: dict[str, float]
    stop: bool
    recovered: bool
    samples_seen: int
    global_batch_size: int

    @property
    def callbacks(self) -> Sequence[Callback]:
        """Initialise the trainer's attributes."""

    @property
    def own_steps(self) -> int:
        """The last steps of which `losses` and `logs` have those of this rank's samples only."""

    def averaged(self) -> AbstractContextManager[None]:
        """Context in which all ranks have the same parameters and statistics."""

    def compare_ranks(self) -> None:
        """Raise AgreedError on all ranks if they differ and must be equal."""

    def rebind(self) -> bool:
        """Bind the optimizer to the parameters that are trainable now."""

    def state(self) -> dict[str, Any]:
        """Return the state of training."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the state returned by `state`."""


Function = Callable[[Any], object]
"""A function of the trainer."""


class Callback(SuggestsNames, StoresArguments):
    """Base class of callbacks; its methods do nothing.

    A subclass overrides some methods. All ranks make the same calls, so decisions of a callback (to
    stop, to reduce the learning rate) must depend only on values that are equal on all ranks, such
    as ``trainer.history`` and, if ``trainer.own_steps`` is 0, ``trainer.logs``. Actions of a single
    rank, such as writing a file, are guarded by ``if trainer.comm.rank == 0``. An object that
    several trainers are given has a `state` of its own with each, and begins anew with another one.

    Attributes
    ----------
    reads_gradients : bool
        Whether it reads gradients after a step, so that they are kept (`Trainer`); a subclass that
        does not can set it to False.
    """

    reads_gradients: bool = True

    def on_fit_start(self, trainer: Training, epochs: int, steps: int) -> None:
        """Called when training starts or continues.

        Parameters
        ----------
        trainer : Trainer
        epochs : int
            Number of epochs at the end of training.
        steps : int
            Steps per epoch.
        """

    def on_fit_ready(self, trainer: Training, epochs: int, steps: int) -> None:
        """Called after `on_fit_start` of all callbacks, with the same arguments.

        None of them has refused the training: files are created and connections opened here, so
        that a training that is refused changes nothing.
        """

    def on_epoch_start(self, trainer: Training) -> None:
        """Called when an epoch starts, or continues after resuming."""

    def on_step_end(self, trainer: Training) -> None:
        """Called after a step; ``trainer.logs`` contains this epoch's means so far.

        With schemes whose ranks train independently, ranks are at different steps: a callback that
        communicates here makes all of them wait for the slowest.
        """

    def on_epoch_end(self, trainer: Training) -> None:
        """Called after an epoch and its evaluation; ``trainer.logs`` contains its results."""

    def on_fit_end(self, trainer: Training) -> None:
        """Called when training ends."""

    def finish(self, trainer: Training) -> None:
        """Called after `on_fit_end` of all callbacks, which may save the state of training.

        Collective: all ranks call it. A callback that leaves other parameters in the model than
        those with which training would continue replaces them here.
        """

    def on_interrupt(self, trainer: Training) -> None:
        """Called instead of `on_fit_end` when a signal ends training after a step."""

    def evaluated(self, trainer: Training) -> AbstractContextManager[None]:
        """Return a context in which the model has the parameters to evaluate; by default its own.

        Collective: all ranks call it, after their parameters and statistics have been made equal.
        At the end of the context the model must have the same parameters as before.
        """
        return contextlib.nullcontext()

    def close(self) -> None:
        """Release resources such as the terminal; called last, also when training fails."""

    def state(self) -> dict[str, Any]:
        """Return the state to be saved: arrays by name and JSON values."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the state returned by `state`."""


def take_over(trainer: Training) -> None:
    """Give callbacks the state that they have with this trainer, initially that of new objects.

    Collective: all ranks call it, before training or loading. Ranks that continue after others have
    failed keep the state.

    Raises
    ------
    ValueError
        If a callback of another trainer cannot begin anew, as it had no state at first.
    """
    for callback in trainer.callbacks:
        own = vars(callback)
        if type(callback).state is Callback.state:
            continue
        if "_trainers" not in own:
            own["_trainers"], own["_initial"] = WeakKeyDictionary(), None
            with contextlib.suppress(Exception):  # a state that exists only in training
                own["_initial"] = copy.deepcopy(callback.state())
        elif (last := own["_last"]()) is not trainer and not trainer.recovered:
            state = own["_trainers"].get(trainer, own["_initial"])
            if state is None:
                raise ValueError(
                    f"{type(callback).__name__}: expected a new object, got that of another "
                    "training with its state; create one for each trainer"
                )
            if last is not None:
                own["_trainers"][last] = copy.deepcopy(callback.state())
            callback.load(copy.deepcopy(state))
        own["_last"] = ref(trainer)


def write_if_possible(comm: Communicator, write: Callable[..., object], *args: object) -> bool:
    """Call ``write(*args)`` on rank 0; a file that cannot be written is a warning, not an error.

    Collective: all ranks call it. Training continues on a disk that is full or read-only, or
    without memory for the content; the next write may succeed. Other errors are raised as by
    `on_rank_0`.

    Returns
    -------
    bool
        On rank 0, whether the files are written; True on the others.
    """

    def attempt() -> bool:
        try:
            write(*args)
        except (OSError, MemoryError) as error:
            _log.warning("%s; training continues without it", describe(error))
            return False
        return True

    return on_rank_0(comm, attempt) is not False


EVENTS = ("on_fit_start", "on_epoch_start", "on_step_end", "on_epoch_end", "on_fit_end")
"""Arguments of `FunctionCallback`."""


class FunctionCallback(Callback):
    """Functions that are called with the trainer when something happens.

    ``Trainer(callbacks=[function])`` is ``FunctionCallback(on_epoch_end=function)``. All ranks call
    them, see `Callback`.

    Parameters
    ----------
    **functions : callable, optional
        ``on_fit_start``, ``on_epoch_start``, ``on_step_end``, ``on_epoch_end``, ``on_fit_end``:
        each is ``function(trainer)``, whose result is ignored.

    Raises
    ------
    TypeError
        If one is not a function of one argument.

    Examples
    --------
    >>> FunctionCallback(on_epoch_end=lambda trainer: print(trainer.logs["loss"]))
    FunctionCallback(on_epoch_end=<lambda>)
    """

    def __init__(self, **functions: Function | None) -> None:
        for name, function in functions.items():
            if name not in EVENTS:
                raise TypeError(f"FunctionCallback: {unknown('event', name, EVENTS)}")
            if function is not None:
                _check_function(name, function)
                setattr(self, name, partial(_call_with_trainer, function))


def _call_with_trainer(function: Function, trainer: Training, *_: int) -> None:
    function(trainer)


def as_callback(given: Any) -> Any:
    """Return a callback for a function, which is called after every epoch; others unchanged."""
    if isinstance(given, Callback | type) or not callable(given):
        return given
    return FunctionCallback(on_epoch_end=given)


def _check_function(event: str, function: Any) -> None:
    if isinstance(function, type) or not callable(function):
        raise TypeError(
            f"FunctionCallback: {event} must be a function of the trainer, got {function!r}"
        )
    try:
        takes = inspect.signature(function)
    except ValueError:  # some functions of extension modules have none
        return
    try:
        takes.bind("trainer")
    except TypeError:
        raise TypeError(
            f"FunctionCallback: {event} must take one argument, the trainer, got a function of "
            f"{takes}; use trainer.epoch and trainer.logs"
        ) from None


def training_seconds(trainer: Training) -> float:
    """Return the time of a run in s: that in steps and waiting for data, without what is beside it.

    Evaluations, averages for them and checkpoints are beside training.
    """
    return trainer.seconds["steps"] + trainer.seconds["data"]


class Throughput:
    """Samples and tokens of a run in a second of training."""

    def __init__(self) -> None:
        self._samples, self._seconds, self._tokens = 0, 0.0, 0.0

    def begin(self, trainer: Training) -> None:
        """Begin an epoch."""
        self._samples, self._seconds = trainer.samples_seen, training_seconds(trainer)

    def step(self, trainer: Training) -> None:
        """Count the tokens of a sample, at the end of a step."""
        self._tokens = trainer.objective.tokens(trainer.totals)

    def rates(self, trainer: Training) -> dict[str, float]:
        """Return tokens, those of `ignore_index` not counted, if any, and samples per second."""
        seconds = training_seconds(trainer) - self._seconds
        rate = (trainer.samples_seen - self._samples) / seconds if seconds else 0.0
        return ({"tokens": rate * self._tokens} if self._tokens else {}) | {"samples": rate}


@contextlib.contextmanager
def evaluated(trainer: Training) -> Iterator[None]:
    """Context in which the model has the parameters that are evaluated and kept as results.

    Collective: all ranks call it. These are the parameters of `Trainer.averaged`, or those that the
    optimizer or a callback puts in their place (`Optimizer.offset`, `Callback.evaluated`).
    Checkpoints contain the parameters with which training continues, and are saved outside of this
    context.
    """
    with trainer.averaged(), trainer.optimizer.evaluated(), contextlib.ExitStack() as stack:
        for callback in trainer.callbacks:
            stack.enter_context(callback.evaluated(trainer))
        yield
