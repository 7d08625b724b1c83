"""Random networks compute the same in every way there is to compute them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import Backend, create_backend
from pydtnn.model import Model
from pydtnn.model.recompute import beginning
from pydtnn.model.replay import Replays
from tests.conftest import instruction_sets
from tests.parallel.trajectories import Data, Expected, observe, randomize, together
from tests.random_cases import Case
from tests.random_networks import NUMPY, Network, for_each_network

CPU = create_backend("cpu", threads=1)


def model_of(network: Network, backend: Backend, **options: Any) -> Model:
    model = network.model(backend, **options)
    randomize(model, network)
    return model


@pytest.mark.fuzz("networks")
def test_a_fused_network_does_what_the_plain_one_does(cases):
    def check(case: Case, network: Network) -> None:
        expected = Expected.of(network, micro=2)
        given = observe(model_of(network, NUMPY), network, micro=2)
        case.compare(expected.assert_alike, given)

    for_each_network(cases, check, shared=True)


@pytest.mark.fuzz("networks")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_compiled_kernels_do_what_the_reference_does(cases, dtype):
    backends = [
        [create_backend("cpu", isa=isa, threads=threads) for threads in (1, 2)]
        for isa in instruction_sets()
    ]

    def check(case: Case, network: Network) -> None:
        expected, pair = Expected.of(network, dtype=dtype), backends[case.number % len(backends)]
        one, two = (observe(model_of(network, cpu, dtype=dtype), network) for cpu in pair)
        case.compare(np.testing.assert_equal, two, one)  # bytes of 1 thread and of 2
        case.compare(expected.assert_alike, one)

    for_each_network(cases, check, largest=9, shared=True)


@pytest.mark.fuzz("networks")
def test_shards_that_are_normalised_together_are_one_batch(cases):
    ways = [(NUMPY, True), (CPU, True), (NUMPY, False)]

    def check(case: Case, network: Network) -> None:
        backend, fuse = ways[case.number % len(ways)]
        expected = Expected.of(network)
        given = together(model_of(network, backend, fuse=fuse), network, Data(network).cut)
        case.compare(expected.assert_alike, given)

    for_each_network(cases, check, least_batch=2, shared=True)


@pytest.mark.fuzz("networks")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_network_that_recomputes_has_the_same_bytes(cases, dtype):
    ways = [(NUMPY, True), (CPU, True), (CPU, False)]

    def check(case: Case, network: Network) -> None:
        backend, fuse = ways[case.number % len(ways)]
        keeping, recomputing = (model_of(network, backend, fuse=fuse, dtype=dtype) for _ in "12")
        rng = np.random.default_rng(network.seed)
        nodes = len(keeping.graph.nodes)
        first = beginning(keeping.graph.nodes, keeping.graph.trained)
        cuts = [first, *(i for i in range(first + 1, nodes) if rng.random() < 0.4)]
        recomputing.cut(cuts)
        run = partial(together, cut=Data(network).cut) if case.number % 2 else observe
        case.compare(np.testing.assert_equal, run(recomputing, network), run(keeping, network))

    for_each_network(cases, check, least_batch=2, shared=True)


@pytest.mark.fuzz("networks")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_passes_that_are_repeated_have_the_same_bytes(cases, dtype):
    def check(case: Case, network: Network) -> None:
        fuse = case.number % 2 == 1
        looping, repeating = (model_of(network, CPU, fuse=fuse, dtype=dtype) for _ in "12")
        replays = Replays(repeating)
        for step in range(4):
            given, expected = (passes(way, network, step, dtype) for way in (replays, looping))
            replays.end_step()
            case.compare(np.testing.assert_equal, given, expected)
            for own, other in zip(repeating.buckets, looping.buckets, strict=True):
                case.compare(np.testing.assert_equal, own.grads, other.grads)
        assert replays.repeated == 2 or replays.why_not

    for_each_network(cases, check)


def passes(way: Any, network: Network, step: int, dtype: str) -> tuple[Any, Any]:
    """Run a forward and a backward pass of a model or of `Replays`; return outputs and dxs."""
    data = Data(network)
    xs = tuple(x.astype(dtype) for x in data.inputs(step))
    context = data.context(0, True)
    ((ys, saved),) = way.forward_shards([xs], [context], communicate=None, joint=False)
    shapes = [y.shape[1:] for y in (ys if isinstance(ys, tuple) else (ys,))]
    dys = tuple(dy.astype(dtype) for dy in data.gradients(step, shapes))
    options = dict.fromkeys(("slots", "on_ready", "after_node"))
    return ys, way.backward_shards([dys], [saved], accumulate=False, shared=False, **options)
