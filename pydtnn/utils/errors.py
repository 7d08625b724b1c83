"""Errors of a run on several ranks, and how any error is told in one line."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence


class AgreedError(Exception):
    """An error that every rank raises at the same point of the program.

    The ranks know of each other's failure, so none of them waits for the others: rank 0 prints the
    message and all of them leave in the ordinary way, with a non-zero status and without an abort.
    Raise it (or a subclass) where all ranks see the same cause, such as a loss summed over all of
    them; use `pydtnn.comm.agree` where only some ranks may have failed.

    Parameters
    ----------
    message : str
        One sentence: who, what was expected, what was given, what to do.
    ranks : sequence of int
        The ranks on which the error occurred; empty where the message concerns all of them.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class RankError(RuntimeError):
    """An error of one rank, told by another: its message begins with "rank r:".

    Parameters
    ----------
    rank : int
        The rank that failed.
    reason : str
        Its error in one line, as `describe` writes it.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank}: {reason}")
        self.rank = rank


EXPLAINED = (ValueError, TypeError, OSError, ImportError, AgreedError, RankError)
"""Errors whose message is a sentence for the user; any other is a fault, told with its place."""


def describe(error: BaseException) -> str:
    """Tell an error in one line.

    The message alone where it is a sentence written for the user (`EXPLAINED`); otherwise also the
    type and the place, and how to see more.

    Parameters
    ----------
    error : BaseException
        Any exception.

    Returns
    -------
    str
        One line without its end. Characters that are not printable, such as those that control a
    terminal, are written as escapes: a text may come from a file or from another machine.

    Examples
    --------
    >>> describe(ValueError("Dropout: rate 2 must be below 1."))
    'Dropout: rate 2 must be below 1.'
    >>> describe(KeyError("momentum"))
    "KeyError: 'momentum' (PYDTNN_TRACEBACK=1 shows where)"
    """
    if isinstance(error, KeyboardInterrupt):
        return "interrupted (Ctrl-C)"
    name, text = type(error).__name__, ""
    try:
        text = " ".join(str(error).split())
        if isinstance(error, EXPLAINED) and text:
            return printable(text)
    except BaseException as second:  # the caller is about to end a run
        text = f"its message cannot be shown, because __str__ raises {type(second).__name__}"
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}; " if frames else ""
    return printable(f"{name}{': ' * bool(text)}{text} ({place}PYDTNN_TRACEBACK=1 shows where)")


def traceback_if_wanted(error: BaseException) -> str:
    """Return the traceback of an error where PYDTNN_TRACEBACK=1 asks for it, otherwise nothing."""
    if os.environ.get("PYDTNN_TRACEBACK", "0") in ("", "0"):
        return ""
    return printable("".join(traceback.format_exception(error)))


def printable(text: str) -> str:
    r"""Write characters that are not printable as escapes, but for the ends of lines.

    >>> print(printable("no file \x1b[2J"))
    no file \x1b[2J
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode()
        for one in text
    )
