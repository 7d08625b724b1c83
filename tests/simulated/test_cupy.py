"""The simulated CuPy: as strict as the real one, and no more forgiving than a GPU."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.each import each
from tests.simulated import SimulatedCupy


@pytest.fixture(params=["lazy", "eager"])
def xp(request: pytest.FixtureRequest) -> SimulatedCupy:
    return SimulatedCupy(eager=request.param == "eager")


# -- names -----------------------------------------------------------------------------------------


def test_mistakes_raise_at_once(xp):
    x, integers = xp.ones((3, 4)), xp.zeros(4, "int64")
    with pytest.raises(ValueError, match="broadcast"):
        x[1:] = xp.ones(5)
    with pytest.raises(TypeError, match="cannot be cast"):
        integers += xp.ones(4)
    with pytest.raises(ValueError, match="broadcast"):
        xp.add(x, x, out=xp.ones(4))
    with pytest.raises(AttributeError, match="has no errstate"):
        xp.errstate()
    with pytest.raises(TypeError):
        np.add.reduce(x)


# -- strictness ------------------------------------------------------------------------------------

MIXED: dict[str, Callable[[Any, Any], Any]] = {
    "operator": lambda x, host: x + host,
    "reflected operator": lambda x, host: host + x,
    "in place": lambda x, host: operator.iadd(x, host),
    "into the host's": lambda x, host: operator.iadd(host, x),
    "ufunc": lambda x, host: np.maximum(x, host),
    "function": lambda x, host: np.concatenate([x, host]),
    "assignment": lambda x, host: operator.setitem(x, slice(1), host[:1]),
    "host assignment": lambda x, host: operator.setitem(host, slice(3), x),
    "conversion": lambda x, host: np.asarray(x),
    "of another device": lambda x, host: x + SimulatedCupy().ones(3),
}


@each("case", MIXED)
def test_arrays_of_the_host_and_the_device_do_not_mix(xp, case):
    with pytest.raises(TypeError, match="Unsupported type|not allowed|another device"):
        MIXED[case](xp.ones(3), np.ones(3))


# -- streams ---------------------------------------------------------------------------------------


@each("ordered", [True, False])
def test_only_events_put_streams_in_order(ordered):
    found = set()
    for seed in range(20):
        xp = SimulatedCupy(seed=seed)
        x, outside, inside = xp.zeros(1), xp.current, xp.cuda.Stream()
        outside.synchronize()
        x += 1
        if ordered:
            inside.wait_event(outside.record())
        with inside:
            x *= 2
        xp.cuda.Device().synchronize()
        found.add(float(x[0]))
    assert found == ({2.0} if ordered else {1.0, 2.0})


def test_memory_that_is_let_go_is_overwritten_by_what_comes_next(xp):
    x = xp.ones(8)
    memory, pointer = x.memory, x.data.ptr
    xp.current.synchronize()
    del x
    assert xp.zeros(8).data.ptr == pointer
    y = xp.empty(8)
    assert np.isnan(y.get()).all()
    assert y.data.ptr == pointer
    assert np.isnan(memory).all()


def test_a_copy_under_way_does_not_keep_pinned_memory():
    xp = SimulatedCupy()
    x = xp.zeros(3)
    pinned = np.frombuffer(xp.cuda.alloc_pinned_memory(24), "float64")
    pinned[:] = 1
    x.set(pinned)
    del pinned
    assert np.isnan(x.get()).all()


# -- graphs ----------------------------------------------------------------------------------------


def captured(xp: SimulatedCupy, work: Callable[[], Any]) -> tuple[Any, Any]:
    with xp.cuda.Stream() as stream:
        stream.begin_capture()
        result = work()
        return stream.end_capture(), result


def test_a_graph_writes_where_its_arrays_lay_whoever_has_the_memory_now(xp):
    x = xp.ones(3)
    pool = xp.cuda.MemoryPool()
    for apart in (False, True):
        with xp.cuda.Stream() as stream, xp.cuda.using_allocator(pool.malloc if apart else None):
            stream.begin_capture()
            y = (2 * x + 1) * x
            graph = stream.end_capture()
        with stream:
            mine = xp.zeros(3)
            graph.launch()
            assert (mine.get() == 0).all() == apart
            assert (y.get() == 3).all()


FORBIDDEN: dict[str, Callable[[Any], Any]] = {
    "float": lambda x: float(x[0]),
    "get": lambda x: x.get(),
    "mask": lambda x: x[x > 0],
    "upload": lambda x: x.xp.asarray(np.ones(3)),
    "upload of addresses": lambda x: x.xp.concatenate([x] * 9),
    "product": lambda x: x @ x,
    "question": lambda x: x.xp.current.record().done,
    "stream": lambda x: x.xp.current.synchronize(),
    "memory": lambda x: x.xp.get_default_memory_pool().free_all_blocks(),
    "work from outside": lambda x: x.xp.current.wait_event(OUTSIDE[-1]),
    "a stream that is left": lambda x: fork(x.xp),
}
OUTSIDE: list[Any] = []


def fork(xp: SimulatedCupy) -> None:
    other = xp.cuda.Stream()
    other.wait_event(xp.current.record())
    with other:
        xp.ones(3)


def test_a_capture_that_is_broken_refuses_everything_until_its_end(xp):
    with xp.cuda.Stream() as stream:
        x = xp.ones(3)
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="capturing"):
            x.get()
        for call in (lambda: x + 1, stream.record, stream.is_capturing):
            with pytest.raises(RuntimeError, match="previous error during capture"):
                call()
        with pytest.raises(RuntimeError, match="capturing"):
            stream.end_capture()
        assert not stream.is_capturing()
        assert ((x + 1).get() == 2).all()


@each("case", FORBIDDEN)
def test_a_capture_fails_where_the_host_would_wait(xp, case):
    x, y = xp.ones(3), xp.ones(700)
    OUTSIDE[:] = [xp.cuda.Stream().record()]
    del y  # a block to be freed
    with xp.cuda.Stream() as stream:
        stream.begin_capture()
        if "left" in case:
            FORBIDDEN[case](x)
        else:
            with pytest.raises(RuntimeError, match=r"capture|capturing|uncaptured"):
                FORBIDDEN[case](x)
        with pytest.raises(RuntimeError, match=r"capture|capturing|uncaptured|joined"):
            stream.end_capture()
    assert not stream.is_capturing()


def test_streams_that_join_a_capture_are_replayed_in_the_order_of_events():
    for seed in range(10):
        xp = SimulatedCupy(seed=seed)
        x, y, side = xp.ones(3), xp.zeros(3), xp.cuda.Stream()

        def work(xp: Any = xp, x: Any = x, y: Any = y, side: Any = side) -> None:
            x.__imul__(3)
            side.wait_event(xp.current.record())
            with side:
                y.__iadd__(x)
                joined = side.record()
            xp.current.wait_event(joined)
            x.__iadd__(1)

        graph, _ = captured(xp, work)
        assert not side.is_capturing()
        for _ in range(2):
            graph.launch()
        assert x.get().tolist() == [13] * 3
        assert y.get().tolist() == [15] * 3


# -- who does what ---------------------------------------------------------------------------------
