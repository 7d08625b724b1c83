"""Costs of layers: operations counted by loops, bytes counted from the arrays of kernel calls."""

from __future__ import annotations

import inspect
from collections import defaultdict
from itertools import product
from typing import Any

import numpy as np
import pytest

from pydtnn import layers
from pydtnn.comm import Communicator, run_threads
from pydtnn.kernels import ConvGeometry, Deferred, create_backend
from pydtnn.kernels.reference import FAMILIES
from pydtnn.layers import (
    AdaptiveAvgPool2d,
    Add,
    AvgPool2d,
    AvgPool3d,
    BatchNorm,
    Branches,
    Concat,
    Conv2d,
    Conv3d,
    Dropout,
    Flatten,
    GlobalAvgPool2d,
    GlobalAvgPool3d,
    GroupNorm,
    LayerNorm,
    Linear,
    MaxPool2d,
    MaxPool3d,
    ReLU,
    Residual,
    Sequential,
    Softmax,
    StepContext,
    Upsample,
)
from pydtnn.layers.striped_conv import ExtendedConv2d, StripedConv2d
from pydtnn.model import Model
from pydtnn.parallel.mesh import Mesh
from pydtnn.utils.observer import Kind, Observer
from tests.each import each

BATCH = 8
SMALL = 200
"""Length of arrays in B up to which they are values per channel."""
WRITTEN = ("out", "dx", "dw", "index", "store", "add")
"""Arguments that are another sweep, even if their memory is that of another argument."""


class Counting(Observer):
    """Bytes of the arrays of all kernel calls, by pass and node."""

    def __init__(self, backend: Any) -> None:
        self.stack: list[tuple[Kind, str]] = []
        self.nested: list[Any] = []
        self.bytes: dict[tuple[Kind, str], int] = defaultdict(int)
        self.flops: dict[tuple[Kind, str], int] = defaultdict(int)
        for name, reference in FAMILIES.items():
            family = getattr(backend, name)
            for kernel, method in vars(reference).items():
                if not kernel.startswith("_") and callable(method):
                    bound = getattr(family, kernel)
                    setattr(family, kernel, self.counted(bound, kernel))

    def counted(self, call: Any, kernel: str) -> Any:
        signature, nested = inspect.signature(call), self.nested

        def counting(*args: Any, **options: Any) -> Any:
            if self.stack and not nested:  # not of a kernel that calls another
                self.add(signature.bind(*args, **options).arguments, kernel)
            nested.append(call)
            try:
                return call(*args, **options)
            finally:
                nested.pop()

        return counting

    def add(self, arguments: dict[str, Any], kernel: str) -> None:
        read: dict[int, int] = {}
        for name, value in arguments.items():
            if isinstance(value, ConvGeometry) and kernel != "takes_sums":
                rows = arguments["dy" if kernel.startswith("backward") else "out"].shape[0]
                passes = 2 if kernel == "backward" else 1
                self.flops[self.stack[-1]] += passes * value.flops(rows)
            if isinstance(value, Deferred):
                terms = [term.x for term in value.terms]
                arrays = [value.array] if value.array is not None and name != "gate" else terms
            else:
                arrays = [value] if isinstance(value, np.ndarray) else []
            for array in arrays:
                if array.nbytes <= SMALL or array.dtype == "float64":  # sums
                    continue
                if name in WRITTEN:
                    self.bytes[self.stack[-1]] += array.nbytes
                else:
                    read[array.ctypes.data] = array.nbytes
        self.bytes[self.stack[-1]] += sum(read.values())

    def begin(self, kind: Kind, name: str, *, nbytes: int = 0, bucket: int = -1) -> None:
        self.stack.append((kind, name))

    def end(self) -> None:
        self.stack.pop()


def counted(net: Any, shape: tuple[int, ...], **options: Any) -> tuple[Model, Counting]:
    """The bytes of one step."""
    backend = create_backend("cpu", threads=1, tuning="direct")
    model = Model(net, shape, backend=backend, **options)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH, *shape)).astype(model.dtype)
    counting = Counting(backend)
    model.observer = counting
    y, saved = model.forward(x, StepContext(training=True, samples=np.arange(BATCH)))
    model.backward(np.ones_like(y), saved)
    return model, counting


