"""Parity with PyTorch in float64; skipped where it is not installed (`make parity` installs it)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

try:
    import torch
except ImportError:
    collect_ignore_glob = ["*"]


def pytest_report_header() -> list[str]:
    """Say why there are no tests, if these alone are run."""
    return ["PyTorch is not installed; `make parity` installs it"] * ("torch" not in globals())


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    """Let PyTorch work in float64: NAdam keeps its momentum products in the default dtype."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
