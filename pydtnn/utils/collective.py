"""Methods that all ranks call: their names in errors, and values that must be the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pydtnn.utils.errors import AgreedError

Ranks = Any
"""A `pydtnn.comm.Communicator`: this module is below that package in the order of imports."""


@contextmanager
def collective(ranks: Ranks, name: str, *, nested: bool = False) -> Iterator[None]:
    """Context of a method that all ranks call; errors of calls that differ contain its name.

    Collective: all ranks call it. It begins with one small message, so that ranks that are in
    other methods are found before anything else is sent.

    Parameters
    ----------
    ranks : Communicator
    name : str
        Such as "Trainer.evaluate".
    nested : bool
        Whether it sends no message, and keeps the name of the method that calls it, if any.
    """
    traffic = ranks.traffic
    before = traffic.caller
    traffic.caller = name = (nested and before) or name
    try:
        if ranks.size > 1 and name != before:
            ranks.gather_object(None)
        yield
    finally:
        traffic.caller = before


def raise_if_different(
    ranks: Ranks, who: str, what: str, values: Sequence[Any], advice: str
) -> None:
    """Raise AgreedError if the gathered values of ranks differ from that of the first.

    Parameters
    ----------
    ranks : Communicator
    who, what, advice : str
        First word of the error, name of the values in the plural, and what to do.
    values : sequence
        That of each rank.

    Raises
    ------
    AgreedError
        Naming the ranks that differ.
    """
    differs = [
        rank for rank, value in zip(ranks.members, values, strict=True) if value != values[0]
    ]
    if differs:
        raise AgreedError(
            f"{who}: {what} differ on {name_ranks(differs)} from those on rank {ranks.members[0]}; "
            f"{advice}",
            differs,
        )


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 2, 3"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def call_difference(sentences: Sequence[str]) -> str:
    """Describe the ranks whose call differs from the most frequent one; in a tie, from rank 0's."""
    usual = max(dict.fromkeys(sentences), key=sentences.count)
    odd = next(rank for rank, sentence in enumerate(sentences) if sentence != usual)
    same = [rank for rank, sentence in enumerate(sentences) if sentence == sentences[odd]]
    verb = "call" if len(same) > 1 else "calls"
    other = sentences.index(usual)
    return (
        f"{name_ranks(same)} {verb} {sentences[odd]} where rank {other} calls {usual}; all "
        "ranks must make the same calls in the same order"
    )
