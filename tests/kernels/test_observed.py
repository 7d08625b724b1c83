"""Kernels as activities."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn.kernels import create_backend
from pydtnn.kernels.observed import observed_kernels
from pydtnn.utils.observer import Kind, Observer


class Log(Observer):
    def __init__(self) -> None:
        self.told: list[str] = []

    def begin(self, kind: Kind, name: str, *, nbytes: int = 0, bucket: int = -1) -> None:
        assert kind is Kind.KERNEL
        self.told.append(name)

    def end(self) -> None:
        self.told.append("end")


@pytest.mark.parametrize("name", ["cpu", "numpy"])
def test_calls_of_kernels_are_activities_within_the_context(name):
    backend, log = create_backend(name), Log()
    a, b = np.ones((2, 3), "f4"), np.full((2, 3), 2.0, "f4")
    out = np.empty_like(a)
    before = [set(vars(family)) for family in (backend.elementwise, backend.linear)]
    with observed_kernels(backend, log):
        backend.elementwise.add(a, b, out=out)
        with pytest.raises(Exception):  # noqa: B017, PT011  each backend has its own
            backend.linear.forward(a, b, None, out=None)  # type: ignore[arg-type]
    backend.elementwise.add(a, b, out=out)
    assert out.tolist() == [[3.0] * 3] * 2
    assert log.told == ["elementwise.add", "end", "linear.forward", "end"]
    assert [set(vars(family)) for family in (backend.elementwise, backend.linear)] == before
