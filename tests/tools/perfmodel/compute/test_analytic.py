"""Compute times from the figures of a platform."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pydtnn.comm import run_threads
from pydtnn.kernels import ConvGeometry
from pydtnn.layers import (
    BatchNorm,
    Conv2d,
    Conv3d,
    Flatten,
    Linear,
    MaxPool2d,
    MaxPool3d,
    MultiHeadAttention,
    MultiHeadCrossAttention,
    ReLU,
    Sequential,
)
from pydtnn.layers.base import Layer
from pydtnn.model import Model
from pydtnn.tools.perfmodel.compute import AnalyticCosts, Label
from pydtnn.tools.perfmodel.compute.accelerator import Accelerator
from pydtnn.tools.perfmodel.compute.analytic import work_of
from pydtnn.tools.perfmodel.compute.classes import Rates, classify
from pydtnn.tools.perfmodel.entries import KernelClass
from pydtnn.tools.perfmodel.platform import Compute, Platform
from pydtnn.training.workload import Workload
from tests.each import each

COMPUTE = Compute(
    threads=1,
    peak={"float32": 1e8, "float64": 5e7},
    memory_bandwidth=1e8,
    host_bandwidth=1e8,
    call=1.0,
    step=2.0,
    rates={"conv 3x3, 16, forward": 4e8},
    bandwidths={"pool, forward": 5e7},
)
PLATFORM = replace(Platform.load("laptop"), compute=COMPUTE)  # 4 ranks a host share 1e8 B/s


@pytest.fixture(scope="module")
def model() -> Model:
    net = Sequential(
        Conv2d(16, 3, name="first"),
        Conv2d(16, 3, padding=1, name="second"),
        MaxPool2d(2, name="pool"),
        Flatten(),
        Linear(512, name="fc"),
    )
    return Model(net, (10, 10, 3), backend="numpy", fuse=False)


def seconds(costs: AnalyticCosts, model: Model, kind: str, name: str, index: int = 0) -> float:
    return costs.seconds(Label(kind, name, index), model.layers[name], 4)


@each("name", ["fc", "pool"])
@each("kind", ["forward", "backward"])
def test_with_peaks_only_a_pass_takes_its_operations_and_its_bytes(name, kind, model):
    found = seconds(AnalyticCosts(PLATFORM, peaks_only=True), model, kind, name)
    cost = model.layers[name].cost(4)._asdict()
    expected = 1 + cost[f"flops_{kind}"] / 1e8 + cost[f"bytes_{kind}"] / 25e6
    assert found == pytest.approx(expected)


def test_a_convolution_takes_the_operations_of_the_fastest_algorithm(model):
    costs = AnalyticCosts(PLATFORM, peaks_only=True)
    conv = model.layers["second"]  # 16 -> 16 channels, 8 x 8: 2 x 2 tiles of 4 x 4
    tiles, weights = 4 * 2 * 2, 16 * 16
    products = 2 * 36 * 16 * 16
    transforms = 2 * (156 + 90) * 16
    fast = tiles * (products + transforms) + 2 * 72 * weights
    slow = conv.geometry.flops(4)
    assert fast < slow
    moved = conv.cost(4).bytes_forward + 2 * 36 * weights * 4
    assert seconds(costs, model, "forward", "second") == pytest.approx(
        1 + min(fast / 1e8 + moved / 25e6, slow / 1e8 + conv.cost(4).bytes_forward / 25e6)
    )
    flops = [n for n, _ in work_of(conv.geometry, 4, 4)]
    assert flops[0] == slow
    assert fast in flops


@each(
    ("size", "kernel", "stride", "products"),
    [
        (14, (3, 3), 1, 22 * 22),  # 4 + 4 + 3 + 3 outputs
        (7, (3, 3), 1, 11 * 11),
        (32, (3, 3), 2, 36 * 36),  # 9 products for 4 outputs, 8 for 3
        (28, (3, 3), 2, 34 * 34),
        (10, (1, 7), 1, 10 * 30),  # two tiles of 15 products for 5 outputs each
        (10, (7, 1), 1, 10 * 30),
        (10, (1, 5), 1, 10 * (11 + 10 + 10)),
        (10, (3, 1), 1, 10 * (6 + 5 + 5)),
        (10, (5, 5), 1, 31 * 31),
    ],
)
def test_fast_algorithms_have_fewer_products_and_fewer_still_at_the_ends_of_maps(
    size, kernel, stride, products
):
    padding = tuple((taps // 2, taps // 2) for taps in kernel)
    where = ConvGeometry((size, size), kernel, (stride, stride), padding, (1, 1), 1000, 1000)
    flops = [n for n, _ in work_of(where, 100, 4)]
    # transforms are few beside products of a thousand channels
    assert flops[1] == pytest.approx(100 * 2 * products * 1000 * 1000, rel=0.05)


def test_achieved_rates_replace_peaks_where_they_are_known(model):
    costs = AnalyticCosts(PLATFORM)
    conv, pool = model.layers["second"].cost(4), model.layers["pool"].cost(4)
    assert seconds(costs, model, "forward", "second") == 1 + conv.flops_forward / 4e8
    peaks = AnalyticCosts(PLATFORM, peaks_only=True)
    backward = seconds(costs, model, "backward", "second")
    assert backward == seconds(peaks, model, "backward", "second")
    assert seconds(costs, model, "forward", "pool") == pytest.approx(
        1 + pool.flops_forward / 1e8 + pool.bytes_forward / 5e7
    )


def test_on_an_accelerator_what_is_fused_with_a_convolution_passes_its_memory():
    device = Accelerator(platform := Platform.load("dgx-a100"), "float32")

    def layer(fuse: bool) -> Layer:
        net = Sequential(Conv2d(64, 1, bias=False, name="c"), BatchNorm(), ReLU(), Conv2d(8, 1))
        return Model(net, (32, 32, 64), backend="numpy", fuse=fuse).layers["c"]

    fused, plain = layer(True), layer(False)
    more = device.layer(fused, 64, True) - device.layer(plain, 64, True)
    moved = fused.cost(64).bytes_backward - plain.cost(64).bytes_backward
    assert moved > 0
    assert more == pytest.approx(moved / platform.compute.kernels.memory / platform.rank_bandwidth)


def test_another_dtype_has_the_same_share_of_its_peak(model):
    costs = AnalyticCosts(PLATFORM, "float64")
    flops = model.layers["second"].cost(4).flops_forward
    assert seconds(costs, model, "forward", "second") == 1 + flops / 2e8
    with pytest.raises(ValueError, match="expected a peak for bfloat16"):
        AnalyticCosts(PLATFORM, "bfloat16")


def test_only_the_first_segment_and_the_step_take_time(model):
    costs = AnalyticCosts(PLATFORM)
    assert seconds(costs, model, "forward", "second", 1) == 0
    assert costs.seconds(Label("phase", "step"), None, 4) == 2.0
    assert costs.seconds(Label("phase", "loss"), None, 4) == 0


def test_one_update_of_a_step_is_that_of_all_layers_after_the_last_message(model):
    costs, update = AnalyticCosts(PLATFORM, slots=2), Label("phase", "update")
    for _ in range(2):  # micro-batches
        for name in ("second", "fc"):
            seconds(costs, model, "backward", name)
    numbers = sum(p.size for n in ("second", "fc") for p in model.layers[n].parameters)
    assert run_threads(1, lambda comm: costs.seconds(update, None, 4)) == [0]  # another rank
    whole, step = pytest.approx(7 * 4 * numbers / 25e6), Label("phase", "step")
    first = [costs.seconds(update, None, 4) for _ in range(2)]
    costs.seconds(step, None, 4)
    then = [costs.seconds(update, None, 4) for _ in range(2)]  # without asking for layers again
    assert (first, then) == ([whole, 0], [0, whole])


def test_layers_are_classified_by_their_kernels():
    net = Sequential(
        *(Conv2d(16, 3, name="image"), BatchNorm(), ReLU()),
        *(Conv2d(64, 3, name="fused"), BatchNorm(), ReLU()),
        *(Conv2d(64, 1, name="point"), MaxPool2d(2, name="pool")),
        *(Conv2d(64, 3, stride=2, name="strided"), MaxPool2d(1, name="pool2")),
        *(Conv2d(64, 3, groups=64, name="depthwise"), Flatten(), Linear(64, name="fc")),
    )
    model = Model(net, (32, 32, 3), backend="cpu")
    found = {node.name: classify(node.layer) for node in model.graph.nodes}
    assert {name: found[name] for name in ("image", "fused", "point", "strided", "depthwise")} == {
        "image": KernelClass("conv of images", 7),
        "fused": KernelClass("conv 3x3 fused", 32),
        "point": KernelClass("conv 1x1 fused", 64),
        "strided": KernelClass("conv other", 64),
        "depthwise": KernelClass("conv depthwise", 64),
    }
    assert found["fc"].name == "linear"
    assert found["pool"] == KernelClass("pool")
    model = Model(MultiHeadAttention(2, name="a"), (50, 64), backend="numpy")
    assert classify(model.layers["a.attention"]) == KernelClass("linear", 40)  # 50 x 32
    net = MultiHeadAttention(2, name="a", window=4, causal=True)
    model = Model(net, (50, 64), backend="numpy")
    assert classify(model.layers["a.attention"]) == KernelClass("linear", 11)  # 4 x 32
    model = Model(MultiHeadCrossAttention(2, name="a"), [(5, 64), (50, 8)], backend="numpy")
    assert classify(model.layers["a.attention"]) == KernelClass("linear", 40)


def test_rates_are_interpolated_on_logarithmic_scales():
    rates = Rates({"conv 3x3, 16, forward": 1e9, "conv 3x3, 64, forward": 4e9})
    assert rates.of(KernelClass("conv 3x3", 32), "forward") == pytest.approx(2e9)
    assert rates.of(KernelClass("conv 3x3", 8), "forward") == pytest.approx(1e9)
    assert rates.of(KernelClass("conv 3x3", 512), "forward") == pytest.approx(4e9)
    assert rates.of(KernelClass("conv 3x3", 32), "backward") is None


def test_layers_of_volumes_are_in_the_classes_of_their_planes():
    net = Sequential(Conv3d(16, 3, name="first"), Conv3d(16, 2, name="second"), MaxPool3d(2))
    model = Model(net, (8, 8, 8, 4), backend="numpy")
    first, second, pool = (classify(layer) for layer in model.layers)
    assert first == KernelClass("conv 3x3", 14)  # 3 depths of 4 channels to 16 filters
    assert second == KernelClass("conv other", 23)
    assert pool == KernelClass("pool")


def test_rates_are_those_of_ranks_with_the_threads_of_the_platform():
    work = Workload("mlp", (4, 4, 1), batch=8, threads=2)
    AnalyticCosts.of(replace(work, threads=1), PLATFORM)
    with pytest.raises(ValueError, match="expected ranks of 1 threads"):
        AnalyticCosts.of(work, PLATFORM)
