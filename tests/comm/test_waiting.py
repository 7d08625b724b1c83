"""Ranks that sleep while they wait."""

from unittest.mock import Mock

import pytest

from pydtnn.comm.waiting import VARIABLE, call_asleep, number_of_tests, sleep_until, sleeps
from tests.each import each


def test_the_environment_says_how_ranks_wait(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not sleeps()
    for mode in ("poll", "sleep"):
        monkeypatch.setenv(VARIABLE, mode)
        assert sleeps() == (mode == "sleep")
    monkeypatch.setenv(VARIABLE, "slep")
    with pytest.raises(ValueError, match="unknown PYDTNN_WAIT 'slep'; did you mean 'sleep'?"):
        sleeps()


@each("waited", [0.0, 1e-5, 1e-3, 0.1, 3.0])
def test_the_number_of_tests_in_a_wait_is_that_of_the_loop(waited, monkeypatch):
    each, now, count = 5e-5, 0.0, 0

    def advance(seconds):
        nonlocal now
        now += seconds + each

    def over():
        nonlocal count
        count += 1
        assert count < 100_000
        return now >= waited and count > 1

    monkeypatch.setattr("time.perf_counter", lambda: now)
    monkeypatch.setattr("time.sleep", advance)
    sleep_until(over)
    assert number_of_tests(waited, each) == pytest.approx(count - 2, abs=1)


def test_calls_have_a_form_that_does_not_block():
    library = Mock()
    library.Ibcast.__name__ = library.Ibarrier.__name__ = "call"
    library.Bcast.__name__, library.allgather.__name__ = "Bcast", "allgather"
    assert call_asleep(library, library.Bcast, ("x", 1)) is None
    assert call_asleep(library, library.allgather, (3,)) is library.allgather.return_value
    names = [name for name, _, _ in library.method_calls]
    assert names == ["Ibcast", "Ibarrier", "allgather"]
    assert not library.Bcast.called
