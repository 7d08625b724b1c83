"""Arrays with NaN around them: what a kernel reads or writes beyond its operands shows."""

from __future__ import annotations

import numpy as np

MARGIN = 128
"""Elements before and behind, more than any kernel's vector or tile is long."""


def guarded(value: np.ndarray) -> np.ndarray:
    """Return a copy of `value` with NaN before and behind it in memory."""
    buffer = np.full(value.size + 2 * MARGIN, np.nan, value.dtype)
    inside = buffer[MARGIN : MARGIN + value.size].reshape(value.shape)
    inside[...] = value
    return inside


def assert_guards_hold(inside: np.ndarray) -> None:
    """Assert that what lies around an array made by `guarded` is untouched."""
    buffer = inside.base
    assert buffer is not None
    assert np.isnan(buffer[:MARGIN]).all()
    assert np.isnan(buffer[len(buffer) - MARGIN :]).all()


def assert_close(value: np.ndarray, expected: np.ndarray, tolerance: float, what: str = "") -> None:
    """Assert equality in norm, relative to the norm of what is expected."""
    error, norm = np.linalg.norm(value - expected), np.linalg.norm(expected)
    assert error <= tolerance * norm, f"{what} error {error:.1e}, norm {norm:.1e}"
