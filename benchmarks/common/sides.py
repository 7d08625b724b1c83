"""Sides of a comparison as processes: each makes steps when it is asked to, and says how long.

Questions and answers are lines of JSON. A side is told of some work, then of turns, and ends the
work with a turn of 0 steps; so one process serves many rows of a table, and PyTorch is imported
once. What goes wrong in a side is an answer, too, and a side that is silent for too long is ended:
the others go on.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn, Protocol, TextIO

from benchmarks.common.processes import end

ROOT = Path(__file__).resolve().parents[2]
PREPARE = 120.0
"""Seconds in which a side must have made its model, imports included."""


class Work(Protocol):
    """What a side does: as many steps as it is told, again and again."""

    note: str

    def turns(self, ask: Callable[[float | None], int]) -> None:
        """Make steps until there are none to make."""

    def memory(self) -> Any:
        """Memory that the work has needed."""


class SideError(Exception):
    """A side cannot go on with its work; the reason in one line."""


class Side:
    """A side, seen from the process that asks.

    Parameters
    ----------
    command : list of str
        What starts a process that calls `serve`.
    variables : mapping of str to str, optional
        Its environment; this process's own by default.
    """

    def __init__(self, command: list[str], variables: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.read = b""

    def alive(self) -> bool:
        """Whether it can be asked."""
        return self.process.poll() is None

    def ask(self, question: dict[str, Any]) -> None:
        """Send a question."""
        assert self.process.stdin
        try:
            self.process.stdin.write(json.dumps(question).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            self.fail("has ended")

    def answer(self, patience: float) -> Any:
        """Wait for the answer, so many seconds at most."""
        assert self.process.stdout
        deadline = time.monotonic() + patience
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self.read:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.fail(f"gave no answer in {patience:.0f} s")
                piece = os.read(self.process.stdout.fileno(), 65536)
                if not piece:
                    self.fail("has ended; the log has its last words")
                self.read += piece
        line, _, self.read = self.read.partition(b"\n")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise SideError(answer["error"])
        return answer

    def begin(self, *work: Any) -> None:
        """Have work made, and wait until it is."""
        self.ask({"work": work})
        self.answer(PREPARE)

    def turn(self, steps: int, patience: float) -> float:
        """Have steps made; return the seconds per step."""
        self.ask({"steps": steps})
        return float(self.answer(patience))

    def end(self) -> dict[str, Any]:
        """End the work; return the memory it took, and a note."""
        self.ask({"steps": 0})
        told: dict[str, Any] = self.answer(30)
        return told

    def close(self) -> None:
        """End the process."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            try:
                pipe.close()
            except OSError:
                continue
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            end(self.process)

    def fail(self, reason: str) -> NoReturn:
        """End the process, whatever it does."""
        end(self.process)
        raise SideError(reason)


class Server:
    """A side, seen from within its process.

    Parameters
    ----------
    create : callable
        Takes what describes work, and makes it.
    release : callable
        Called when work is over.
    questions, answers : TextIO
    """

    def __init__(
        self,
        create: Callable[..., Work],
        release: Callable[[], None],
        questions: TextIO,
        answers: TextIO,
    ) -> None:
        self.create, self.release = create, release
        self.questions, self.answers = questions, answers

    def run(self) -> None:
        """Answer until there are no more questions."""
        for line in self.questions:
            question = json.loads(line)
            if "work" not in question:
                continue  # turns of work that has failed: the error was the answer
            try:
                work = self.create(*question["work"])
                self.say("ready")
                work.turns(self.ask)
                self.say({"memory": work.memory(), "note": work.note})
            except BrokenPipeError:
                return  # nobody listens any more
            except Exception as error:
                traceback.print_exc()
                self.say({"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]})
            work = None
            self.release()

    def ask(self, seconds: float | None) -> int:
        """Tell the seconds per step of the last turn; return the steps of the next."""
        if seconds is not None:
            self.say(seconds)
        line = self.questions.readline()
        return int(json.loads(line)["steps"]) if line else 0

    def say(self, answer: Any) -> None:
        """Send an answer."""
        print(json.dumps(answer), file=self.answers, flush=True)


def serve(create: Callable[..., Work], release: Callable[[], None] = lambda: None) -> None:
    """Be a side, which chooses its algorithms anew; what libraries print is no answer."""
    answers, sys.stdout = sys.stdout, sys.stderr
    with TemporaryDirectory() as cache:
        os.environ["PYDTNN_CACHE"] = cache
        Server(create, release, sys.stdin, answers).run()
