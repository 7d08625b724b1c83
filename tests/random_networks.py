"""Random networks of all layers in all orders, drawn with hypothesis so that failures shrink.

A `Network` is a description: it makes its layers anew for every model, and prints as what it is.
Its steps form a graph, in which any step may read what any step before it has made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, TypeVar

import hypothesis
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers

from pydtnn import layers
from pydtnn.kernels import Backend, create_backend
from pydtnn.layers import Block, Conv2d, Layer, StepContext
from pydtnn.layers.base import Saved, Shape
from pydtnn.layers.blocks import Net
from pydtnn.model import Model
from pydtnn.model.graph import Graph, Node
from tests.random_cases import Case, Cases

Draw = Callable[[st.SearchStrategy[Any]], Any]
T = TypeVar("T")

# Hypothesis draws numbers that it finds in the source of the modules imported so far, too; without
# them, a case is the same whichever tests run before it and whatever has been edited.
providers.HypothesisProvider._local_constants = providers.Constants()  # type: ignore[assignment]

NUMPY = create_backend("numpy")
"""The reference, of which one is enough."""

EXAMPLES = 20
"""Networks per case: enough for hypothesis to vary what it has drawn."""


class OwnConv(Conv2d):
    """A convolution that a user has overridden: it is given arrays."""

    def forward(self, *xs: Any, context: StepContext) -> tuple[Any, Saved]:
        return super().forward(*xs, context=context)


class Turned(Layer):
    """A layer of a user's that declares nothing and returns views in another order."""

    def forward(self, *xs: Any, context: StepContext) -> tuple[Any, Saved]:
        return xs[0][:, ::-1], None

    def backward(self, dy: Any, saved: Saved) -> Any:
        return dy[:, ::-1]


KINDS = {name: getattr(layers, name) for name in layers.__all__} | {
    kind.__name__: kind for kind in (OwnConv, Turned)
}


@dataclass(frozen=True)
class Part:
    """A layer or block, to be made as often as one likes."""

    kind: str
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        made = [arg.build() if isinstance(arg, Part) else arg for arg in self.args]
        named = {k: v.build() if isinstance(v, Part) else v for k, v in self.options.items()}
        return KINDS[self.kind](*made, **named)

    def __repr__(self) -> str:
        given = [*map(repr, self.args), *(f"{k}={v!r}" for k, v in self.options.items())]
        return f"{self.kind}({', '.join(given)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


@dataclass(frozen=True)
class Again(Part):
    """Another use of the layer or block of an earlier step, by its number."""

    kind: str = "Again"
    step: int = 0

    def __repr__(self) -> str:
        return f"Again(step={self.step})"


class Wired(Block):
    """The steps of a network: node i of step i reads nodes before it, the inputs among them."""

    def __init__(self, steps: list[tuple[Part, tuple[int, ...]]], outputs: list[int]) -> None:
        super().__init__(name="")
        self.steps = steps
        self.outputs = outputs

    def wire(self, graph: Graph, *inputs: Node) -> tuple[Node, ...]:
        made, built = list(inputs), []
        for number, (part, sources) in enumerate(self.steps):
            built.append(built[part.step] if isinstance(part, Again) else part.build())
            node = graph.add(built[-1], *(made[i] for i in sources), label=str(number))
            assert isinstance(node, Node)
            made.append(node)
        return tuple(made[i] for i in self.outputs)


@dataclass
class Network:
    """A network, and what is done with it.

    Attributes
    ----------
    inputs : list of Shape
    steps : list of (Part, tuple of int)
        Each layer with the numbers of the nodes that it reads; the inputs come first.
    outputs : list of int
    batch : int
    seed : int
        Of inputs and weights.
    bucket_bytes : int
    input_gradient : bool
    """

    inputs: list[Shape]
    steps: list[tuple[Part, tuple[int, ...]]]
    outputs: list[int]
    batch: int
    seed: int
    bucket_bytes: int = 1 << 20
    input_gradient: bool = True

    def net(self) -> Net:
        return Wired(self.steps, self.outputs)

    def model(self, backend: Backend, *, fuse: bool = True, dtype: str = "float64") -> Model:
        return Model(
            self.net(),
            self.inputs,
            backend=backend,
            dtype=dtype,
            bucket_bytes=self.bucket_bytes,
            input_gradient=self.input_gradient,
            fuse=fuse,
        )


