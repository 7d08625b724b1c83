"""Whole trainings on the simulated device give the numbers of the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn.callbacks import Callback
from pydtnn.kernels.cuda.fused import CudaFused
from pydtnn.kernels.cuda.module import CudaKernels
from pydtnn.kernels.cuda.norm import CudaNorm
from pydtnn.optimizers import OPTIMIZERS, SGD, get_optimizer
from tests.each import each
from tests.simulated import simulated_backend, why_not
from tests.simulated.small import (
    NETWORKS,
    assert_agree,
    convolutional,
    group_normed,
    pooled,
    residual,
    results,
    trainer,
)

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")

GRAPH = "one CUDA graph"


def agrees(network: Callable[[], Any], *, eager: bool = True, **options: Any) -> str:
    """Train on the reference and on the device; say whether steps were replays of a graph."""
    rule = options.pop("rule", lambda: None)
    expected = results(trainer("numpy", network, rule(), **options))
    ours = trainer(simulated_backend(eager=eager), network, rule(), **options)
    assert_agree(results(ours), expected)
    return ours.steps.graph


@each("network", NETWORKS)
@each("options", [{}, {"fuse": False, "eager": False}, {"graph": False, "eager": False}])
def test_networks(network, options):
    graph = agrees(NETWORKS[network], **options)
    assert "not asked for" in graph if "graph" in options else graph == GRAPH


@each(
    ("network", "options"),
    [
        (convolutional, {"rule": lambda: SGD(0.1, clip_norm=0.5)}),
        (residual, {"accumulation": 2, "eager": False}),
        (pooled, {"accumulation": 2, "eager": False}),
    ],
)
def test_clipped_and_accumulated_gradients(network, options):
    assert agrees(network, **options) == GRAPH


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"accumulation": 2}], ids=["", "accumulated"])
def test_coefficients_of_batch_norm_come_from_the_kernels_that_sum(options, dtype, monkeypatch):
    """The same bytes as with kernels of their own, which are launched no more."""

    def train() -> tuple[dict[str, bytes], int]:
        launched.clear()
        backend = simulated_backend(eager=True, tuning="fixed")
        ours = trainer(backend, residual, dtype=dtype, graph=False, **options)
        state = {name: value.tobytes() for name, value in results(ours).items()}
        return state, sum("coefficients" in name for name in launched)

    launched: list[str] = []
    launch = CudaKernels.launch

    def noted(self: CudaKernels, name: str, *arguments: Any, **more: Any) -> None:
        launched.append(name)
        launch(self, name, *arguments, **more)

    monkeypatch.setattr(CudaKernels, "launch", noted)
    together, few = train()
    monkeypatch.delattr(CudaNorm, "statistics_coefficients")
    monkeypatch.delattr(CudaFused, "gate_norms")
    apart, many = train()
    assert together == apart
    # two convolutions of two sizes of batches might take sums of 16 bits in passing: the first
    # step of each finds out
    assert few == (4 if dtype == "bfloat16" else 0)
    assert many > 100


@each("name", sorted(OPTIMIZERS))
def test_optimizers(name):
    # bases of moments without full rank, and steps along them, depend on rounding
    options = {"soap": {"max_dimension": 3, "epsilon": 1e-3}}.get(name, {})
    graph = agrees(convolutional, rule=lambda: get_optimizer(name, lr=0.01, **options))
    kind = OPTIMIZERS[name]
    why_not = f"no CUDA graph: {kind.__name__} does not say that it is `capturable`"
    assert graph == (GRAPH if kind.capturable else why_not)


class Trim(Callback):
    """Returns what nobody seems to use to the driver, after every step."""

    def on_step_end(self, trainer: Any) -> None:
        trainer.model.backend.trim()


def test_a_graph_keeps_its_memory():
    expected = results(trainer("numpy", residual), epochs=6)
    ours = trainer(simulated_backend(), residual, callbacks=[Trim()])
    assert_agree(results(ours, epochs=6), expected)
    assert ours.steps.graph == GRAPH


# Of all parameters in norm, after two epochs; of 16 bits some roundings come one by one elsewhere.
BOUNDS = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 4e-2}


@each("dtype", BOUNDS)
@each("network", [residual, pooled, group_normed])
def test_types(network, dtype):
    ours = trainer(simulated_backend(), network, dtype=dtype)
    both = [results(one, epochs=2) for one in (trainer("numpy", network, dtype=dtype), ours)]
    learnt = [name for name in ours.model.state() if "running" not in name]
    expected, value = (np.concatenate([run[name].ravel() for name in learnt]) for run in both)
    assert np.linalg.norm(value - expected) <= BOUNDS[dtype] * np.linalg.norm(expected)
    assert ours.steps.graph == GRAPH


@each("dtype", ["float32", "bfloat16"])
def test_recomputation_in_a_captured_graph_gives_the_same_bytes(dtype):
    runs = []
    for recompute in (False, True):
        ours = trainer(simulated_backend(), residual, None, dtype=dtype)
        if recompute:
            ours.model.cut(range(1, len(ours.model.graph.nodes)))
        runs.append(results(ours))
        assert ours.steps.graph == GRAPH
    for name, array in runs[0].items():
        np.testing.assert_array_equal(runs[1][name], array)
