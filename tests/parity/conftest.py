"""Parity with PyTorch in float64; skipped where it is not installed (`make parity` installs it)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    """Let PyTorch work in float64: NAdam keeps its momentum products in the default dtype."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
