"""The contract of a layer: one operation with an explicit derivative."""

from __future__ import annotations

import copy
from abc import ABC, ABCMeta, abstractmethod
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from pydtnn.kernels import Backend, Deferred
from pydtnn.kernels.dtypes import arithmetic
from pydtnn.kernels.reference.family import Array, Number
from pydtnn.layers.cost import Cost, per_element
from pydtnn.layers.initializers import Initializer, get_initializer
from pydtnn.layers.parameters import Parameter, SharedParameter, cannot_assign
from pydtnn.layers.recomputed import Recomputed
from pydtnn.layers.statistics import Statistic
from pydtnn.utils.arguments import StoresArguments
from pydtnn.utils.names import NotCallable

Shape = tuple[int, ...]
Saved = Any
"""The values that backward requires from forward; opaque to all other code."""


@dataclass(frozen=True)
class Penalties:
    """Losses of layers, which are added to that of the model in a training step.

    Parameters
    ----------
    scale : Number
        Factor on their gradients, as of the model's loss.
    values : list of Number
        To which each layer appends the sum over the samples; on a mesh, over those of all ranks
        along the axes of the model.
    """

    scale: Number
    values: list[Number] = field(default_factory=list)


@dataclass(frozen=True)
class StepContext:
    """Settings of a forward pass.

    Parameters
    ----------
    training : bool
        Whether dropout drops and batch norm uses the batch's own statistics.
    seed, epoch : int
        With a layer's name and `samples`, the key of its random numbers.
    samples : Array, shape (N,), int64
        The id of each row of the batch.
    batch : int
        Rows of the whole batch, if ranks of a mesh have parts of it; `Model.forward` sets it.
    differentiable : bool
        Whether backward may follow; `Model.forward` sets it.
    recomputing : bool
        Whether backward repeats the pass, so that statistics of the step must not be added again.
    cut_outputs : bool
        Whether outputs of the model that ranks have cut by channels or positions remain cut, for
        their loss.
    penalties : Penalties, optional
        Where layers add losses of their own; by default they have none.
    """

    training: bool
    seed: int = 0
    epoch: int = 0
    samples: Array = None
    batch: int = 0
    differentiable: bool = True
    recomputing: bool = False
    cut_outputs: bool = False
    penalties: Penalties | None = None

    @property
    def inference(self) -> bool:
        """Whether only the outputs are needed, so that constants may be folded into weights."""
        return not self.training and not self.differentiable


RESULTS: tuple[str, ...] = ("output", "gradient")
"""The results of a layer's forward and backward."""

FORMER = {
    "may_overwrite_input": ("may_overwrite", "input"),
    "may_overwrite_dy": ("may_overwrite", "dy"),
    "new_output": ("new_results", "output"),
    "new_gradient": ("new_results", "gradient"),
    "takes_deferred": ("supports", "deferred"),
    "takes_16_bits": ("supports", "16 bits"),
    "only_kernels": ("supports", "replay"),
    "penalises": ("supports", "penalties"),
}
"""Former flags of layers, which were bool, and what they are now."""


def toggled(items: tuple[str, ...], item: str, present: bool) -> tuple[str, ...]:
    """Return items with or without one of them.

    >>> toggled(("input",), "dy", True), toggled(("input", "dy"), "dy", False)
    (('input', 'dy'), ('input',))
    """
    return *(other for other in items if other != item), *[item] * present


def _is_pass(name: str, value: Any) -> bool:
    """Return whether a member of a class may take part in its passes."""
    calls = callable(value) or isinstance(value, property | classmethod | staticmethod)
    return calls and name[:2] != "__" and name not in ("build", "cost", "example")


class FormerFlag:
    """A former flag of an object of a layer."""

    def __init__(self, flag: str, what: str) -> None:
        self.flag, self.what = flag, what

    def __get__(self, layer: Layer | None, kind: type[Layer]) -> bool:
        return self.what in getattr(layer or kind, self.flag)

    def __set__(self, layer: Layer, value: bool) -> None:
        setattr(layer, self.flag, toggled(getattr(layer, self.flag), self.what, value))


class LayerType(ABCMeta):
    """Counts the assignments to attributes of layers and of their classes."""

    assignments = 0

    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        LayerType.assignments += 1


