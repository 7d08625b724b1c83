"""Work of all ranks that is done again without those that have failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pydtnn.comm.communicator import Communicator
from pydtnn.comm.schedules.rule import by_rule, without_rule
from pydtnn.utils.errors import RankFailure

T = TypeVar("T")


def on_remaining(comm: Communicator, work: Callable[[Communicator], T]) -> tuple[Communicator, T]:
    """Return the ranks that remain, and what `work` returns on them.

    Collective: all ranks of a group call it. Whenever ranks of the group fail, those that remain
    form a new one, and `work` begins again with it.

    Parameters
    ----------
    comm : Communicator
    work : callable
        Raises RankFailure if ranks have failed, as calls of the communicator do.
    """
    while True:
        try:
            return comm, work(comm)
        except (Exception, RankFailure) as error:
            if not (isinstance(error, RankFailure) or comm.lost_ranks()):
                raise
            comm = by_rule(without_rule(comm).shrink())
