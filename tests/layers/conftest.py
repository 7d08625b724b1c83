"""Layers are tested on every instruction set that this machine has, not only on the best."""

from __future__ import annotations

import pytest

from pydtnn.kernels import Backend, create_backend
from tests.conftest import CUDA, cpu_cases, cuda_backend


@pytest.fixture(params=["numpy", CUDA, *cpu_cases()])
def backend(request: pytest.FixtureRequest) -> Backend:
    """The reference, a GPU, then the cpu backend with each instruction set."""
    if request.param == "numpy":
        return create_backend("numpy")
    if request.param == "cuda":
        return cuda_backend()
    return create_backend("cpu", threads=1, isa=request.param)
