"""Exponential moving average of the parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from pydtnn.comm.checks import fill, to_host
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.parameters import Bucket
from pydtnn.parallel.exchange import gather_parameters
from pydtnn.parallel.named import by_name, from_names
from pydtnn.parallel.sums import average
from pydtnn.training.callback import Callback, Training
from pydtnn.training.capabilities import why_not
from pydtnn.utils.errors import AgreedError
from pydtnn.utils.validate import check_float, check_int

AVERAGE, TRAINED = "average", "trained"


class ExponentialMovingAverage(Callback):
    """Average the parameters over the updates; evaluate and keep the average.

    After update t, counted from 0::

        d_t = min(decay, (1 + t) / (10 + t))
        average = d_t average + (1 - d_t) parameters

    so that the average follows the parameters closely at the beginning and forgets the initial
    ones. Running statistics of batch norm are averaged in the same way. Training continues with the
    parameters themselves; a 16-bit model averages its float32 master weights.

    Validation and `BestWeights` use the average, and when training ends it takes the place of the
    model's parameters. A further `fit` continues from the trained parameters, unless the model's
    parameters, or which are frozen, have been changed in between: then it starts a new average.
    Their order among the callbacks does not matter. A
    checkpoint contains both the parameters and the average, and gives the same bytes when training
    is resumed; its `Checkpointer` follows this callback, as it follows all callbacks with state.

    Parameters
    ----------
    decay : float
        Weight of the previous average; 0.999 averages about the last 1000 updates.

    Attributes
    ----------
    updates : int
        Number of updates that have been averaged.

    Raises
    ------
    AgreedError
        When training starts, on all ranks, if the scheme has different parameters on each rank,
        such as local SGD: they have no common average between two updates.

    References
    ----------
    Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", SIAM Journal on
    Control and Optimization 30, 1992. Tarvainen and Valpola, "Mean teachers are better role
    models", NeurIPS 2017, section 2 and appendix.
    """

    reads_gradients = False

    def __init__(self, decay: float = 0.999) -> None:
        self.decay = check_float(type(self).__name__, "decay", decay, at_least=0, below=1)
        self.updates = 0
        self._trainer: Training | None = None
        self._buckets: tuple[Bucket, ...] = ()
        self._live: list[Array] = []  # the values of each bucket, then the running statistics
        self._average: list[Array] = []
        self._scratch: list[Array] = []
        self._trained: list[Array] | None = None  # where the model has the average: its own values
        self._samples = 0  # of this rank since its statistics were made equal to those of others
        self._saved: Mapping[str, Any] | None = None  # by `load`, until a trainer is known
        self._active = False

    def on_fit_start(self, trainer: Training, epochs: int, steps: int) -> None:
        """Start from the model's parameters, or continue with the average of an earlier `fit`."""
        for feature in ("equal ranks", "average of parameters"):
            if why := why_not(feature, trainer.setup):
                raise AgreedError(f"{type(self).__name__} {why}")
        self._bind(trainer)
        if not self.updates:
            self._start()
        elif self._trained is not None:
            buckets = range(len(self._buckets))
            if all(bool((self._live[i] == self._average[i]).all()) for i in buckets):
                self._put_back()
            else:  # the parameters were changed after the last `fit`
                self._start()
        self._active = True

    def on_step_end(self, trainer: Training) -> None:
        """Add the parameters to the average."""
        new = 1 - min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        self._samples += trainer.exchange.local_samples
        xp = trainer.model.backend.xp
        gather_parameters(trainer.exchange)
        for live, mean, scratch in zip(self._live, self._average, self._scratch, strict=True):
            xp.subtract(live, mean, out=scratch)  # bucket by bucket, to stay in the cache
            scratch *= new
            mean += scratch

    def on_fit_end(self, trainer: Training) -> None:
        """Replace the model's parameters by the average. Collective: all ranks call it."""
        if self.updates:
            self._share_statistics()
            self._put_in()

    @contextlib.contextmanager
    def evaluated(self, trainer: Training) -> Iterator[None]:
        """Context in which the model has the average. Collective: all ranks call it."""
        if self._active:
            self._bind(trainer)
        if not self._active or not self.updates or self._trained is not None:
            yield
            return
        self._share_statistics()
        self._put_in()
        try:
            yield
        finally:
            self._put_back()

    def close(self) -> None:
        """Evaluate the model's own parameters from now on."""
        self._active = False

    def state(self) -> dict[str, Any]:
        """Return the average and the number of updates. Collective: all ranks call it."""
        if self._trainer is None:
            return dict(self._saved or {"updates": 0})
        self._share_statistics()
        state = {"updates": self.updates} | self._named(AVERAGE, self._average)
        if self._trained is not None:
            state |= self._named(TRAINED, self._trained)
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the state returned by `state`; its arrays are checked when training continues."""
        check_int(type(self).__name__, "updates", state["updates"], at_least=0)
        self._saved, self._trainer, self._active = state, None, True

    def _bind(self, trainer: Training) -> None:
        """Allocate the average of a trainer's model, and fill it with loaded state, if any."""
        if self._trainer is trainer and self._buckets is trainer.model.buckets:
            return
        model, empty = trainer.model, trainer.model.backend.empty
        self._trainer, self._buckets = trainer, model.buckets
        self._live = [bucket.values for bucket in model.buckets]
        widest: dict[Any, int] = {}
        for array in (*self._live, model.statistics.running):
            widest[array.dtype] = max(widest.get(array.dtype, 0), len(array))
        shared = {dtype: empty((length,), dtype) for dtype, length in widest.items()}
        if len(model.statistics.running):
            self._live.append(model.statistics.running)
        self._scratch = [shared[array.dtype][: len(array)] for array in self._live]
        self._start()
        if self._saved is not None and self._saved["updates"]:
            self._fill(self._saved)
        self._saved = None

    def _start(self) -> None:
        self._average = [array.copy() for array in self._live]
        self._trained, self.updates, self._samples = None, 0, 0

    def _fill(self, saved: Mapping[str, Any]) -> None:
        try:
            self._from_names(AVERAGE, self._average, saved)
            if any(name.startswith(f"{TRAINED}/") for name in saved):
                self._trained = [array.copy() for array in self._live]
                self._from_names(TRAINED, self._trained, saved)
        except (KeyError, ValueError) as error:
            raise AgreedError(
                f"{type(self).__name__}: the saved average must be that of the same model, got "
                f"another one ({error}); continue with the model with which it was saved"
            ) from error
        self.updates = saved["updates"]

    def _put_in(self) -> None:
        """Replace the model's parameters and statistics by their averages, and keep them."""
        self._trained = [array.copy() for array in self._live]
        for live, mean in zip(self._live, self._average, strict=True):
            live[...] = mean

    def _put_back(self) -> None:
        for live, own in zip(self._live, self._trained or (), strict=True):
            live[...] = own
        self._trained = None

    def _share_statistics(self) -> None:
        """Average the averaged running statistics over the ranks, weighted by samples."""
        trainer = self._trainer
        assert trainer is not None
        for running in () if trainer.setup.equal_statistics else self._running(self._average):
            average(trainer.setup.data, [running], self._samples)
            views = trainer.model.statistics.named(running)
            for name, constant in trainer.model.statistics.frozen().items():
                views[name][...] = constant  # without the rounding of an average of equal values
        self._samples = 0

    def _running(self, arrays: list[Array]) -> list[Array]:
        """Return the array of running statistics, if the model has any, of arrays like `_live`."""
        return arrays[len(self._buckets) :]

    def _named(self, what: str, arrays: list[Array]) -> dict[str, np.ndarray]:
        """Copy arrays like `_live` to NumPy arrays by name."""
        assert self._trainer is not None
        named = by_name(what, self._buckets, arrays[: len(self._buckets)])
        for running in self._running(arrays):
            views = self._trainer.model.statistics.named(running).items()
            named |= {f"{what}/{name}": to_host(view) for name, view in views}
        return named

    def _from_names(self, what: str, arrays: list[Array], state: Mapping[str, Any]) -> None:
        """Fill arrays like `_live` from the result of `_named`."""
        assert self._trainer is not None
        from_names(what, self._buckets, arrays[: len(self._buckets)], state)
        for running in self._running(arrays):
            for name, view in self._trainer.model.statistics.named(running).items():
                fill(view, state[f"{what}/{name}"])


EMA = ExponentialMovingAverage
