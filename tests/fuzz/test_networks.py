"""Random networks compute the same in every way there is to compute them."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest

from pydtnn.kernels import Backend, create_backend
from pydtnn.model import Model
from tests.conftest import instruction_sets
from tests.random_cases import Case, Cases
from tests.random_networks import Network, for_each_network
from tests.trajectories import Bounded, Data, assert_alike, observe, randomize, together

NUMPY = create_backend("numpy")


def model_of(network: Network, backend: Backend, **options: Any) -> Model:
    model = network.model(backend, **options)
    randomize(model, network)
    return model


@pytest.mark.fuzz("networks")
def test_a_fused_network_does_what_the_plain_one_does(cases: Cases) -> None:
    def check(case: Case, network: Network) -> None:
        bounded = Bounded.of(network, micro=2)
        hypothesis.assume(bounded)
        given = observe(model_of(network, NUMPY), network, micro=2)
        case.compare(assert_alike, given, bounded)

    for_each_network(cases, check)


@pytest.mark.fuzz("networks")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_compiled_kernels_do_what_the_reference_does(cases: Cases, dtype: str) -> None:
    backends = [
        create_backend("cpu", isa=isa, threads=threads)
        for isa in instruction_sets()
        for threads in (1, 2)
    ]

    def check(case: Case, network: Network) -> None:
        bounded = Bounded.of(network, dtype=dtype)
        hypothesis.assume(bounded)
        for one, two in zip(backends[::2], backends[1::2], strict=True):
            first = observe(model_of(network, one, dtype=dtype), network)
            case.compare(assert_alike, first, bounded)
            second = observe(model_of(network, two, dtype=dtype), network)
            case.compare(np.testing.assert_equal, second, first)  # bytes of 1 thread and of 2

    for_each_network(cases, check, largest=9)


@pytest.mark.fuzz("networks")
def test_shards_that_are_normalised_together_are_one_batch(cases: Cases) -> None:
    def check(case: Case, network: Network) -> None:
        bounded = Bounded.of(network)
        hypothesis.assume(bounded)
        cut = Data(network).cut
        for backend in (NUMPY, CPU):
            given = together(model_of(network, backend), network, cut)
            case.compare(assert_alike, given, bounded)
        plain = together(model_of(network, NUMPY, fuse=False), network, cut)
        case.compare(assert_alike, plain, bounded)

    for_each_network(cases, check, least_batch=2)


CPU = create_backend("cpu", threads=1)
