"""Random calls of all kernels with NaN, infinities, -0.0 and subnormal numbers."""

from __future__ import annotations

import pytest

from pydtnn.kernels import Backend, create_backend
from pydtnn.kernels.cpu import available
from tests.fuzz.special_values import DRAWN, DTYPES, Draw, check_convolution, compare
from tests.random_cases import Case

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

BACKENDS = [create_backend("cpu", threads=n, isa=isa) for isa in available() for n in (1, 2)]


def some_backend(case: Case) -> Backend:
    return BACKENDS[int(case.rng.integers(len(BACKENDS)))]


@pytest.mark.fuzz("kernels")
def test_kernels_are_nan_where_the_reference_is(cases):
    for case in cases:
        backend = some_backend(case)
        draw = Draw(case.rng, DTYPES[case.number % 3])
        case.compare(compare, DRAWN[case.number // 3 % len(DRAWN)](draw), backend)


@pytest.mark.fuzz("kernels")
def test_convolutions_are_nan_where_an_operand_is(cases):
    for case in cases:
        draw = Draw(case.rng, DTYPES[case.number % 3])
        case.compare(check_convolution, draw, some_backend(case))
