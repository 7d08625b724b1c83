"""Activations."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydtnn.kernels.reference.elementwise import FUNCTIONS
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import RESULTS, Layer, Saved, StepContext, toggled
from pydtnn.layers.cost import Cost, per_element
from pydtnn.layers.recomputed import Recomputed, Recomputing
from pydtnn.utils.names import unknown
from pydtnn.utils.validate import check_float

GELU_KERNELS = {"tanh": "gelu", "none": "gelu_exact"}
"""Kernel of each form of GELU."""


class Activation(Recomputing, Layer):
    """Elementwise function that the backend implements under a name.

    Attributes
    ----------
    kernel : str
        Its name in `pydtnn.kernels.reference.elementwise.FUNCTIONS`.
    alpha : float
        Its parameter, if it has one.
    operations : (int, int)
        Operations per element, forward and backward.
    """

    kernel: str
    operations: ClassVar[tuple[int, int]] = (1, 1)
    alpha: float = 0.0
    may_overwrite: tuple[str, ...] = ("dy",)
    new_results = RESULTS
    supports: tuple[str, ...] = ("16 bits", "recomputing", "replay")

    def __init_subclass__(cls) -> None:
        """Set `saves` and `may_overwrite` from the array that backward reads."""
        super().__init_subclass__()
        reads = FUNCTIONS[cls.kernel].reads
        cls.saves = (reads,)
        cls.may_overwrite = toggled(cls.may_overwrite, "input", reads == "output")

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array | Recomputed, Saved]:
        """Apply the function."""
        (x,) = xs
        y = self._apply(x, self.output_like(x))
        if self.recomputed and context.differentiable:
            return Recomputed(y, lambda: self._apply(x, self.backend.empty(x.shape, x.dtype))), x
        return y, y if "output" in self.saves else x

    def _apply(self, x: Array, out: Array) -> Array:
        self.backend.elementwise.forward(self.kernel, x, out=out, alpha=self.alpha)
        return out

    def backward(self, dy: Array, saved: Saved) -> Array:
        """Multiply by the derivative."""
        dx = self.gradient_like(dy)
        self.backend.elementwise.backward(self.kernel, dy, saved, out=dx, alpha=self.alpha)
        return dx

    def cost(self, batch: int) -> Cost:
        """The operations of the function and of its derivative."""
        cost = per_element(self.elements(batch), self.dtype.itemsize, *self.operations)
        return self.with_readers(cost)


class ReLU(Activation):
    """``max(x, 0)`` (Nair and Hinton 2010)."""

    kernel = "relu"


class ReLU6(Activation):
    """``min(max(x, 0), 6)`` (Krizhevsky 2010)."""

    kernel = "relu6"
    operations = (2, 2)


class LeakyReLU(Activation):
    """``x`` if positive, else ``alpha x`` (Maas et al. 2013).

    Parameters
    ----------
    alpha : float
        Slope for negative inputs; positive.
    """

    kernel = "leaky_relu"
    operations = (2, 2)

    def __init__(self, alpha: float = 0.01, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.alpha = check_float(type(self).__name__, "alpha", alpha, above=0)


class ELU(Activation):
    """``x`` if positive, else ``alpha (exp(x) - 1)`` (Clevert et al. 2016).

    Parameters
    ----------
    alpha : float
        Minus the limit for very negative inputs; positive.
    """

    kernel = "elu"
    operations = (4, 3)

    def __init__(self, alpha: float = 1.0, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.alpha = check_float(type(self).__name__, "alpha", alpha, above=0)


class Sigmoid(Activation):
    """``1 / (1 + exp(-x))``."""

    kernel = "sigmoid"
    operations = (4, 3)


class Tanh(Activation):
    """Hyperbolic tangent."""

    kernel = "tanh"
    operations = (1, 3)


class ArcTan(Activation):
    """Inverse tangent, ``arctan(x)``."""

    kernel = "arctan"
    operations = (1, 3)


class Log(Activation):
    """Natural logarithm."""

    kernel = "log"


class GELU(Activation):
    """``x Phi(x)``, with the distribution function of the normal distribution.

    Parameters
    ----------
    approximate : {"tanh", "none"}
        The tanh form, of GPT-2, or the exact function, of BERT and vision transformers. Operations
        are counted as those of the tanh form.

    References
    ----------
    Hendrycks and Gimpel, "Gaussian error linear units", 2016, section 2.
    """

    kernel = "gelu"
    operations = (8, 16)

    def __init__(
        self, approximate: Literal["tanh", "none"] = "tanh", *, name: str | None = None
    ) -> None:
        super().__init__(name=name)
        if approximate not in GELU_KERNELS:
            raise self.fail(unknown("approximate", str(approximate), GELU_KERNELS))
        self.approximate = approximate
        self.kernel = GELU_KERNELS[approximate]


class SiLU(Activation):
    """``x sigmoid(x)`` (Elfwing et al. 2018)."""

    kernel = "silu"
    operations = (5, 9)


class HardSigmoid(Activation):
    """``min(max(x / 6 + 1 / 2, 0), 1)``, as in PyTorch (Howard et al. 2019)."""

    kernel = "hard_sigmoid"
    operations = (4, 3)


class HardSwish(Activation):
    """``x min(max(x / 6 + 1 / 2, 0), 1)`` (Howard et al. 2019)."""

    kernel = "hard_swish"
    operations = (5, 5)


class Softplus(Activation):
    """``log(1 + exp(x))`` (Dugas et al. 2001)."""

    kernel = "softplus"
    operations = (4, 4)


class Softmax(Layer):
    """``exp(x) / sum exp(x)`` over the last axis.

    The losses of `pydtnn.losses` take logits, so a classifier does not end with this layer.
    """

    saves: tuple[str, ...] = ("output",)
    may_overwrite: tuple[str, ...] = ("input", "dy")
    new_results = RESULTS
    supports: tuple[str, ...] = ("16 bits",)

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array, Saved]:
        """Normalise the exponentials of each row."""
        (x,) = xs
        y = self.output_like(x)
        self.backend.elementwise.softmax_forward(x, out=y)
        return y, y

    def backward(self, dy: Array, saved: Saved) -> Array:
        """Compute ``dx = y (dy - sum(dy y))``."""
        dx = self.gradient_like(dy)
        self.backend.elementwise.softmax_backward(dy, saved, out=dx)
        return dx

    def cost(self, batch: int) -> Cost:
        """Maximum, difference, exponential, sum and quotient; two products, sum and difference."""
        return per_element(self.elements(batch), self.dtype.itemsize, 5, 4)


class LogSoftmax(Softmax):
    """``x - log sum exp(x)`` over the last axis.

    The losses of `pydtnn.losses` take logits, so a classifier does not end with this layer.
    """

    supports = ()

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array, Saved]:
        """Subtract the logarithm of the sum of the exponentials of each row."""
        (x,) = xs
        y, shifted = self.output_like(x), x - x.max(-1, keepdims=True)
        y[...] = shifted - self.xp.log(self.xp.exp(shifted).sum(-1, keepdims=True))
        return y, y

    def backward(self, dy: Array, saved: Saved) -> Array:
        """Compute ``dx = dy - exp(y) sum(dy)``."""
        dx = self.gradient_like(dy)
        dx[...] = dy - self.xp.exp(saved) * dy.sum(-1, keepdims=True)
        return dx