def conv(filters: int = 8, size: int = 3, **options: Any) -> Conv2d:
    return Conv2d(filters, size, padding="same", **options)


def residual_net() -> Sequential:
    def block() -> Residual:
        body = Sequential(conv(), BatchNorm(), ReLU(), conv(bias=False), BatchNorm())
        return Residual(body)

    stem = (conv(), BatchNorm(), ReLU())
    return Sequential(*stem, block(), ReLU(), block(), ReLU(), GlobalAvgPool2d(), Linear(20))


SHAPES = {"volumes": (4, 6, 6, 4)}
NETS = {
    "volumes": lambda: Sequential(
        *(Conv3d(8, 3, padding="same"), BatchNorm(), ReLU(), MaxPool3d(2)),
        *(
            Conv3d(8, 2, groups=2, bias=False),
            AvgPool3d((1, 2, 2), 1),
            GlobalAvgPool3d(),
            Linear(20),
        ),
    ),
    "residual": residual_net,
    "plain": lambda: Sequential(
        *(conv(), ReLU(), conv(), ReLU(), MaxPool2d(2), conv(), BatchNorm(), ReLU(), conv()),
        *(BatchNorm(), ReLU(), MaxPool2d(3, 2), Flatten(), Linear(20), ReLU(), Dropout(0.5)),
    ),
    "decoder": lambda: Sequential(
        *(conv(), layers.ConvTranspose2d(8, 3, stride=2), ReLU(), Upsample(2)),
        *(layers.ConvTranspose2d(8, 2, groups=2, bias=False), Linear(8)),
    ),
    "norms and pools": lambda: Sequential(
        *(conv(groups=4), GroupNorm(2), AvgPool2d(3, 1, padding=1), LayerNorm(), Softmax()),
        layers.LocalResponseNorm(3),
        *(layers.GELU(), layers.Sigmoid(), AdaptiveAvgPool2d(5), layers.Tanh(), Linear(8)),
    ),
    "attention": lambda: Sequential(
        *(conv(12), layers.Reshape((-1, 12)), LayerNorm(), layers.MultiHeadAttention(3)),
        *(layers.GELU(), Dropout(0.2), Linear(20)),
    ),
}


@each("fuse", [True, False])
@each("name", NETS)
def test_the_bytes_of_a_network_are_those_of_the_arrays_of_its_kernel_calls(
    name: str, fuse: bool
) -> None:
    model, counting = counted(NETS[name](), SHAPES.get(name, (12, 12, 4)), fuse=fuse)
    nodes = model.graph.nodes[1:]
    costs = {node.name: node.layer.cost(BATCH) for node in nodes}
    # Gradients of an output with several readers are added by the loop unless one of them does.
    added = 3 * BATCH * 12 * 12 * 8 * 4 * (name == "residual" and not fuse) * 2
    assert sum(c.bytes_forward + c.bytes_backward for c in costs.values()) + added == sum(
        counting.bytes.values()
    )
    convolutions = [node.name for node in nodes if isinstance(node.layer, Conv2d)]
    assert len(convolutions) >= 1 or name == "volumes"
    for conv_name in convolutions if fuse else ():
        cost = costs[conv_name]
        assert cost.bytes_forward == counting.bytes[Kind.FORWARD, conv_name]
        assert cost.bytes_backward == counting.bytes[Kind.BACKWARD, conv_name]


def built(layer: Any, *shapes: tuple[int, ...]) -> Any:
    """A layer that is the second of a model, so that its dx is needed."""
    net = Sequential(Linear(shapes[0][-1]), layer)
    return Model(net, shapes[0], backend="numpy", fuse=False).layers[1]


def taps(size: int, kernel: int, stride: int, pad: int, dilation: int = 1) -> list[list[int]]:
    """The positions that each window reads along an axis."""
    first = range(-pad, size + pad - dilation * (kernel - 1), stride)
    return [[start + dilation * tap for tap in range(kernel)] for start in first]