class Layer(NotCallable, StoresArguments, metaclass=LayerType):
    """One operation with an explicit derivative.

    A subclass writes `forward` and `backward`, and `build` if its output's shape differs from its
    input's or if it has parameters. No state is stored on `self` between calls: forward returns the
    values that backward requires as `saved`, so several batches can be in flight.

    A class declares, as attributes, what the graph may do with it; the defaults are safe for any
    layer. The model sets the others, `backend` to `batch_part` before `build`.

    =============  ================================================================================
    a class may declare
    =============  ================================================================================
    saves          Arrays that `saved` keeps alive: "input", "output".
    may_overwrite  Arrays over which a pass can write its result: "input", the first one, where
                   `overwrites_input` is set, and "dy", where `overwrites_dy` is set.
    new_results    Results that are always stored in new memory, or in that of an array that may be
                   overwritten: "output", "gradient"; several dx must not share memory.
    views          Results that are always the argument itself or a view of all of it: the "output"
                   of the input, the "gradient" of dy (for each input, if several).
    looks_ahead    Inputs, by number, of which an output at a position depends on later positions;
                   () if none is known.
    supports       Any of the following.
    =============  ================================================================================

    ===================  ==========================================================================
    a class may support
    ===================  ==========================================================================
    "deferred"           Inputs of forward and dy of backward may be `Deferred`; other layers
                         receive arrays.
    "16 bits"            The layer computes accurately with the 16-bit activations of a 16-bit
                         model; others receive and return float32, which the model rounds.
    "recomputed"         Inputs of forward may be `Recomputed`; other layers receive arrays.
    "recomputing"        Forward can return its output as `Recomputed`; see `Recomputing`.
    "regathered"         All that forward saves is `kept` of its only input, which may be
                         `Regathered`.
    "replay"             Passes only call kernels, so that steps may repeat the calls.
    "penalties"          The layer adds a loss in training (`StepContext.penalties`).
    ===================  ==========================================================================

    ===================  ==========================================================================
    the model sets
    ===================  ==========================================================================
    backend              The device's kernels.
    dtype                Type of inputs and outputs.
    name                 Dotted name in the model.
    input_shapes         Shapes without the batch axis; `output_shape` is what `build` returned.
    source               The first use in the model of a layer that is used several times, whose
                         parameters and running statistics this one shares; None for the first.
    batch_part           This rank's place, and the number of ranks, among which the samples of the
                         model's input are divided for this layer; None if they are not.
    bound                Whether the layer belongs to a model; it can belong to only one.
    needs_dx             Whether this layer's dx is used; if not, backward may return None.
    overwrites_input     Whether forward must store its result in its input's memory.
    overwrites_dy        Whether backward must store its result in the memory of dy.
    ===================  ==========================================================================
    """

    saves: tuple[str, ...] = ("input", "output")
    may_overwrite: tuple[str, ...] = ()
    new_results: tuple[str, ...] = ()
    views: tuple[str, ...] = ()
    looks_ahead: tuple[int, ...] = ()
    supports: tuple[str, ...] = ()

    backend: Backend
    dtype: np.dtype
    name: str | None = None
    needs_dx = True
    overwrites_input = False
    overwrites_dy = False
    input_shapes: tuple[Shape, ...] = ()
    output_shape: Shape = ()
    bound = False
    batch_part: tuple[int, int] | None = None
    source: Layer | None = None

    def __init_subclass__(cls) -> None:
        """Find out what a subclass supports that overrides methods, or declares former flags."""
        super().__init_subclass__()
        own = dict(vars(cls))
        if "supports" not in own:
            lost = {"replay"} if any(map(_is_pass, own, own.values())) else set()
            if not own.keys().isdisjoint(("forward", "backward")):
                lost |= {"recomputed", "recomputing", "regathered"}
            if not lost.isdisjoint(cls.supports):
                cls.supports = tuple(what for what in cls.supports if what not in lost)
        for name in own.keys() & FORMER.keys():
            flag, what = FORMER[name]
            if not isinstance(own[name], bool):
                raise TypeError(f"{cls.__name__}: {name} must be a bool; set {flag} in build")
            delattr(cls, name)
            setattr(cls, flag, toggled(getattr(cls, flag), what, own[name]))
        if "backward" in own and "backward_inputs" not in own:  # in one piece
            cls.backward_inputs = Layer.backward_inputs  # type: ignore[method-assign]

    def __init__(self, *, name: str | None = None) -> None:
        self.name = name

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        LayerType.assignments += 1

    # -- methods that a subclass implements

    def build(self, *shapes: Shape) -> Shape:
        """Declare parameters; return the output's shape, without the batch axis like all shapes."""
        return self.single(shapes)

    @abstractmethod
    def forward(self, *xs: Array, context: StepContext) -> tuple[Array, Saved]:
        """Compute the output and the values that backward requires."""

    @abstractmethod
    def backward(self, dy: Array, saved: Saved) -> Array | tuple[Array, ...] | None:
        """Compute each input's gradient (a tuple if several), and write those of parameters."""

    def backward_inputs(self, dy: Array, saved: Saved) -> tuple[Any, Saved]:
        """Compute the first half of `backward`: each input's gradient.

        Schedules of pipelines without bubbles compute the second half later. By default, the first
        half is all of `backward` and leaves nothing to the second.

        Returns
        -------
        dx : Array, tuple of Array or None
            As of `backward`.
        left : any
            What `backward_parameters` requires; None if nothing is left for it. A layer with a
            matrix, a `working` parameter, saves its input and leaves ``(dy, saved)``.
        """
        return self.backward(dy, saved), None

    def backward_parameters(self, left: Saved) -> None:
        """Compute the second half of `backward`: write the gradients of parameters."""

    def example(self, shape: Shape, rng: np.random.Generator) -> np.ndarray:
        """Draw an input (float32) of a shape, batch included, for measurements and checks."""
        return rng.standard_normal(shape, np.float32)

    def cost(self, batch: int) -> Cost:
        """Work of one pass over `batch` samples; the default is an elementwise operation's."""
        return per_element(self.elements(batch), self.dtype.itemsize, 1, 1)

    def elements(self, batch: int) -> tuple[int, int]:
        """Return the elements of all inputs, and of the output."""
        return batch * sum(map(prod, self.input_shapes)), batch * prod(self.output_shape)

    # -- methods that a subclass calls

    @property
    def xp(self) -> Any:
        """The array module of the backend."""
        return self.backend.xp

    @property
    def parameter_dtype(self) -> np.dtype:
        """Type of parameters that are not `working`, of gradients and coefficients."""
        return arithmetic(self.dtype)

    def single(self, shapes: tuple[Shape, ...], axes: int = 0) -> Shape:
        """Return the shape of the only input, with at least `axes` axes; called in `build`.

        Raises
        ------
        ValueError
            If there are several inputs, or too few axes.
        """
        if len(shapes) != 1:
            raise self.fail(
                f"expected one input, got {len(shapes)}; merge them first, with Add or Concat"
            )
        if len(shapes[0]) < axes:
            raise self.fail(
                f"expected an input of at least {axes} axes besides the batch, got {shapes[0]}"
            )
        return shapes[0]

    def parameter(
        self,
        name: str,
        shape: Shape,
        initializer: str | Initializer,
        *,
        fan_in: int | None = None,
        fan_out: int | None = None,
        decay: bool = True,
        working: bool = False,
        form: str | None = None,
    ) -> Parameter:
        """Declare a trainable array, see `Parameter`; called in `build`.

        Parameters
        ----------
        name : str
            Unique in the layer.
        shape : tuple of int
        initializer : str or Initializer
            A name such as "zeros", "ones", "he_normal" or "glorot_uniform", see
            `pydtnn.layers.initializers.INITIALIZERS`.
        fan_in, fan_out : int, optional
            See `Parameter`; by default those of a matrix ``(out, in)`` or of filters
            ``(out, ..., in)``, and 1 for a vector.
        decay, working, form
            See `Parameter`.
        """
        if not hasattr(self, "parameters"):
            raise self.fail(f"parameter {name} must be declared in build, not in __init__")
        if any(p.name == f"{self.name}.{name}" for p in self.parameters):
            raise self.fail(f"names of parameters must be unique, got {name} twice; rename one")
        p = self._shared(name, shape) or Parameter(
            f"{self.name}.{name}",
            shape,
            get_initializer(initializer),
            fan_in=prod(shape[1:]) if fan_in is None else fan_in,
            fan_out=prod(shape[:-1]) if fan_out is None else fan_out,
            decay=decay,
            working=working and "16 bits" in self.supports,
            form=form,
        )
        self.parameters.append(p)
        return p

    def _shared(self, name: str, shape: Shape) -> Parameter | None:
        """Return the parameter of the layer's first use; None for the first use."""
        if self.source is None:
            return None
        found = next(p for p in self.source.parameters if p.name == f"{self.source.name}.{name}")
        if found.shape != shape:
            raise self.fail(
                f"expected inputs for which {found.name}, which this layer shares, has shape "
                f"{found.shape}, got {' and '.join(map(str, self.input_shapes))}, which require "
                f"{shape}; use a second layer"
            )
        return SharedParameter(found)

    @property
    def trainable(self) -> bool:
        """Whether a parameter is trained; it cannot be assigned, use `Model.freeze`."""
        return any(not p.frozen for p in getattr(self, "parameters", ()))

    @trainable.setter
    def trainable(self, value: bool) -> None:
        raise cannot_assign(type(self).__name__, "trainable", str(self.name))

    def statistic(self, channels: int, momentum: float) -> Statistic:
        """Declare a running mean and variance; called in `build`."""
        if self.source is not None:
            s = self.source.statistics[len(self.statistics)]
        else:
            length = self.backend.norm.sums_length(channels, self.dtype)
            s = Statistic(str(self.name), channels, momentum, length)
        self.statistics.append(s)
        return s

    def output_like(self, x: Array) -> Array:
        """Memory for an output shaped like `x`: that of `x` itself if allowed."""
        return x if self.overwrites_input else self.backend.empty(x.shape, x.dtype)

    def gradient_like(self, dy: Array) -> Array:
        """Memory for a dx shaped like `dy`: that of `dy` itself if allowed."""
        return dy if self.overwrites_dy else self.backend.empty(dy.shape, dy.dtype)

    def empty(self, batch: int, shape: Shape) -> Array:
        """Memory for an array ``(batch, *shape)``."""
        return self.backend.empty((batch, *shape), self.dtype)

    def array(self, x: Array | Deferred | Recomputed) -> Array:
        """Return `x` itself, or the values of a deferred array, computed if necessary."""
        if isinstance(x, Recomputed):
            return x.array
        if not isinstance(x, Deferred):
            return x
        if x.array is not None:
            return x.array
        y = self.backend.empty(x.shape, x.dtype)
        self.backend.fused.evaluate(x, out=y)
        if x.keep:
            x.array = y
        return y

    # -- methods that the graph calls

    def bind(self, backend: Backend, dtype: np.dtype, name: str, shapes: tuple[Shape, ...]) -> None:
        """Build the layer for a device, a model's dtype and input shapes under its dotted name."""
        self.backend, self.name = backend, name
        self.input_shapes = shapes
        self.dtype = dtype if "16 bits" in self.supports else arithmetic(dtype)
        self.parameters: list[Parameter] = []
        self.statistics: list[Statistic] = []
        shape: Any = self.build(*shapes)
        if not (isinstance(shape, tuple) and all(isinstance(n, int | np.integer) for n in shape)):
            raise self.fail(f"build must return the output shape as a tuple of ints, got {shape!r}")
        self.output_shape = shape
        self.bound = True

    def another_use(self) -> Layer:
        """Return a copy that is not bound yet and will share the parameters of this layer."""
        other = copy.copy(self)
        other.source, other.bound = self, False
        return other

    def accept(self, x: Array | Deferred | Recomputed) -> Array | Deferred | Recomputed:
        """Return an input, or dy, in a form that this layer supports."""
        if x.dtype.itemsize == 2 and "16 bits" not in self.supports:
            return self.wide(self.array(x))
        if isinstance(x, Deferred):
            return x if "deferred" in self.supports else self.array(x)
        if isinstance(x, Recomputed):
            return x if "recomputed" in self.supports else x.array
        return x

    def can_replay(self) -> bool:
        """Return whether passes only call kernels, so that steps may repeat the calls."""
        return "replay" in self.supports

    def communicates(self, *, training: bool, joint: bool) -> bool:
        """Return whether a pass is a generator that yields collectives; see `Communicating`."""
        return False

    def wide(self, x: Array) -> Array:
        """Return `x` itself, or a copy in which 16 bits are float32."""
        if x.dtype.itemsize != 2:
            return x
        y = self.backend.empty(x.shape, self.parameter_dtype)
        self.backend.elementwise.convert(x, out=y)
        return y

    @classmethod
    def fail(cls, message: str) -> ValueError:
        """Return a `ValueError` with the class's name and the message."""
        return ValueError(f"{cls.__name__}: {message}")


