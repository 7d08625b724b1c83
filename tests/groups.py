"""The fixture `comm`: one test, run by all ranks of a group of threads or of MPI processes.

    @pytest.mark.threads(2, 3)          # on 2 and on 3 threads
    @pytest.mark.threads(2, run=virtual)   # on 2 ranks, by virtual(2, rank) instead of run_threads
    @pytest.mark.mpi                    # on 1, 2, 3 and 4 MPI ranks; mpi(2, 4): on these.
                                        # If on 2, then on 3 by `make test-all` only, as on 4
    @pytest.mark.mpi(through=staged)    # each rank calls staged(comm) and tests what it returns
    @pytest.mark.mpi(checked=False)     # calls are not compared over the ranks (`Checked`)
    def test_every_rank_counts(comm): ...

The body of such a test is what one rank does, and it fails where any rank fails. Fixtures other
than `comm` are made once for all threads, and once per MPI process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from pydtnn.comm import Communicator, run_threads
from tests import launch

if TYPE_CHECKING:
    from tests.mpi_harness import World

RANKS = (1, 2, 3, 4)
"""The worlds that a plain `pytest` starts."""


@dataclass(frozen=True)
class Group:
    """The ranks on which a test runs."""

    kind: str
    ranks: int
    through: Callable[[Communicator], Communicator] = field(default=lambda comm: comm)
    checked: bool = True
    run: Callable[[int, Callable[[Communicator], None]], object] = run_threads

    def __str__(self) -> str:
        return f"{self.kind}{self.ranks}"


def mpi_ranks(item: pytest.Item) -> int | None:
    """The number of MPI ranks that a collected test wants, None where it wants none."""
    callspec = getattr(item, "callspec", None)
    group = callspec.params.get("comm") if callspec else None
    return group.ranks if isinstance(group, Group) and group.kind == "mpi" else None


class Groups:
    """The plugin: gives tests their groups, and runs those of threads."""

    def __init__(self, world: World | None) -> None:
        self.world = world

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        threads = metafunc.definition.get_closest_marker("threads")
        mpi = metafunc.definition.get_closest_marker("mpi")
        if threads is None and mpi is None:
            return
        if "comm" not in metafunc.fixturenames:
            raise pytest.UsageError(
                f"{metafunc.definition.nodeid}: a test on several ranks needs the fixture comm."
            )
        groups = [
            pytest.param(Group("threads", n, **threads.kwargs))
            for n in (threads.args if threads else ())
        ]
        if mpi is not None:
            wanted = mpi.args or (RANKS if self.world is None else (self.world.size,))
            present = wanted if self.world is None else {self.world.size} & set(wanted)
            reason = launch.why_not()
            marks = [pytest.mark.skip(reason=reason)] if reason else []
            groups += [
                pytest.param(
                    Group("mpi", n, **mpi.kwargs),
                    marks=[*marks, *[pytest.mark.long] * (n == 4 or (n == 3 and 2 in wanted))],
                )
                for n in present
            ]
        metafunc.parametrize("comm", groups, indirect=True, ids=lambda group: str(group))

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Run a test on threads, by a call on each of them."""
        group = pyfuncitem.funcargs.get("comm")
        if not isinstance(group, Group):
            return None
        names = pyfuncitem._fixtureinfo.argnames
        fixtures = {name: pyfuncitem.funcargs[name] for name in names if name != "comm"}

        def rank(comm: Communicator) -> None:
            pyfuncitem.obj(comm=group.through(comm), **fixtures)

        group.run(group.ranks, rank)
        return True

    @pytest.fixture
    def comm(self, request: pytest.FixtureRequest) -> Any:
        """The communicator of the rank that runs the test (see `tests/groups.py`)."""
        group = request.param
        if group.kind == "threads" or self.world is None:
            return group
        return group.through(self.world.comm if group.checked else self.world.plain)
