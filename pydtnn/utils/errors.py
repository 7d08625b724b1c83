"""Errors of a run on several ranks, and the description of any error in one line."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Sequence


class AgreedError(Exception):
    """An error that every rank raises at the same point of the program.

    Since all ranks raise it, no rank waits for the others: rank 0 prints the message and all ranks
    exit normally, with a non-zero status and without an abort. Raise it (or a subclass) where all
    ranks detect the same cause, such as a loss summed over all of them; use `pydtnn.comm.agree`
    where only some ranks may have failed.

    Parameters
    ----------
    message : str
        One sentence: who, what was expected, what was given, what to do.
    ranks : sequence of int
        The ranks on which the error occurred; empty if the message concerns all of them.

    Attributes
    ----------
    status : int
        Exit status of the process.
    """

    status = 1

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class Interrupted(AgreedError):
    """Training has ended after a step because of a signal, on all ranks after the same one.

    Parameters
    ----------
    message : str
    signal : int
        Number of the signal; the exit status of the process is 128 + this number.
    """

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal
        self.status = 128 + signal


class NotSavedError(AgreedError):
    """Training is complete, but none of its checkpoints could be written."""

    status = 74  # EX_IOERR of sysexits.h


class TooFewRanksError(AgreedError):
    """Fewer ranks remain than the run requires; it can be continued later."""

    status = 75  # EX_TEMPFAIL of sysexits.h, as after --timeout


class RankFailure(BaseException):
    """Other ranks have failed: raised by every call on a communicator that has one of them.

    It is not an `Exception`, so that handlers of errors of a rank let it pass. Without `--survive`
    it ends the run; otherwise the remaining ranks continue without the others.
    """

    def __init__(self) -> None:
        super().__init__("a rank has failed; start with --survive to continue without it")


class RankError(RuntimeError):
    """An error of one rank, raised on another: its message begins with "rank r:".

    Parameters
    ----------
    rank : int
        The rank that failed.
    reason : str
        Its error in one line, as returned by `describe`.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank}: {reason}")
        self.rank = rank


class MissingNameError(KeyError):
    """A KeyError whose message is a sentence for the user."""

    def __str__(self) -> str:
        return str(self.args[0])


EXPLAINED = (
    ValueError,
    TypeError,
    OSError,
    ImportError,
    AgreedError,
    RankError,
    MissingNameError,
)
"""Errors whose message is a sentence for the user; others are reported with type and location."""


def describe(error: BaseException) -> str:
    """Return the description of an error in one line.

    For errors with a sentence for the user (`EXPLAINED`), the message alone; otherwise also the
    type, the location and how to obtain the traceback.

    Parameters
    ----------
    error : BaseException
        Any exception.

    Returns
    -------
    str
        One line without line break. Characters that are not printable, such as control
        characters, are written as escapes: a text may come from a file or from another machine.

    Examples
    --------
    >>> describe(ValueError("Dropout: rate 2 must be below 1."))
    'Dropout: rate 2 must be below 1.'
    >>> describe(KeyError("momentum"))
    "KeyError: 'momentum' (PYDTNN_TRACEBACK=1 shows where)"
    """
    if isinstance(error, KeyboardInterrupt):
        return "interrupted (Ctrl-C)"
    if isinstance(error, RankFailure):
        return str(error)
    name, text = type(error).__name__, ""
    try:
        text = " ".join(str(error).split())
        if isinstance(error, MemoryError):
            return printable(f"there is not enough memory{': ' * bool(text)}{text}")
        if isinstance(error, EXPLAINED) and text:
            return printable(text)
    except BaseException as second:  # the caller is terminating the run
        text = f"its message cannot be shown, because __str__ raises {type(second).__name__}"
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}; " if frames else ""
    return printable(f"{name}{': ' * bool(text)}{text} ({place}PYDTNN_TRACEBACK=1 shows where)")


def requested_traceback(error: BaseException) -> str:
    """Return the traceback of an error if PYDTNN_TRACEBACK=1 is set, otherwise an empty string."""
    if os.environ.get("PYDTNN_TRACEBACK", "0") in ("", "0"):
        return ""
    return printable("".join(traceback.format_exception(error)))


def write_error(text: str) -> None:
    """Write to the standard error in one piece, so that lines of ranks do not mix, if possible."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))


def printable(text: str) -> str:
    r"""Escape characters that are not printable, except line breaks.

    >>> print(printable("no file \x1b[2J"))
    no file \x1b[2J
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode()
        for one in text
    )