for name, place in FORMER.items():
    setattr(Layer, name, FormerFlag(*place))


class Finisher(ABC):
    """Mixin for layers that can add to a gradient within a kernel if they contribute last.

    The graph sets `finishes`: no later node contributes to the gradient of the only input, so the
    model calls `finish_backward` instead of `backward`.
    """

    finishes = False

    @abstractmethod
    def finish_backward(self, dy: Array | Deferred, saved: Saved, so_far: Array | None) -> Any:
        """Compute the whole gradient of the only input.

        Parameters
        ----------
        dy, saved
            As for `Layer.backward`.
        so_far : Array or None
            The sum of the other contributions; its memory may be used for the result.

        Returns
        -------
        Array or Deferred
            For a deferred input it may be deferred too: with its values in `array`, after the mask
            of the input's ReLU, and the sums of `FusedKernels.gate`.
        """


def computes_like(layer: Layer, kind: type[Layer]) -> bool:
    """Return whether a layer has the computation of a class: none of its passes is overridden."""
    passes = ("forward", "backward", "forward_steps", "backward_steps")
    return all(getattr(type(layer), p, None) is getattr(kind, p, None) for p in passes)


def as_tuple(
    value: int | tuple[int, ...] | list[int], axes: int, who: str, what: str
) -> tuple[int, ...]:
    """Expand an int to one entry per axis, or check that a sequence has as many positive ints.

    Raises
    ------
    ValueError
        The message contains the layer (`who`) and the option (`what`).
    """
    values = tuple(value) if isinstance(value, tuple | list) else (value,) * axes
    if len(values) != axes or not all(isinstance(v, int) and v > 0 for v in values):
        raise ValueError(f"{who}: {what} must be a positive int or {axes} of them, got {value!r}")
    return values
