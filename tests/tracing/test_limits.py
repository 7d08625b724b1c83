import numpy as np

from pydtnn.tracing import limits
from pydtnn.tracing.limits import measure_limits


def test_limits_are_operations_and_bytes_over_time(monkeypatch):
    """The clock advances by a second per reading, so the rates are those of one second."""
    readings = iter(range(100))
    monkeypatch.setattr(limits.time, "perf_counter", lambda: next(readings))
    monkeypatch.setattr(limits, "SIZE", 8)
    monkeypatch.setattr(limits, "LENGTH", 1 << 12)
    found = measure_limits(2)
    assert found == {"flops_per_second": 2 * 8**3 * 2, "bytes_per_second": 2 * (1 << 12)}


def test_every_thread_works(monkeypatch):
    parts = []
    monkeypatch.setattr(limits, "SIZE", 8)
    monkeypatch.setattr(limits, "LENGTH", 1 << 12)
    monkeypatch.setattr(np, "copyto", lambda target, source: parts.append(len(target)))
    measure_limits(4)
    assert parts == [1 << 10] * 4 * (limits.REPEATS + 1)
