"""The summary of a model."""

from __future__ import annotations

import pytest

from pydtnn.layers import Conv2d, Flatten, Linear, MaxPool2d, ReLU, Sequential
from pydtnn.model import Model
from pydtnn.models import resnet20


def small() -> Model:
    net = Sequential(Conv2d(8, 3, name="conv"), ReLU(), MaxPool2d(2), Flatten(), Linear(10))
    return Model(net, (10, 10, 3), backend="numpy")


def test_there_is_a_line_for_each_layer_with_its_numbers() -> None:
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


def test_columns_are_aligned() -> None:
    table = small().summary().splitlines()[2:7]
    assert len({line.index(kind) for line, kind in zip(table, KINDS, strict=True)}) == 1
    assert len({len(line) for line in table}) == 1


KINDS = ("Conv2d", "ReLU", "MaxPool2d", "Flatten", "Linear")


def test_the_totals_are_those_of_the_model() -> None:
    text = Model(resnet20(10, (32, 32, 3)), (32, 32, 3), backend="numpy").summary(64)
    assert "272,474 in 65 arrays" in text
    # 41 M multiplications and additions are the 40.8 M of He et al.'s network plus projections
    assert "82.1 Mflop forward, 163 Mflop backward" in text
    assert "batch of 64  95.8 MiB kept for backward" in text
    assert "the optimizer's slots" in text


def test_memory_grows_with_the_batch_and_the_rest_does_not() -> None:
    one, two = (small().summary(batch).splitlines() for batch in (1, 2))
    assert one[-4:-2] != two[-4:-2]
    assert [line for line in one if "parameters" in line] == [
        line for line in two if "parameters" in line
    ]


def test_an_empty_batch_has_no_summary() -> None:
    with pytest.raises(ValueError, match="summary: batch must be at least 1, not 0"):
        small().summary(0)
