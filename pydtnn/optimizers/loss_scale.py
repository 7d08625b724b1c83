"""Loss scaling: what keeps the gradients of a float16 model from vanishing.

Below 6e-8 a float16 is 0, and activations have gradients of that size. Multiplied by the scale,
the loss has gradients that many times larger; those of the parameters, which are float32, are
divided by it before anybody uses them. A scale that is too large makes some of them infinite: then
the step is not made, and the scale shrinks; after many good steps it grows again. So it finds the
largest that the model bears. bfloat16 has the range of float32 and needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydtnn.kernels import Backend
from pydtnn.kernels.reference.family import Array, Number
from pydtnn.utils.validate import number, whole

SMALLEST = 2.0**-24
"""The smallest float16: gradients that are infinite with this scale are not so because of it."""


class LossScale:
    """A factor on the loss that adapts, in the backend's memory: the host does not wait for it.

    A step goes: `loss` before backward; `unscale` when the gradients of all ranks have been added
    up, before anything else looks at them; `adjust`; then an update where `go` is 1. Kernels on a
    device look at `go` themselves; on the host, who updates asks `passed`.

    Parameters
    ----------
    backend : Backend
    initial : float
    growth, backoff : float
        Factors above and below 1.
    interval : int
        Good steps in a row after which the scale grows.

    Attributes
    ----------
    scale, good : Array, shape (1,), float64
        The factor, and how many steps in a row were made with it.
    go : Array, shape (1,), float64
        1, or 0 while a step must not be made: the backend's own flag, where it has one.

    References
    ----------
    Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.2.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        initial: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
    ) -> None:
        who = type(self).__name__
        self.backend = backend
        self.initial = number(who, "initial", initial, above=0)
        self.growth = number(who, "growth", growth, above=1)
        self.backoff = number(who, "backoff", backoff, above=0, below=1)
        self.interval = whole(who, "interval", interval, at_least=1)
        self.scale, self.good = (backend.zeros((1,), "float64") for _ in range(2))
        self.go = backend.zeros((1,), "float64") if backend.go is None else backend.go
        self.scale[...] = self.initial
        self.go[...] = 1

    def loss(self, scale: Number) -> Number:
        """Begin a step: return the factor on the gradient of the loss, which without is `scale`."""
        self.go[...] = 1
        return self.scale[0] * scale

    def unscale(
        self, gradients: Iterable[Array], total: Callable[[Number], Number] | None = None
    ) -> None:
        """Divide gradients by the scale, in place; clear `go` where one is not finite.

        Collective, where `total` is.

        Parameters
        ----------
        gradients : iterable of Array
            Flat and float32: final, and all that this rank updates.
        total : callable, optional
            Adds a number up over the ranks, where each updates its own share (`Share.total`): then
            they agree on `go`. Ranks that hold the same gradients agree anyway.
        """
        for g in gradients:
            self.backend.update.unscale(g, self.scale, self.go)
        if total is not None:
            self.go[...] = total(1 - self.go[0]) == 0

    def adjust(self) -> None:
        """Adapt the scale to what `unscale` found."""
        self.backend.update.rescale(
            self.scale,
            self.good,
            self.go,
            growth=self.growth,
            backoff=self.backoff,
            interval=self.interval,
        )

    @property
    def passed(self) -> bool:
        """Whether the step shall be made, for hosts; on a device, whose kernels know, always."""
        return self.backend.go is not None or bool(self.go[0])

    @property
    def lost(self) -> bool:
        """Whether gradients are infinite however small the scale; the host waits for the answer."""
        return bool(self.backend.to_numpy(self.scale)[0] < SMALLEST)

    def state(self) -> dict[str, Any]:
        """Return what must be saved to continue."""
        return {
            name: float(self.backend.to_numpy(array)[0])
            for name, array in (("scale", self.scale), ("good", self.good))
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take what `state` returned."""
        self.scale[...], self.good[...] = state["scale"], state["good"]
