"""Loss scaling, which prevents underflow of the gradients of a float16 model.

Below 6e-8 a float16 is 0, and activations have gradients of that size. The loss is multiplied by
the scale, which scales all gradients; those of the parameters, which are float32, are divided by it
before they are used. If the scale is too large, some gradients are infinite: the step is then
skipped and the scale reduced; after many valid steps it is increased again. It therefore converges
to the largest scale without overflow. bfloat16 has the range of float32 and needs no scaling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydtnn.kernels import Backend
from pydtnn.kernels.reference.family import Array, Number

MIN_SCALE = 2.0**-24
"""The smallest float16: gradients that are infinite with this scale are infinite without it."""


class LossScale:
    """An adaptive factor on the loss, in the backend's memory: the host does not wait for it.

    A step calls `loss` before backward; `unscale` when the gradients of all ranks have been summed,
    before they are used; `adjust`; then the update, if `go` is 1. Kernels on a device check `go`;
    on the host, the optimizer checks `passed`.

    Parameters
    ----------
    backend : Backend
    initial : float

    Attributes
    ----------
    growth, backoff : float
        Class attributes: factors above and below 1.
    interval : int
        Class attribute: consecutive valid steps after which the scale is increased.
    scale, good : Array, shape (1,), float64
        The factor, and the number of consecutive steps with it.
    go : Array, shape (1,), float64
        1, or 0 if the step must be skipped: the backend's flag, if it has one.

    References
    ----------
    Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.2.
    """

    growth, backoff, interval = 2.0, 0.5, 2000

    def __init__(self, backend: Backend, *, initial: float = 2.0**16) -> None:
        self.backend = backend
        self.scale, self.good = (backend.zeros((1,), "float64") for _ in range(2))
        self.go = backend.zeros((1,), "float64") if backend.go is None else backend.go
        self.scale[...] = initial
        self.go[...] = 1

    def loss(self, scale: Number) -> Number:
        """Begin a step: return `scale` times the factor on the loss."""
        self.go[...] = 1
        return self.scale[0] * scale

    def unscale(
        self, gradients: Iterable[Array], total: Callable[[Number], Number] | None = None
    ) -> None:
        """Divide gradients by the scale, in place; clear `go` if one is not finite.

        Collective if `total` is.

        Parameters
        ----------
        gradients : iterable of Array
            Flat float32 arrays: all final gradients that this rank uses.
        total : callable, optional
            Sums a number over the ranks if each updates its own share (`Share.total`), so that they
            agree on `go`. Ranks with the same gradients always agree.
        """
        for g in gradients:
            self.backend.update.unscale(g, self.scale, self.go)
        if total is not None:
            self.go[...] = total(1 - self.go[0]) == 0

    def adjust(self) -> None:
        """Update the scale from the result of `unscale`."""
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
        """Whether to update, for the host; always true on a device, where kernels check `go`."""
        return self.backend.go is not None or bool(self.go[0])

    @property
    def lost(self) -> bool:
        """Whether gradients are infinite at the smallest scale; synchronises with the device."""
        return bool(self.backend.to_numpy(self.scale)[0] < MIN_SCALE)

    def state(self) -> dict[str, Any]:
        """Return the state to be saved."""
        return {
            name: float(self.backend.to_numpy(array)[0])
            for name, array in (("scale", self.scale), ("good", self.good))
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the state returned by `state`."""
        self.scale[...], self.good[...] = state["scale"], state["good"]