@each(
    ("stride", "dilation", "groups", "filters"),
    [(1, 1, 1, 5), (2, 1, 1, 5), (1, 2, 1, 3), (2, 1, 2, 4), (1, 1, 4, 8)],
)
def test_the_operations_of_a_convolution_are_those_of_its_loops(
    stride: int, dilation: int, groups: int, filters: int
) -> None:
    layer = built(
        Conv2d(filters, 3, stride=stride, dilation=dilation, groups=groups, padding=1), (9, 7, 4)
    )
    forward = 0
    windows = product(taps(9, 3, stride, 1, dilation), taps(7, 3, stride, 1, dilation))
    outputs = 0
    for rows, columns in windows:
        for filter_ in range(filters):
            outputs += 1
            group = filter_ * groups // filters
            for _row, _column, channel in product(rows, columns, range(4)):
                forward += 2 * (channel * groups // 4 == group)
    cost = layer.cost(1)
    assert cost.flops_forward == forward  # the first addition is that of the bias
    assert cost.flops_backward == 2 * forward + outputs
    assert layer.cost(6) == (*(6 * n for n in cost[:2]), *layer.cost(6)[2:])


@each("bias", [False, True])
def test_the_operations_of_a_linear_layer_are_those_of_its_products(bias: bool) -> None:
    inputs, outputs, batch = 5, 3, 7
    net = Sequential(Linear(inputs, name="first"), Linear(outputs, bias=bias, name="last"))
    model = Model(net, (4,), backend="numpy")
    products, rows = 2 * batch * inputs * outputs, batch * outputs  # db adds every row of dy
    cost = model.layers["last"].cost(batch)
    assert (cost.flops_forward, cost.flops_backward) == (products, 2 * products + rows * bias)
    assert model.layers["first"].cost(batch).flops_backward == 2 * batch * 4 * inputs + (
        batch * inputs  # no dx
    )
    model.freeze("last")
    assert model.layers["last"].cost(batch).flops_backward == products  # dx only


def test_frozen_parameters_have_no_gradients() -> None:
    model = Model(
        Sequential(Linear(4), Conv2d(3, 1, name="c")), (5, 5, 4), backend="numpy", fuse=False
    )
    before = model.layers["c"].cost(2)
    model.freeze("c")
    after = model.layers["c"].cost(2)
    assert after.flops_forward == before.flops_forward
    assert after.flops_backward == before.flops_forward  # dx only
    assert after.bytes_backward < before.bytes_backward


def test_the_operations_of_pools_are_those_of_their_windows() -> None:
    shape = (9, 7, 4)
    windows = list(product(taps(9, 3, 2, 1), taps(7, 3, 2, 1)))
    largest = built(MaxPool2d(3, 2, padding=1), shape).cost(1)
    assert largest.flops_forward == sum(4 * (len(a) * len(b) - 1) for a, b in windows)
    assert largest.flops_backward == 4 * len(windows)
    mean = built(AvgPool2d(3, 2, padding=1), shape).cost(1)
    assert mean.flops_forward == sum(4 * len(a) * len(b) for a, b in windows)
    bins = [
        (range(i * 9 // 4, -(-(i + 1) * 9 // 4)), range(j * 7 // 3, -(-(j + 1) * 7 // 3)))
        for i, j in product(range(4), range(3))
    ]
    adaptive = built(AdaptiveAvgPool2d((4, 3)), shape).cost(1)
    assert adaptive.flops_forward == sum(4 * len(a) * len(b) for a, b in bins)
    assert built(GlobalAvgPool2d(), shape).cost(2).flops_forward == 2 * 4 * 9 * 7


def test_batch_norm_counts_its_sums_and_its_map() -> None:
    cost = built(BatchNorm(), (5, 5, 4)).cost(2)
    n = 2 * 5 * 5 * 4
    sums, maps = 3, 2  # x + x x; gamma x + beta
    assert cost == ((sums + maps) * n, (5 + 4) * n, 3 * n * 4, 5 * n * 4)


def test_layers_that_rearrange_values_only_move_bytes() -> None:
    n, itemsize = 2 * 5 * 5 * 4, 4
    assert built(Flatten(), (5, 5, 4)).cost(2) == (0, 0, 0, 0)
    padded = 2 * 7 * 5 * 4
    pad = built(layers.Pad(((1, 1), (0, 0), (0, 0))), (5, 5, 4)).cost(2)
    assert pad == (0, 0, itemsize * (padded + 2 * n), itemsize * 2 * n)
    part = 2 * 3 * 5 * 4
    taken = built(layers.Slice(slice(0, 3)), (5, 5, 4)).cost(2)
    assert taken == (0, 0, itemsize * 2 * part, itemsize * (n + 2 * part))
    assert built(Dropout(0), (5, 5, 4)).cost(2)[:3] == (0, 0, 0)


@each("causal", [False, True])
@each("dropout", [0.0, 0.2])
def test_the_operations_of_attention_are_those_of_its_loops(causal: bool, dropout: float) -> None:
    length, heads, width = 7, 3, 2
    net = layers.DotProductAttention(heads, causal=causal, dropout=dropout)
    layer = built(net, (length, 3 * heads * width))
    forward = backward = 0
    for _head, i, j in product(range(heads), range(length), range(length)):
        if causal and j > i:
            continue
        softmax = 5  # maximum, difference, exponential, sum, quotient
        forward += 2 * width + 1 + softmax + 2 * width  # q k, scaled, and weight times v
        backward += 4 * 2 * width + 4 + 1  # dv, dp, dq, dk; softmax; scaled
        if dropout:
            forward, backward = forward + 2, backward + 2
    cost = layer.cost(5)
    assert cost[:2] == (5 * forward, 5 * backward)
    rows, sums = 5 * length * heads * width * 4, 5 * heads * length * 4
    assert cost[2:] == ((3 + 1) * rows + sums, (1 + 3 + 1 + 3) * rows + sums)


def test_tokens_and_embeddings_count_copies_and_sums() -> None:
    token = built(layers.ClassToken(), (6, 4)).cost(2)
    assert token == (0, 2 * 4, 4 * 2 * (6 + 7) * 4, 4 * 2 * (1 + 2 * 6) * 4)
    added = built(layers.PositionalEmbedding(), (6, 4)).cost(2)
    assert added == (2 * 24, 2 * 24, 4 * (2 * 2 * 24 + 24), 4 * 2 * 24)


def test_merges_count_every_input() -> None:
    net = Sequential(Linear(4), Branches(*(Linear(4) for _ in range(3)), merge=Add()))
    total = Model(net, (5,), backend="numpy").layers[-1].cost(2)
    assert total == (2 * 8, 0, 2 * 3 * 8 * 4, 0)
    net = Sequential(Linear(4), Branches(*(Linear(4) for _ in range(3)), merge=Concat()))
    joined = Model(net, (5,), backend="numpy").layers[-1].cost(2)
    assert joined == (0, 0, 2 * 24 * 4, 2 * 24 * 4)


@each(("height", "kind"), [(480, StripedConv2d), (24, ExtendedConv2d)])
def test_convolutions_of_stripes_count_rows_that_are_computed_twice(
    height: int, kind: type
) -> None:
    shape = (height, 8, 4)

    def rank(comm: Communicator) -> None:
        net = Sequential(*(conv(bias=False, name=name) for name in "ab"))
        backend = create_backend("cpu", threads=1, tuning="direct")
        model = Model(net, shape, backend=backend, mesh=Mesh(comm, height=3))
        assert all(type(model.layers[name]) is kind for name in "ab")
        x = np.random.default_rng(0).normal(size=(BATCH, *shape)).astype("float32")
        x = x[:, *model.graph.inputs[0].part]
        counting = Counting(backend)
        model.observer = counting
        y, saved = model.forward(x, StepContext(training=True, samples=np.arange(BATCH)))
        model.backward(np.ones_like(y), saved)
        for name in "ab":
            layer = model.layers[name]
            cost = layer.cost(BATCH)
            assert cost.flops_forward == counting.flops[Kind.FORWARD, name]
            received = cost.flops_backward - counting.flops[Kind.BACKWARD, name]
            assert 0 <= received <= 2 * BATCH * 8 * 8  # additions of two rows of halos to dx
            # copies of rows are the work of the layer, too, but no kernels
            copied = cost.bytes_forward - counting.bytes[Kind.FORWARD, name]
            line, out = (BATCH * 8 * c * 4 for c in (layer.geometry.channels, 8))
            neighbours = 2 if comm.rank == 1 else 1
            if kind is StripedConv2d:  # a row is sent; 3 are put together; one is copied into y
                again = layer.w.size * 4  # filters of the few rows at an edge are not counted
                assert copied == neighbours * (2 * line + 6 * line + 2 * out - again)
            else:  # the stripe is read, and written with the rows of neighbours
                assert copied == line * (height // 3 + height // 3 + neighbours)
            differentiated = cost.bytes_backward - counting.bytes[Kind.BACKWARD, name]
            assert 0 < differentiated <= 2 * copied

    run_threads(3, rank)


def test_the_operations_of_volumes_are_those_of_their_loops() -> None:
    shape, forward, outputs = (5, 4, 6, 4), 0, 0
    axes = (taps(5, 2, 1, 0, 2), taps(4, 3, 2, 1), taps(6, 2, 2, 0))
    for windows in product(*axes):
        outputs += 6
        forward += 6 * 2 * len([*product(*windows)]) * 4 // 2  # half of the channels in a group
    conv3d = Conv3d(6, (2, 3, 2), stride=(1, 2, 2), padding=(0, 1, 0), dilation=(2, 1, 1), groups=2)
    cost = built(conv3d, shape).cost(1)
    assert cost.flops_forward == forward
    assert cost.flops_backward == 2 * forward + outputs
    windows = 4 * 4 * 3 * 5  # channels and positions
    assert built(MaxPool3d((2, 2, 2), 1), shape).cost(1).flops_forward == windows * (8 - 1)
    assert built(AvgPool3d((2, 2, 2), 1), shape).cost(1).flops_forward == windows * 8
    assert built(GlobalAvgPool3d(), shape).cost(2).flops_forward == 2 * 4 * 5 * 4 * 6


def test_the_operations_of_enlarged_images_are_those_of_their_loops() -> None:
    cost = built(layers.ConvTranspose2d(6, (3, 2), stride=2, groups=2), (5, 4, 4)).cost(2)
    added = 2 * (5 * 4 * 4) * (3 * 2 * 6 // 2)  # pixels and channels; taps and filters of a group
    biases = 2 * (11 * 8 * 6)
    assert cost.flops_forward == 2 * added + biases
    assert cost.flops_backward == 4 * added + biases
    cost = built(Upsample(2, "bilinear"), (5, 4, 4)).cost(2)
    inputs = 2 * 5 * 4 * 4
    assert cost.flops_forward == cost.flops_backward == 2 * 4 * 4 * inputs  # taps of each input
    assert cost.bytes_forward == (1 + 4) * inputs * 4
    assert cost.bytes_backward == (1 + 4 + 2 * 4) * inputs * 4  # dy is copied


def test_local_responses_count_their_windows() -> None:
    cost = built(layers.LocalResponseNorm(5), (3, 3, 8)).cost(2)
    n = 2 * 3 * 3 * 8
    divisor = 1 + 4 + 2 + 3  # a square, additions, factor and k, logarithm, product and exponential
    # x times the power; dy times it, times x, over d, the sum of 5, its factor and difference
    assert cost == ((divisor + 1) * n, (divisor + 3 + 4 + 3) * n, 2 * n * 4, 3 * n * 4)


@pytest.mark.parametrize("sequences", [True, False])
@pytest.mark.parametrize("kind", [layers.LSTMLayer, layers.GRULayer])
def test_recurrent_layers_count_the_arrays_of_their_kernels_and_copies(
    kind: Any, sequences: bool
) -> None:
    layer = kind(5, return_sequences=sequences, name="steps")
    _, counting = counted(Sequential(Linear(6), layer), (7, 6))
    cost, states, last = layer.cost(BATCH), BATCH * 7 * 5 * 4, BATCH * 5 * 4
    gates = kind.gates * states  # written over their terms
    assert cost.bytes_forward == (
        counting.bytes[Kind.FORWARD, "steps"] + gates + 2 * last * (not sequences)
    )
    # The states before each step are a copy, and the gradient of all states has that of the last.
    assert cost.bytes_backward == (
        counting.bytes[Kind.BACKWARD, "steps"] + 2 * states + 2 * states * (not sequences)
    )