def for_each_network(
    cases: Cases, check: Callable[[Case, Network], None], examples: int = EXAMPLES, **limits: Any
) -> None:
    """Draw networks for each case, and check them; a failure is shrunk before it is reported."""
    settings = hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    for case in cases:
        test = hypothesis.given(networks(**limits))(_of_one_argument(partial(check, case)))
        hypothesis.seed(int(case.rng.integers(1 << 32)))(settings(test))()


def _of_one_argument(check: Callable[[Network], None]) -> Callable[[Network], None]:
    def checked(network: Network) -> None:
        check(network)

    return checked


# -- layers that suit a shape


def _pairs_or_one(draw: Draw, values: list[int]) -> Any:
    one = st.sampled_from(values)
    return draw(one | st.tuples(one, one))


def _window(draw: Draw, shape: Shape, *, dilates: bool) -> dict[str, Any]:
    """Kernel, stride, padding and dilation that fit an image."""
    height, width, _ = shape
    kernel = draw(st.sampled_from([(3, 3), (1, 1), (2, 2), (3, 1), (2, 3), (5, 5)]))
    options: dict[str, Any] = {"kernel_size": kernel, "stride": _pairs_or_one(draw, [1, 2, 3])}
    dilation = (1, 1)
    if dilates and draw(st.integers(0, 5)) == 0:
        dilation = draw(st.tuples(st.integers(1, 3), st.integers(1, 2)))
        options["dilation"] = dilation
    extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    if draw(st.booleans()):  # keeps the size where the stride is 1
        options["padding"] = "same"
        if draw(st.integers(0, 2)):
            options["stride"] = 1
        return options
    padding = []
    for size, extent in zip((height, width), extents, strict=True):
        least = max(extent - size, 0)
        before = draw(st.integers(min(-(-least // 2), extent - 1), extent - 1)) if extent > 1 else 0
        after = draw(st.integers(min(max(least - before, 0), extent - 1), extent - 1))
        padding.append((before, after) if draw(st.booleans()) else (max(before, after),) * 2)
    options["padding"] = tuple(padding)
    return options


def conv(draw: Draw, shape: Shape) -> Part:
    channels = shape[-1]
    groups = draw(st.sampled_from([1, 1, 1, *(g for g in (2, 3, channels) if channels % g == 0)]))
    filters = groups * draw(st.sampled_from([1, 2, 3, 4]))
    if draw(st.integers(0, 9)) == 9:
        filters = groups * 17
    options = _window(draw, shape, dilates=True)
    if draw(st.booleans()):
        options |= {"kernel_size": 3, "padding": 1, "stride": 1}
        options.pop("dilation", None)
    kind = "OwnConv" if draw(st.integers(0, 11)) == 11 else "Conv2d"
    return Part(kind, (filters,), options | {"groups": groups, "bias": draw(st.booleans())})


def max_pool(draw: Draw, shape: Shape) -> Part:
    return Part("MaxPool2d", (), _window(draw, shape, dilates=False))


def average_pool(draw: Draw, shape: Shape) -> Part:
    options = _window(draw, shape, dilates=False)
    return Part("AvgPool2d", (), options | {"count_padding": draw(st.booleans())})


def adaptive_pool(draw: Draw, shape: Shape) -> Part:
    return Part("AdaptiveAvgPool2d", (tuple(draw(st.integers(1, n)) for n in shape[:2]),))


def batch_norm(draw: Draw, shape: Shape) -> Part:
    options = {
        "momentum": draw(st.sampled_from([0.1, 0.5, 1.0])),
        "epsilon": draw(st.sampled_from([1e-3, 1e-5, 0.1])),
    }
    return Part("BatchNorm", (), options)


def group_norm(draw: Draw, shape: Shape) -> Part:
    groups = draw(st.sampled_from([g for g in range(1, shape[-1] + 1) if shape[-1] % g == 0]))
    return Part("GroupNorm", (groups,), {"epsilon": 1e-3})


def layer_norm(draw: Draw, shape: Shape) -> Part:
    return Part("LayerNorm", (), {"axes": draw(st.integers(1, len(shape))), "epsilon": 1e-3})


def linear(draw: Draw, shape: Shape) -> Part:
    features = draw(st.sampled_from([1, 2, 3, 5, 17]))
    return Part("Linear", (features,), {"bias": draw(st.booleans())})


def attention(draw: Draw, shape: Shape) -> Part:
    features = shape[-1]
    heads = draw(st.sampled_from([h for h in range(1, features + 1) if features % h == 0]))
    options = {"causal": draw(st.booleans()), "dropout": draw(st.sampled_from([0.0, 0.3]))}
    return Part("MultiHeadAttention", (heads,), options)


def recurrent(draw: Draw, shape: Shape) -> Part:
    options = {"layers": draw(st.integers(1, 2)), "bidirectional": draw(st.booleans())}
    features = draw(st.integers(1, 9))
    return Part(draw(st.sampled_from(["LSTM", "GRU"])), (features,), options)


def signal(draw: Draw, shape: Shape) -> Part:
    kernel, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    options = {"padding": "same", "dilation": dilation, "stride": draw(st.integers(1, 2))}
    return Part("Conv1d", (draw(st.integers(1, 9)), kernel), options)


def activation(draw: Draw, shape: Shape) -> Part:
    kinds = ["ReLU6", "LeakyReLU", "ELU", "Sigmoid", "Tanh", "ArcTan", "GELU", "SiLU", "Softmax"]
    return Part(draw(st.sampled_from(kinds)))


def logarithm(draw: Draw, shape: Shape) -> Part:
    positive = Part("Tanh"), Part("Sigmoid")  # far enough from 0 to have a logarithm
    return Part("Sequential", (*positive, Part("Log")))


def dropout(draw: Draw, shape: Shape) -> Part:
    return Part("Dropout", (draw(st.sampled_from([0.3, 0.0, 0.8])),))


def reshape(draw: Draw, shape: Shape) -> Part:
    channels = shape[-1]
    return Part("Reshape", (draw(st.sampled_from([(-1, channels), (channels, -1)])),))


def pad(draw: Draw, shape: Shape) -> Part:
    some = st.integers(0, 2)
    return Part("Pad", (tuple(draw(st.tuples(some, some)) for _ in shape),))


def cut(draw: Draw, shape: Shape) -> Part:
    slices = []
    for n in shape:
        start = draw(st.integers(0, n - 1))
        slices.append(slice(start, None, draw(st.sampled_from([None, 2]))))
    return Part("Slice", tuple(slices))


def simple(kind: str) -> Callable[[Draw, Shape], Part]:
    return lambda draw, shape: Part(kind)


def body(draw: Draw, shape: Shape) -> Part:
    """Parts that keep the shape."""
    image = len(shape) == 3
    parts = []
    for _ in range(draw(st.integers(1, 5))):
        kinds: list[Any] = [batch_norm, simple("ReLU"), activation, dropout, simple("Identity")]
        mixing: list[Any] = [_mixing_conv if image else _mixing_linear] * 3
        parts.append(draw(st.sampled_from([*mixing, *kinds]))(draw, shape))
    return Part("Sequential", tuple(parts))


def _mixing_conv(draw: Draw, shape: Shape) -> Part:
    return Part("Conv2d", (shape[-1], 3), {"padding": 1, "bias": draw(st.booleans())})


def _mixing_linear(draw: Draw, shape: Shape) -> Part:
    return Part("Linear", (shape[-1],))


def residual(draw: Draw, shape: Shape) -> Part:
    shortcut = () if draw(st.booleans()) else (body(draw, shape),)
    return Part("Residual", (body(draw, shape), *shortcut))


def branches(draw: Draw, shape: Shape) -> Part:
    parts = tuple(body(draw, shape) for _ in range(draw(st.integers(2, 3))))
    return Part("Branches", parts, {"merge": Part(draw(st.sampled_from(["Add", "Concat"])))})


ANY = [
    *([batch_norm, simple("ReLU")] * 5),
    *([activation] * 3),
    *(dropout, linear, logarithm, layer_norm, group_norm, reshape, pad, cut),
    *(simple("Flatten"), simple("Identity"), simple("Turned")),
    *(residual, branches),
]
IMAGES = [
    *([conv] * 10),
    *([max_pool, average_pool] * 2),
    *(adaptive_pool, simple("GlobalAvgPool2d")),
]
VECTORS = [linear] * 8
SEQUENCES = [
    *[linear, attention] * 4,
    *(simple("ClassToken"), simple("PositionalEmbedding")),
    *[recurrent, signal] * 2,
]
FUSED = [_mixing_conv, batch_norm, simple("ReLU")]
"""What the fusion pass knows, so that a network of little else has many ways to be fused."""


def _layer(draw: Draw, shape: Shape, fused: bool) -> Part:
    if fused and len(shape) == 3 and draw(st.integers(0, 7)):
        return draw(st.sampled_from(FUSED))(draw, shape)
    kinds = {1: VECTORS, 2: SEQUENCES, 3: IMAGES}
    suitable = [*kinds[len(shape)], *ANY]
    return draw(st.sampled_from(suitable))(draw, shape)


# -- networks


@st.composite
def networks(
    draw: Draw, *, largest: int = 7, least_batch: int = 1, inputs: int = 2, shared: bool = False
) -> Network:
    """Draw a network of up to a dozen steps.

    Parameters
    ----------
    largest : int
        Height and width of an input image, at most.
    least_batch : int
    inputs : int
        At most so many inputs.
    shared : bool
        Whether layers and blocks are used several times.
    """
    extent, channels = st.integers(1, largest), st.sampled_from([3, 1, 2, 4, 8, 17])
    image = st.tuples(extent, extent, channels)
    shapes = [
        draw(image if draw(st.integers(0, 5)) else st.tuples(st.integers(1, 20)))
        for _ in range(draw(st.sampled_from([1, 1, 1, *range(1, inputs + 1)])))
    ]
    graph = Graph(shapes, backend=NUMPY, dtype="float64")
    made, steps, built = list(graph.inputs), [], []
    fused = draw(st.booleans())
    for number in range(draw(st.integers(1, 12))):
        part, sources = _step(draw, made, fused)
        if shared and steps and not draw(st.integers(0, 3)):
            part, sources = _again(draw, made, steps) or (part, sources)
        built.append(built[part.step] if isinstance(part, Again) else part.build())
        node = graph.add(built[-1], *(made[i] for i in sources), label=str(number))
        assert isinstance(node, Node)
        if max(1, *node.shape) > 400 or len(node.shape) == 0:
            break
        steps.append((part, sources))
        made.append(node)
    for i in range(len(shapes)):
        if not any(i in sources for _, sources in steps):
            steps.append((Part("Identity"), (i,)))
    read = {i for _, sources in steps for i in sources}
    every = range(len(shapes), len(shapes) + len(steps))
    outputs = [i for i in every if i not in read or draw(st.integers(0, 9)) == 9]
    norms = [node for node in graph.nodes if isinstance(node.layer, layers.BatchNorm)]
    if any(prod(node.shape[:-1]) == 1 for node in norms):
        least_batch = 2  # one row has no variance
    return Network(
        shapes,
        steps,
        outputs,
        batch=draw(st.integers(least_batch, 4)),
        seed=draw(st.integers(0, 1000)),
        bucket_bytes=draw(st.sampled_from([1 << 20, 200])),
        input_gradient=draw(st.integers(0, 3)) > 0,
    )


def _again(
    draw: Draw, made: list[Node], steps: list[tuple[Part, tuple[int, ...]]]
) -> tuple[Part, tuple[int, ...]] | None:
    """Draw another use of an earlier step, for inputs of the same shapes, if there are any."""
    number = draw(st.integers(0, len(steps) - 1))
    part, sources = steps[number]
    newest = len(made) - 1
    if len(sources) > 1 or made[newest].shape != made[sources[0]].shape or newest == sources[0]:
        return None
    return Again(step=part.step if isinstance(part, Again) else number), (newest,)


def _step(draw: Draw, made: list[Node], fused: bool) -> tuple[Part, tuple[int, ...]]:
    """Draw a layer, or a merge of nodes that fit; mostly after the node that was made last."""
    newest = len(made) - 1
    back = draw(st.sampled_from([0, 0, 0, 1, 2, 3]))
    first = max(newest - back, 0)
    shape = made[first].shape
    equal = [i for i, node in enumerate(made) if node.shape == shape]
    merge = draw(st.sampled_from([None, None, None, None, "Add", "Add", "Concat"]))
    others = [i for i in equal if i != first]
    if merge and others:
        count = draw(st.sampled_from([1, 1, 1, 2]))
        more = [draw(st.sampled_from(others if k == 0 else equal)) for k in range(count)]
        sources = [first, *more]
        if draw(st.booleans()):
            sources.reverse()
        options = {}
        if merge == "Concat" and draw(st.booleans()):
            options = {"axis": draw(st.integers(-len(shape), len(shape) - 1))}
        return Part(merge, (), options), tuple(sources)
    return _layer(draw, shape, fused), (first,)
