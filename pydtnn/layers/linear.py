"""Fully connected layer."""

from __future__ import annotations

from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import RESULTS, Layer, Saved, Shape, StepContext
from pydtnn.layers.cost import Cost
from pydtnn.layers.initializers import Initializer
from pydtnn.layers.recomputed import Recomputed, kept, restored
from pydtnn.utils.validate import check_int


class Linear(Layer):
    """``y = x w' + b`` over the last axis.

    Parameters
    ----------
    features : int
        Size of the output's last axis.
    bias : bool
    initializer, bias_initializer : str or Initializer

    Notes
    -----
    Input ``(N, ..., I)``, output ``(N, ..., O)``, parameters ``w (O, I)`` and ``b (O,)``.
    """

    saves: tuple[str, ...] = ("input",)
    new_results = RESULTS
    supports: tuple[str, ...] = ("16 bits", "recomputed", "regathered", "replay")
    adds_bias = True  # not on ranks whose outputs are added to those of another one

    def __init__(
        self,
        features: int,
        *,
        bias: bool = True,
        initializer: str | Initializer = "glorot_uniform",
        bias_initializer: str | Initializer = "zeros",
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.features = check_int(type(self).__name__, "features", features, at_least=1)
        self.bias = bias
        self.initializer = initializer
        self.bias_initializer = bias_initializer

    def build(self, *shapes: Shape) -> Shape:
        """Declare w (O, I) and b (O,)."""
        shape = self.single(shapes, axes=1)
        inputs, outputs = shape[-1], self.features
        self.w = self.parameter("w", (outputs, inputs), self.initializer, working=True)
        if self.bias:
            self.b = self.parameter("b", (outputs,), self.bias_initializer, decay=False)
        return (*shape[:-1], outputs)

    def forward(self, *xs: Array | Recomputed, context: StepContext) -> tuple[Array, Saved]:
        """Compute ``x w' + b``."""
        (x,) = xs
        y = self.empty(x.shape[0], self.output_shape)
        b = self.b.value if self.bias and self.adds_bias else None
        self.backend.linear.forward(self._rows(self.array(x)), self.w.value, b, out=self._rows(y))
        return y, kept(x)

    def backward(self, dy: Array, saved: Saved) -> Array | None:
        """Compute ``dw = dy' x``, ``db = sum dy``, ``dx = dy w``."""
        self.backward_parameters((dy, saved))  # what it recomputes is freed before dx is allocated
        return self._backward_input(dy)

    def backward_inputs(self, dy: Array, saved: Saved) -> tuple[Array | None, Saved]:
        """Compute ``dx = dy w``."""
        return self._backward_input(dy), (dy, saved) if self.trainable else None

    def backward_parameters(self, left: Saved) -> None:
        """Compute ``dw = dy' x``, ``db = sum dy``."""
        dy, saved = left
        linear, rows, w = self.backend.linear, self._rows(dy), self.w
        if not w.frozen:
            x = self._rows(restored(saved))
            linear.backward_filter(x, rows, out=w.grad, accumulate=w.accumulate)
        if self.bias and not self.b.frozen:
            linear.backward_bias(rows, out=self.b.grad, accumulate=self.b.accumulate)

    def _backward_input(self, dy: Array) -> Array | None:
        if not self.needs_dx:
            return None
        dx = self.empty(len(dy), self.input_shapes[0])
        self.backend.linear.backward_data(self._rows(dy), self.w.value, out=self._rows(dx))
        return dx

    def cost(self, batch: int) -> Cost:
        """Products of ``2 N I O`` operations, forward with the bias; db is a sum of dy."""
        (inputs, outputs), itemsize = self.elements(batch), self.dtype.itemsize
        flops = 2 * outputs * self.w.shape[1]
        moved = (inputs + outputs + self.w.size) * itemsize
        dw, db = not self.w.frozen, self.bias and not self.b.frozen
        written = (inputs + outputs) * itemsize + self.w.size * self.parameter_dtype.itemsize
        return Cost(
            flops,
            flops * (dw + self.needs_dx) + outputs * db,
            moved,
            written * dw + moved * self.needs_dx + outputs * itemsize * db,
        )

    @staticmethod
    def _rows(x: Array) -> Array:
        return x.reshape(-1, x.shape[-1])  # (N, ..., C) -> (N * ..., C)
