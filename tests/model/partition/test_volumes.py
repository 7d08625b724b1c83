"""Counted messages and bytes of a step, compared with the formulas of docs/parallelism.md."""

from __future__ import annotations

from typing import Any

import numpy as np

from pydtnn.comm import Communicator, run_threads
from pydtnn.layers import (
    BatchNorm,
    Conv2d,
    GlobalAvgPool2d,
    Linear,
    MaxPool2d,
    ReLU,
    Sequential,
    StepContext,
)
from pydtnn.model import Model
from pydtnn.model.memory import forecast_memory
from pydtnn.parallel.mesh import Mesh
from pydtnn.utils.units import quantity
from tests.each import each

N, H, W = 3, 8, 6
S = 4  # bytes per value
Sent = dict[str, tuple[int, int]]


def net() -> Sequential:
    return Sequential(
        Conv2d(8, 3, padding=1, name="a"),
        BatchNorm(name="an"),
        ReLU(),
        Conv2d(16, 3, padding=1, name="b"),
        ReLU(),
        Conv2d(8, 5, padding=2, name="c"),
        MaxPool2d(2, name="pool"),
        GlobalAvgPool2d(name="mean"),
        Linear(8, name="fc"),
    )


def count(ranks: int, axes: dict[str, int], plan: Any = None) -> list[Sent]:
    """Return what each rank sends in a step, by layer, counted and predicted."""
    x = np.random.default_rng(0).normal(size=(N, H, W, 3)).astype("float32")

    def rank(comm: Communicator) -> Sent:
        mesh = Mesh(comm, **axes)
        model = Model(net(), (H, W, 3), mesh=mesh, plan=plan, fuse=False)
        y, saved = model.forward(x, StepContext(training=True, samples=np.arange(N)))
        model.backward(np.ones_like(y), saved)
        sent = {name: (t.messages, t.bytes) for name, t in mesh.traffic.items()}
        assert forecast_memory(model, N).sent == sent
        return {name: volume for name, volume in sent.items() if volume[0]}

    return run_threads(ranks, rank)


def both(messages: int, nbytes: float) -> tuple[int, int]:
    """The same volume forward and backward."""
    return 2 * messages, round(2 * nbytes)


@each("p", [2, 4])
def test_filters_gather_each_output_and_reduce_its_gradient(p):
    def volume(values: int) -> tuple[int, int]:
        return both(p - 1, (p - 1) / p * N * values * S)

    for sent in count(p, {"filter": p}):
        assert sent == {
            "relu2/channels-partial": volume(H * W * 8),
            "relu4/channels-partial": volume(H * W * 16),
            "mean/channels-partial": volume(8),
            "fc/channels-whole": (p - 1, round((p - 1) / p * N * 8 * S)),  # dy is whole
        }


@each("p", [2, 4])
def test_channels_after_filters_exchange_nothing(p):
    def volume(values: int) -> tuple[int, int]:
        return both(p - 1, (p - 1) / p * N * values * S)

    for sent in count(p, {"alternate": p}):  # a by filters, b, c and fc by channels
        assert sent == {
            "b/partial-channels": volume(H * W * 16),
            "c/partial-channels": volume(H // 2 * W // 2 * 4 * 8),
            "fc/partial-whole": (1, round(2 * (p - 1) / p * N * 8 * S)),
        }


def test_stripes_send_halos_sums_and_means():
    p = 2
    for sent in count(p, {"spatial": p}):
        row = N * W * S  # of one channel; forward sends rows of x, backward rows of dy
        assert sent == {
            "a": both(1, row * 3),  # the gradient of the images is not needed
            "an": (2, round(2 * (p - 1) / p * 8 * ((1 + 2 * 8) + 2 * 8))),
            "b": (3, 1 * row * (8 + 8 + 16)),
            "c": (3, 2 * row * (16 + 16 + 8)),
            "mean/partial-whole": (1, round(2 * (p - 1) / p * N * 8 * S)),
        }


def test_a_change_from_rows_to_samples_sends_each_block_once():
    p = 3
    plan = {"[ab]": {"spatial": "m"}, "*": {"data": "m"}}
    results = count(p, {"m": p}, plan)
    stripes, blocks = (3, 3, 2), (1, 1, 1)  # rows and samples of each rank
    for r, sent in enumerate(results):
        moved = sent["relu4/rows-samples"]
        forward = (N - blocks[r]) * stripes[r] * W * 16 * S
        backward = blocks[r] * (H - stripes[r]) * W * 16 * S
        assert moved == (2 * (p - 1), forward + backward)


def test_the_summary_contains_layouts_parts_and_messages():
    def rank(comm: Communicator) -> list[str]:
        model = Model(net(), (H, W, 3), mesh=Mesh(comm, spatial=2), fuse=False)
        return model.summary(N).splitlines()

    for lines in run_threads(2, rank):
        row = next(line.split() for line in lines if line.startswith("b "))
        assert row[:2] == ["b", "Conv2d"]
        assert " ".join(row[2:7]) == "4 x 6 x 16"  # rows of this rank
        sent = quantity(N * W * S * (8 + 8 + 16), 1024, "B")
        assert " ".join(row).endswith(f"rows along spatial 3 {sent}")
        assert any(" messages of " in line for line in lines)
