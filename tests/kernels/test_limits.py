"""Limits of the machine that kernels can reach."""

from pydtnn.kernels import create_backend, limits
from pydtnn.kernels.limits import measure_limits


def test_limits_are_operations_and_bytes_over_time(monkeypatch):
    """The clock advances by a second per reading, so the rates are those of one second."""
    readings = iter(range(100))
    monkeypatch.setattr(limits.time, "perf_counter", lambda: next(readings))
    monkeypatch.setattr(limits, "SIDE", 8)
    monkeypatch.setattr(limits, "COPIED", 1 << 12)
    found = measure_limits(create_backend("cpu", threads=1))
    assert found == {"flops_per_second": 2 * 8**3, "bytes_per_second": 2 * (1 << 12)}
    assert measure_limits(create_backend("numpy")) == {}
