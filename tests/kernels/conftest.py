"""Fixtures of the tests of kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def once() -> Callable[..., Any]:
    """`once(function, ...)` calls it once in a module, for each of its arguments.

    For what the reference makes of a case: it does not depend on instruction set and algorithm, and
    takes longer than all of them.
    """
    return functools.cache(lambda function, *arguments: function(*arguments))
