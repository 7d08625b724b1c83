"""Agreement of all ranks on errors and configuration, and work without those that fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from pydtnn.comm.communicator import Communicator
from pydtnn.utils.collective import name_ranks
from pydtnn.utils.errors import EXPLAINED, AgreedError, RankFailure, describe

T = TypeVar("T")


def on_rank_0(comm: Communicator, work: Callable[..., T], *args: object) -> T | None:
    """Call ``work(*args)`` on rank 0; the others wait until it is done.

    Collective: all ranks call it.

    Returns
    -------
    object
        What `work` returns, on rank 0; None on the others.

    Raises
    ------
    AgreedError
        On all ranks, if `work` raises on rank 0.
    """
    result, error = None, None
    if comm.rank == 0:
        try:
            result = work(*args)
        except Exception as problem:  # whatever it is, the other ranks must not wait for it
            error = problem
    agree(comm, error)
    return result


def agree(comm: Communicator, error: Exception | None = None) -> None:
    """Raise an error on all ranks if any rank has one. Collective: all ranks call it.

    For local work without communication, such as creating objects and opening files: each rank
    catches its error and passes it, so that all ranks raise together and none deadlocks.

    Parameters
    ----------
    comm : Communicator
        The ranks that agree.
    error : Exception, optional
        This rank's error.

    Raises
    ------
    AgreedError
        On every rank, if at least one passes an error: the message alone if all ranks have the
        same, otherwise with the names of the ranks: "rank 1: ...; ranks 2, 3: ...".

    Examples
    --------
    >>> from pydtnn.comm import create_communicator
    >>> agree(create_communicator("serial"))
    """
    reasons = comm.gather_object(None if error is None else describe(error))
    ranks: dict[str, list[int]] = {}
    for rank, reason in enumerate(reasons):
        if reason is not None:
            ranks.setdefault(reason, []).append(rank)
    if not ranks:
        return
    failed = [rank for rank, reason in enumerate(reasons) if reason is not None]
    if len(ranks) == 1 and len(failed) == comm.size:
        message = reasons[0]
    else:
        message = "; ".join(f"{name_ranks(who)}: {reason}" for reason, who in ranks.items())
    raise AgreedError(message, failed) from error


def together(comm: Communicator, work: Callable[..., T], *args: object) -> T:
    """Call `work` on every rank; if it fails on any rank, all ranks raise `AgreedError`.

    Only errors in `EXPLAINED` are agreed on; others propagate and terminate the run. Collective:
    all ranks call it.
    """
    problem = None
    try:
        result = work(*args)
    except BrokenPipeError:  # the output pipe is closed: no message can be printed
        raise
    except EXPLAINED as error:
        problem = error
    agree(comm, problem)
    return result


def require_equal(comm: Communicator, who: str, facts: Mapping[str, object], advice: str) -> None:
    """Raise AgreedError if facts differ between ranks. Collective: all ranks pass the same names.

    Parameters
    ----------
    comm : Communicator
    who : str
        First word of the message.
    facts : mapping
        Values by name; they must support comparison and pickling.
    advice : str
        What to do to make ranks equal.

    Raises
    ------
    AgreedError
        On every rank, with the first fact that differs and the values of two ranks.
    """
    everywhere = comm.gather_object(dict(facts))
    for rank, other in enumerate(everywhere):
        for name, value in everywhere[0].items():
            if other[name] != value:
                raise AgreedError(
                    f"{who}: all ranks must have the same {name}, got {value!r} on rank 0 "
                    f"and {other[name]!r} on rank {rank}; {advice}"
                )


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
    from pydtnn.comm.schedules.rule import by_rule, without_rule

    while True:
        try:
            return comm, work(comm)
        except (Exception, RankFailure) as error:
            if not (isinstance(error, RankFailure) or comm.lost_ranks()):
                raise
            comm = by_rule(without_rule(comm).shrink())
