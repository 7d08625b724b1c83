"""The summary of a model."""

from __future__ import annotations

import re

import pytest

from pydtnn.layers import (
    Add,
    BatchNorm,
    Branches,
    Conv2d,
    Flatten,
    Identity,
    Linear,
    MaxPool2d,
    ReLU,
    Sequential,
)
from pydtnn.model import Model
from pydtnn.model.memory import forecast_memory
from pydtnn.model.summary import layer_costs
from pydtnn.models import resnet20


def small(*, fuse: bool = False) -> Model:
    net = Sequential(Conv2d(8, 3, name="conv"), ReLU(), MaxPool2d(2), Flatten(), Linear(10))
    return Model(net, (10, 10, 3), backend="numpy", fuse=fuse)


def test_there_is_a_line_for_each_layer_with_its_numbers():
    lines = small().summary(4).splitlines()
    assert lines[0].split() == ["layer", "type", "output", "parameters", "flop", "kept"]
    conv = next(line for line in lines if line.startswith("conv"))
    # 8 filters of 27 and a bias; 64 positions, 2 operations each; the batch is 4 x 300 numbers
    assert conv.split() == [
        "conv", "Conv2d", "8", "x", "8", "x", "8", "224", "27.6", "K", "4.69", "KiB",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[2:7]] == [
        "conv", "relu1", "maxpool2d2", "flatten3", "linear4",
    ]  # fmt: skip


def test_the_totals_are_those_of_the_model():
    net, shape = resnet20(10, (32, 32, 3)), (32, 32, 3)
    text = Model(net, shape, backend="numpy", fuse=False).summary(64, slots=2)
    assert "272,474 in 65 arrays" in text
    # 41 M multiplications and additions are the 40.8 M of He et al.'s network plus projections;
    # norms, ReLUs, additions and the pool are 0.8 M
    assert "82.9 Mflop forward, 164 Mflop backward" in text
    assert "batch of 64  95.8 MiB kept for backward" in text
    # 272,474 numbers of 4 B, some of 65 arrays padded to lines of 64 B
    assert "1.04 MiB parameters, 1.04 MiB gradients, 2.08 MiB the optimizer's slots" in text


def test_layers_that_are_fused_share_a_line_and_the_work_is_the_same():
    def net() -> Sequential:
        norm = Sequential(Conv2d(4, 3, padding=1), BatchNorm())
        return Sequential(
            Conv2d(4, 3), ReLU(), Branches(norm, Identity(), merge=Add()), ReLU(), Conv2d(2, 1)
        )

    fused, plain = (
        Model(net(), (8, 8, 3), backend="numpy", fuse=fuse).summary() for fuse in (True, False)
    )
    assert "Conv2d" in fused
    assert "BatchNorm + Add + ReLU" in fused
    assert len(fused.splitlines()) < len(plain.splitlines())
    assert [line for line in fused.splitlines() if "one sample" in line] == [
        line for line in plain.splitlines() if "one sample" in line
    ]


def test_a_backend_with_a_memory_pool_gets_its_peak_in_the_units_of_the_other_lines():
    net = Sequential(Conv2d(8, 3, padding=1), ReLU(), Flatten(), Linear(4))
    model = Model(net, (32, 32, 3), backend="cpu", fuse=False)
    # ReLU's output, which is the convolution's too, and its gradient
    peak = 2 * (16 * 8 * 32 * 32) * 4 + 2 * model.buffers[0].values.nbytes
    assert forecast_memory(model, 16).pool == peak
    text = model.summary(16)
    assert f"memory pool  {peak / 2**20:.2f} MiB at the peak of a step" in text
    assert not re.search(r"\d,\d+ B\b", text)
    assert "memory pool" not in small().summary()


def test_an_empty_batch_has_no_summary():
    with pytest.raises(ValueError, match="summary: batch must be at least 1, got 0"):
        small().summary(0)


def test_the_work_of_every_layer_is_that_of_the_samples():
    model = Model(Sequential(Linear(4, name="fc"), ReLU(name="relu")), (3,), backend="numpy")
    costs, fc = layer_costs(model, 10), model.layers["fc"].cost(10)
    assert list(costs) == ["fc", "relu"]
    assert [*costs["fc"].values()] == ["Linear", 16, *fc]
    assert [*costs["fc"]][2:] == [f"{way}_{what}" for what in ("flops", "bytes") for way in WAYS]
    assert costs["relu"]["parameters"] == 0


WAYS = ("forward", "backward")
