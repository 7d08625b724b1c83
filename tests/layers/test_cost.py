"""Costs of layers: operations counted by loops, bytes counted from the arrays of kernel calls."""

from __future__ import annotations

import inspect
from collections import defaultdict
from typing import Any

import numpy as np

from pydtnn import layers as nn
from pydtnn.comm import Communicator, run_threads
from pydtnn.kernels import ConvGeometry, Deferred, create_backend
from pydtnn.kernels.reference import FAMILIES
from pydtnn.layers.parameters import Cut
from pydtnn.model import Model
from pydtnn.model.partition.striped_conv import StripedConv2d
from pydtnn.model.partition.stripes import HaloExchange
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
    y, saved = model.forward(x, nn.StepContext(training=True, samples=np.arange(BATCH)))
    model.backward(np.ones_like(y), saved)
    return model, counting


def conv(filters: int = 8, size: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(filters, size, padding="same", **options)


def residual_net() -> nn.Sequential:
    def block() -> nn.Residual:
        body = nn.Sequential(conv(), nn.BatchNorm(), nn.ReLU(), conv(bias=False), nn.BatchNorm())
        return nn.Residual(body)

    stem = (conv(), nn.BatchNorm(), nn.ReLU(), block(), nn.ReLU(), block(), nn.ReLU())
    return nn.Sequential(*stem, nn.GlobalAvgPool2d(), nn.Linear(20))


SHAPES = {"volumes": (4, 6, 6, 4)}
NETS = {
    "volumes": lambda: nn.Sequential(
        *(nn.Conv3d(8, 3, padding="same"), nn.BatchNorm(), nn.ReLU(), nn.MaxPool3d(2)),
        *(
            nn.Conv3d(8, 2, groups=2, bias=False),
            nn.AvgPool3d((1, 2, 2), 1),
            nn.GlobalAvgPool3d(),
            nn.Linear(20),
        ),
    ),
    "residual": residual_net,
    "plain": lambda: nn.Sequential(
        *(conv(), nn.ReLU(), conv(), nn.ReLU(), nn.MaxPool2d(2), conv(), nn.BatchNorm(), nn.ReLU()),
        *(conv(), nn.BatchNorm(), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Flatten(), nn.Linear(20)),
        *(nn.ReLU(), nn.Dropout(0.5)),
    ),
    "decoder": lambda: nn.Sequential(
        *(conv(), nn.ConvTranspose2d(8, 3, stride=2), nn.ReLU(), nn.Upsample(2)),
        *(nn.ConvTranspose2d(8, 2, groups=2, bias=False), nn.Linear(8)),
    ),
    "norms and pools": lambda: nn.Sequential(
        *(
            conv(groups=4),
            nn.GroupNorm(2),
            nn.AvgPool2d(3, 1, padding=1),
            nn.LayerNorm(),
            nn.Softmax(),
        ),
        nn.LocalResponseNorm(3),
        *(nn.GELU(), nn.Sigmoid(), nn.AdaptiveAvgPool2d(5), nn.Tanh(), nn.Linear(8)),
    ),
    "attention": lambda: nn.Sequential(
        *(conv(12), nn.Reshape((-1, 12)), nn.LayerNorm(), nn.MultiHeadAttention(3)),
        *(nn.GELU(), nn.Dropout(0.2), nn.Linear(20)),
    ),
}


@each("fuse", [True, False])
@each("name", NETS)
def test_the_bytes_of_a_network_are_those_of_the_arrays_of_its_kernel_calls(name, fuse):
    model, counting = counted(NETS[name](), SHAPES.get(name, (12, 12, 4)), fuse=fuse)
    nodes = model.graph.nodes[1:]
    costs = {node.name: node.layer.cost(BATCH) for node in nodes}
    # Gradients of an output with several readers are added by the loop unless one of them does.
    added = 3 * BATCH * 12 * 12 * 8 * 4 * (name == "residual" and not fuse) * 2
    assert sum(c.bytes_forward + c.bytes_backward for c in costs.values()) + added == sum(
        counting.bytes.values()
    )
    if fuse and name != "plain":  # there a ReLU runs after the pool, of fewer elements
        net = Model(NETS[name](), model.input_shapes[0], backend="cpu", fuse=False)
        unfused = [node.layer.cost(BATCH) for node in net.graph.nodes[1:]]
        for one in (0, 1):
            assert sum(c[one] for c in costs.values()) == sum(c[one] for c in unfused)
    convolutions = [node.name for node in nodes if isinstance(node.layer, nn.Conv2d)]
    assert len(convolutions) >= 1 or name == "volumes"
    for conv_name in convolutions if fuse else ():
        cost = costs[conv_name]
        assert cost.bytes_forward == counting.bytes[Kind.FORWARD, conv_name]
        assert cost.bytes_backward == counting.bytes[Kind.BACKWARD, conv_name]


"""Elements of two images."""

"""A square, additions, factor and k, logarithm, product and exponential."""


N = 2 * 5 * 5 * 4
"""Elements of two images."""
LRN = 1 + 4 + 2 + 3
"""A square, additions, factor and k, logarithm, product and exponential."""
IMAGE, LARGE, VOLUME = (5, 5, 4), (9, 7, 4), (5, 4, 6, 4)
ROTARY = [(5, 16), (5, 8), (5, 8)]

# Operations forward and backward, then bytes, of two samples: a layer that follows another.
COSTS: list[tuple[Any, Any, tuple[int, ...]]] = [
    # outputs, and what each of them adds up; twice that, and the sums of dy for the biases
    (conv(5), LARGE, (2 * 630 * 36, 4 * 630 * 36 + 630)),
    (conv(4, stride=2, groups=2), LARGE, (2 * 160 * 18, 4 * 160 * 18 + 160)),
    (nn.Conv2d(3, 3, dilation=2, padding=1), LARGE, (2 * 210 * 36, 4 * 210 * 36 + 210)),
    (
        nn.Conv3d(6, (2, 3, 2), stride=(1, 2, 2), padding=(0, 1, 0), dilation=(2, 1, 1), groups=2),
        VOLUME,
        (2 * 216 * 24, 4 * 216 * 24 + 216),
    ),
    # pixels and channels; taps and filters of a group; biases
    (
        nn.ConvTranspose2d(6, (3, 2), stride=2, groups=2),
        (5, 4, 4),
        (2 * 160 * 18 + 1056, 4 * 160 * 18 + 1056),
    ),
    (nn.Linear(3), (5, 4), (2 * 10 * 12, 4 * 10 * 12 + 30, 4 * (40 + 30 + 12))),
    (nn.Linear(3, bias=False), (5, 4), (2 * 10 * 12, 4 * 10 * 12, 4 * (40 + 30 + 12))),
    (nn.MaxPool2d(3, 2, padding=1), LARGE, (160 * 8, 160, 4 * 664 + 160, 4 * 664 + 160)),
    (nn.AvgPool2d(3, 2, padding=1), LARGE, (160 * 9, 160 * 10, 4 * 664, 4 * 664)),
    (nn.AdaptiveAvgPool2d((4, 3)), LARGE, (2 * 4 * 12 * 9, 864 + 96, 4 * 600, 4 * 600)),
    (nn.GlobalAvgPool2d(), LARGE, (504, 512, 4 * 512, 4 * 512)),
    (nn.MaxPool3d((2, 2, 2), 1), VOLUME, (480 * 7, 480)),
    (nn.AvgPool3d((2, 2, 2), 1), VOLUME, (480 * 8, 480 * 9)),
    (nn.GlobalAvgPool3d(), VOLUME, (960, 968)),
    # taps of each input; dy is copied
    (nn.Upsample(2, "bilinear"), (5, 4, 4), (32 * 160, 32 * 160, 4 * 5 * 160, 4 * 13 * 160)),
    # x + x x; gamma x + beta
    (nn.BatchNorm(), IMAGE, ((3 + 2) * N, (5 + 4) * N, 3 * N * 4, 5 * N * 4)),
    # x times the power; dy times it, times x, over d, the sum of 5, its factor and difference
    (nn.LocalResponseNorm(5), IMAGE, ((LRN + 1) * N, (LRN + 10) * N, 8 * N, 12 * N)),
    (nn.Flatten(), IMAGE, (0, 0, 0, 0)),
    (nn.Dropout(0), IMAGE, (0, 0, 0)),
    (nn.Dropout(0.4), IMAGE, (2 * N, 2 * N, 4 * 2 * N, 4 * 2 * N)),
    (nn.Pad(((1, 1), (0, 0), (0, 0))), IMAGE, (0, 0, 4 * (280 + 2 * N), 4 * 2 * N)),
    (nn.Slice(slice(0, 3)), IMAGE, (0, 0, 4 * 2 * 120, 4 * (N + 2 * 120))),
    (nn.ClassToken(), (6, 4), (0, 2 * 4, 4 * 2 * (6 + 7) * 4, 4 * 2 * (1 + 2 * 6) * 4)),
    (nn.PositionalEmbedding(), (6, 4), (48, 48, 4 * (2 * 48 + 24), 4 * 48)),
    (nn.Add(), [(5, 4)] * 3, (2 * 40, 0, 2 * 3 * 40 * 4, 0)),
    (nn.Concat(), [(5, 4)] * 3, (0, 0, 2 * 120 * 4, 2 * 120 * 4)),
    (nn.Multiply(), [(5, 4), (1, 4)], (40, 2 * 40 + 40, 4 * 88, 8 * 88)),
    # pairs of 3 heads of 2 features: q k, scaled, softmax of 5, weight times v; dv, dp, dq, dk,
    # softmax, scaled; a comparison and a product of dropout
    (
        nn.DotProductAttention(3, dropout=0.2),
        (7, 18),
        (294 * (4 + 1 + 5 + 4 + 2), 294 * (16 + 4 + 1 + 2), 4 * (4 * 84 + 42), 4 * (8 * 84 + 42)),
    ),
    (nn.DotProductAttention(3, causal=True), (7, 18), (168 * 14, 168 * 21)),
    # windows of 3 of 6 keys, and of 2 at the ends; a slope added
    (
        nn.DotProductAttention(1, window=2, positions=nn.LinearBiases()),
        (6, 6),
        (32 * 15, 32 * 22, 4 * (2 * 48 + 12), 4 * (4 * 48 + 12)),
    ),
    (
        nn.CrossAttention(2),
        [(3, 4), (5, 8)],
        (60 * 14, 60 * 21, 4 * (2 * (12 + 40 + 12) + 12), 4 * (4 * (12 + 40 + 12) + 12)),
    ),
    # two products and a sum for each element of queries and keys; sums of groups of heads
    (nn.Rotary(4), ROTARY, (3 * 240, 3 * 240 + 160, 4 * (320 + 480), 4 * (320 + 480))),
    # two products of 20 choices, or three of 10, and activations; 31 or 36 parameters of an expert
    (
        nn.Experts(3),
        [(5, 4), (5, 3)],
        (20 * (48 + 24), 2 * 20 * (48 + 24), 4 * (160 + 120 + 93), 8 * (160 + 120 + 93)),
    ),
    (
        nn.Experts(3, gated=True, choices=1),
        [(5, 4), (5, 3)],
        (10 * (72 + 18), 10 * (144 + 33), 4 * (80 + 120 + 108), 8 * (80 + 120 + 108)),
    ),
    # 13 and 24, or 11 and 18, operations of a unit besides the products of its 4 or 3 gates
    (
        nn.LSTMLayer(3),
        (5, 4),
        (2 * 120 * 7 + 13 * 30, 4 * 120 * 7 + 24 * 30 + 120, 4 * 544, 4 * 1118),
    ),
    (
        nn.GRULayer(3, return_sequences=False),
        (5, 4),
        (2 * 90 * 7 + 11 * 30, 4 * 90 * 7 + 18 * 30 + 2 * 90, 4 * 445, 4 * 1166),
    ),
]


@each(("layer", "shapes", "cost"), COSTS)
def test_costs_are_those_of_all_operations_and_arrays(layer, shapes, cost):
    net = layer if isinstance(shapes, list) else nn.Sequential(nn.Linear(shapes[-1]), layer)
    model = Model(net, shapes, backend="numpy", input_gradient=True, fuse=False)
    found = model.layers[-1].cost(2)
    assert found[: len(cost)] == cost
    assert model.layers[-1].cost(6)[:2] == (3 * found[0], 3 * found[1])


def test_a_first_layer_computes_no_gradient_of_its_input():
    first, last = Model(nn.Sequential(nn.Linear(5), nn.Linear(3)), (4,), backend="numpy").layers
    assert first.cost(7).flops_backward == 2 * 7 * 4 * 5 + 7 * 5
    assert last.cost(7).flops_backward == 4 * 7 * 5 * 3 + 7 * 3


def test_convolutions_of_stripes_count_the_copies_of_stripe_and_halo():
    shape = (height := 24, 8, 4)

    def rank(comm: Communicator) -> None:
        net = nn.Sequential(*(conv(bias=False, name=name) for name in "ab"))
        backend = create_backend("cpu", threads=1, tuning="direct")
        model = Model(net, shape, backend=backend, mesh=Mesh(comm, height=3))
        assert all(type(model.layers[name]) is StripedConv2d for name in "ab")
        x = np.random.default_rng(0).normal(size=(BATCH, *shape)).astype("float32")
        x = x[:, *model.graph.inputs[0].part]
        counting = Counting(backend)
        model.observer = counting
        y, saved = model.forward(x, nn.StepContext(training=True, samples=np.arange(BATCH)))
        model.backward(np.ones_like(y), saved)
        for name in "ab":
            layer = model.layers[name]
            cost = layer.cost(BATCH)
            assert cost.flops_forward == counting.flops[Kind.FORWARD, name]
            assert cost.flops_backward == counting.flops[Kind.BACKWARD, name]
            # copies of rows are the work of the layer, too, but no kernels
            copied = cost.bytes_forward - counting.bytes[Kind.FORWARD, name]
            line = BATCH * 8 * layer.geometry.channels * 4
            neighbours = 2 if comm.rank == 1 else 1
            # the stripe is read, and written with the rows of neighbours
            assert copied == line * (height // 3 + height // 3 + neighbours)
            differentiated = cost.bytes_backward - counting.bytes[Kind.BACKWARD, name]
            assert 0 < differentiated <= 2 * copied

    run_threads(3, rank)


def test_dropout_of_a_part_writes_the_mask_of_whole_samples():
    def rank(comm: Communicator) -> None:
        net = nn.Sequential(conv(), nn.Dropout(0.4, name="drop"))
        layer = Model(net, (6, 8, 4), backend="cpu", mesh=Mesh(comm, height=3)).layers["drop"]
        outputs, whole = 5 * 2 * 8 * 8, 5 * 6 * 8 * 8
        flops, moved = outputs + 2 * whole, 4 * 3 * (outputs + whole)
        assert layer.cost(5) == (flops, flops, moved, moved)

    run_threads(3, rank)


def test_an_exchange_of_rows_copies_those_that_are_kept_sent_and_received():
    cut, needed = Cut(0, "x", (0, 3, 6, 9)), [(0, 4), (2, 8), (5, 9)]
    layer = HaloExchange(cut, needed, position={"x": 1})
    layer.bind(create_backend("numpy"), np.dtype("float32"), "halo", ((3, 7, 2),))
    row, kept, sent, received = 4 * 7 * 2, 3, 2, 3
    moved = 2 * (kept + sent + received), 3 + 2 * (kept + received) + 3 * sent
    assert layer.cost(4) == (0, sent * row, *(4 * row * rows for rows in moved))
