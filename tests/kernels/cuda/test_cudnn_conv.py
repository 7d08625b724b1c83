"""Which algorithms of cuDNN are taken, with what arithmetic, where its answers are made up."""

from __future__ import annotations

from typing import Any

import pytest

from pydtnn.kernels import ConvGeometry
from pydtnn.kernels.cuda.cudnn import (
    CONVERSION_MATH,
    DEFAULT_MATH,
    DETERMINISTIC,
    DIRECTIONS,
    FMA_MATH,
    TENSOR_OP_MATH,
    CudnnError,
    Performance,
)
from pydtnn.kernels.cuda.cudnn_conv import WORKSPACE_BYTES, Algorithm, ConvPlan
from tests.each import each

GEOMETRY = ConvGeometry((8, 8), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 16, 32)


class Scripted:
    """A cuDNN that gives prepared answers.

    Parameters
    ----------
    expected : list of (algorithm, status, determinism, math)
        What it expects of algorithms, the fastest first.
    workspaces : dict of int to int or CudnnError
        Bytes by algorithm; otherwise 0.
    """

    def __init__(
        self, expected: list[tuple[int, int, int, int]], workspaces: dict[int, Any] | None = None
    ) -> None:
        self.expected, self.workspaces = expected, workspaces or {}
        self.math: list[int] = []
        self.call: dict[str, Any] = {"cudnnSetConvolutionMathType": self._set_math}
        for direction in DIRECTIONS.values():
            self.call[direction.expect] = self._expect
            self.call[direction.workspace] = self._workspace

    def tensor(self, batch: int, size: tuple[int, ...], channels: int, dtype: str) -> str:
        return f"tensor {batch} {size} {channels} {dtype}"

    def filters(self, geometry: ConvGeometry, dtype: str) -> str:
        return f"filters {dtype}"

    def convolution(self, geometry: ConvGeometry, dtype: str) -> str:
        return "convolution"

    def _set_math(self, convolution: str, math: int) -> None:
        self.math.append(math)

    def _expect(self, *arguments: Any) -> None:
        *_, most, count, found = arguments
        assert most >= len(self.expected)
        count._obj.value = len(self.expected)
        for i, (algorithm, status, determinism, math) in enumerate(self.expected):
            found[i] = Performance(algorithm, status, 0.1, 0, determinism, math)

    def _workspace(self, *arguments: Any) -> None:
        *_, algorithm, size = arguments
        answer = self.workspaces.get(algorithm, 0)
        if isinstance(answer, CudnnError):
            raise answer
        size._obj.value = answer


def plan(
    cudnn: Scripted, direction: str = "forward", dtype: str = "float32", **options: Any
) -> Any:
    made: Any = cudnn
    return ConvPlan(made, made, direction, GEOMETRY, 4, dtype, **{"tf32": True, **options})


def test_algorithms_are_in_the_order_of_cudnn_and_each_is_there_once():
    first, again = (7, 0, DETERMINISTIC, DEFAULT_MATH), (7, 0, DETERMINISTIC, FMA_MATH)
    cudnn = Scripted([first, (1, 0, DETERMINISTIC, TENSOR_OP_MATH), again], {7: 1000, 1: 64})
    assert list(plan(cudnn).algorithms.items()) == [
        ("separate winograd", Algorithm(7, DEFAULT_MATH, 1000)),
        ("precomputed gemm", Algorithm(1, TENSOR_OP_MATH, 64)),
    ]


@each(
    "direction, algorithm", [("backward_data", 0), ("backward_filter", 0), ("backward_filter", 3)]
)
def test_algorithms_that_add_atomically_are_never_taken_and_errors_not_hidden(direction, algorithm):
    told, not_told = (algorithm, 0, 0, DEFAULT_MATH), (algorithm, 0, DETERMINISTIC, DEFAULT_MATH)
    assert not plan(Scripted([told, not_told]), direction).algorithms
    usable = (1, 0, DETERMINISTIC, DEFAULT_MATH)
    assert not plan(Scripted([(1, 0, 0, DEFAULT_MATH)]), direction).algorithms
    with pytest.raises(CudnnError, match="broken"):
        plan(Scripted([usable], {1: CudnnError("f", 5000, "broken")}), direction)


def test_algorithms_that_fail_round_or_need_too_much_are_left_out():
    expected = [
        (0, 3000, DETERMINISTIC, DEFAULT_MATH),
        (1, 0, DETERMINISTIC, CONVERSION_MATH),
        (2, 0, DETERMINISTIC, DEFAULT_MATH),
        (4, 0, DETERMINISTIC, DEFAULT_MATH),
        (5, 0, DETERMINISTIC, DEFAULT_MATH),
    ]
    workspaces = {2: WORKSPACE_BYTES + 1, 4: CudnnError("f", 3004, ""), 5: WORKSPACE_BYTES}
    assert list(plan(Scripted(expected, workspaces)).algorithms) == ["tiled fft"]


@each(
    "dtype, tf32, asked",
    [
        ("float32", True, DEFAULT_MATH),
        ("float32", False, FMA_MATH),
        ("float16", False, TENSOR_OP_MATH),
        ("bfloat16", True, TENSOR_OP_MATH),
    ],
)
def test_float32_is_rounded_only_where_that_is_allowed(dtype, tf32, asked):
    cudnn = Scripted([(1, 0, DETERMINISTIC, DEFAULT_MATH)])
    taken = plan(cudnn, dtype=dtype, tf32=tf32).algorithms["precomputed gemm"].math
    assert cudnn.math[0] == asked
    assert taken == (FMA_MATH if asked == FMA_MATH else DEFAULT_MATH)
