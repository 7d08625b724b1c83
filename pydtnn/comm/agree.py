"""One decision of all ranks to go on or to stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydtnn.comm.communicator import Communicator
from pydtnn.utils.errors import AgreedError, describe


def agree(comm: Communicator, error: Exception | None = None) -> None:
    """Go on where no rank has an error, else raise one on all. Collective: all ranks call it.

    For work that ranks do by themselves before they talk, such as building objects and opening
    files: each catches its error, and all learn of it together, so that none is left waiting.

    Parameters
    ----------
    comm : Communicator
        The ranks that decide.
    error : Exception, optional
        This rank's error.

    Raises
    ------
    AgreedError
        On every rank, where at least one passes an error: the message alone where all have
        the same, otherwise with the ranks named: "rank 1: ...; ranks 2, 3: ...".

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


def require_equal(comm: Communicator, who: str, facts: Mapping[str, object], advice: str) -> None:
    """Refuse ranks that differ in a fact. Collective: all ranks call it, with the same names.

    Parameters
    ----------
    comm : Communicator
    who : str
        Refuses them.
    facts : mapping
        By name; anything that can be compared and sent.
    advice : str
        How to make ranks equal.

    Raises
    ------
    AgreedError
        On every rank, naming the first fact that differs, and two ranks with their values.
    """
    everywhere = comm.gather_object(dict(facts))
    for rank, other in enumerate(everywhere):
        for name, value in everywhere[0].items():
            if other[name] != value:
                raise AgreedError(
                    f"{who}: all ranks must have the same {name}, got {value!r} on rank 0 "
                    f"and {other[name]!r} on rank {rank}; {advice}"
                )


def name_ranks(ranks: Sequence[int]) -> str:
    """Write "rank 1", or "ranks 2, 3"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
