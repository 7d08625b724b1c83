"""Tests that read scikit-learn's digits."""

from importlib.util import find_spec

import pytest

needs_digits = pytest.mark.skipif(
    find_spec("sklearn") is None, reason="scikit-learn is not installed: the extra `data`"
)
