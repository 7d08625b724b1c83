"""The fixture `ahead`: what a function returned that was called before the test, beside others.

    def ended(rank):                                   # takes parameters of the test by name
        return mpiexec(2, ["-c", f"raise SystemExit({rank})"])

    @pytest.mark.ahead(call=ended)
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_program_ends(ahead, rank):
        assert ahead.returncode == rank

For programs that start, wait and end while cores are idle. The first such test of a module has the
functions of all of them called, a few at a time. What a function raises, a skip too, its test
raises. A function with the parameter `folder` is given one of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests import launch

AT_ONCE = 3
"""Of two ranks each, of which many wait: about what keeps two cores busy."""


def mpiexec(ranks: int, arguments: list[str], **options: Any) -> launch.Finished:
    """Run Python on so many ranks (`launch.run`), or skip the test."""
    if launch.why_not():
        pytest.skip(launch.why_not())
    return launch.run(ranks, arguments, **options)


@pytest.fixture(scope="module")
def _started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Any]]]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {
            item.nodeid: pool.submit(
                marker.kwargs["call"], **_arguments(item, marker, tmp_path_factory)
            )
            for item in request.session.items
            if item.path == request.path and (marker := item.get_closest_marker("ahead"))
        }
        pool.shutdown(cancel_futures=True)


def _arguments(
    item: Any, marker: pytest.Mark, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The parameters of the test that the function takes, and its folder."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    names = inspect.signature(marker.kwargs["call"]).parameters
    arguments = {name: given[name] for name in names if name in given}
    return arguments | ({"folder": tmp_path_factory.mktemp("ahead")} if "folder" in names else {})


@pytest.fixture
def ahead(
    request: pytest.FixtureRequest,
    _started: dict[str, Future[Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    """What the function of the marker `ahead` has returned; it is called again for a repetition."""
    if getattr(request.node, "execution_count", 1) > 1:  # of pytest-rerunfailures
        marker = request.node.get_closest_marker("ahead")
        return marker.kwargs["call"](**_arguments(request.node, marker, tmp_path_factory))
    return _started[request.node.nodeid].result()
