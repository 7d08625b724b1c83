"""Kernels as activities, and the limits of the machine."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn.kernels import create_backend
from pydtnn.tools.tracing import kernels
from pydtnn.tools.tracing.kernels import measure_limits, observed_kernels
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


def test_limits_are_operations_and_bytes_over_time(monkeypatch):
    """The clock advances by a second per reading, so the rates are those of one second."""
    readings = iter(range(100))
    monkeypatch.setattr(kernels.time, "perf_counter", lambda: next(readings))
    monkeypatch.setattr(kernels, "SIDE", 8)
    monkeypatch.setattr(kernels, "COPIED", 1 << 12)
    found = measure_limits(create_backend("cpu", threads=1))
    assert found == {"flops_per_second": 2 * 8**3, "bytes_per_second": 2 * (1 << 12)}
    assert measure_limits(create_backend("numpy")) == {}
