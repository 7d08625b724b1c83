"""The Python stacks of all threads of a process, as short text."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import thread as _pool
from types import FrameType

INNER = 8
"""Innermost calls that are shown of each thread."""

OWN = "pydtnn-watch"
"""First part of the names of threads that only watch others; they are not shown."""


def stacks() -> str:
    """Return a line for each thread, with its innermost calls, the last one innermost."""
    frames = sys._current_frames()
    shown = (thread for thread in threading.enumerate() if not thread.name.startswith(OWN))
    calls = ((thread.name, _calls(frames.get(thread.ident or 0))) for thread in shown)
    return "".join(f"  {name}: {text}\n" for name, text in calls if text)


def _calls(frame: FrameType | None) -> str:
    """Return the innermost calls, without those that start threads; empty for idle threads."""
    calls: list[str] = []
    while frame is not None and len(calls) < INNER:
        code = frame.f_code
        if code.co_filename in (threading.__file__, _pool.__file__):
            break
        calls.append(f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return " > ".join(reversed(calls))
