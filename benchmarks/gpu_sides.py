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
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn, TextIO

from gpu_parts import end

PREPARE = 120.0
"""Seconds in which a side must have made its model, imports included."""


class SideError(Exception):
    """A side cannot go on with its work; the reason in one line."""


class Side:
    """A side, seen from the process that asks.

    Parameters
    ----------
    side : str
    device : str
    """

    def __init__(self, side: str, device: str) -> None:
        self.side, self.device = side, device
        script = Path(__file__).with_name("gpu_step_time.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), "--serve", side, "--device", device],
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

    def begin(self, name: str, dtype: str) -> None:
        """Have work made, and wait until it is."""
        self.ask({"work": [name, dtype]})
        self.answer(PREPARE)

    def turn(self, steps: int, patience: float) -> float:
        """Have steps made; return the seconds per step."""
        self.ask({"steps": steps})
        return float(self.answer(patience))

    def end(self) -> dict[str, Any]:
        """End the work; return the memory it took in MB, and a note."""
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
    side, device : str
    questions, answers : TextIO
    """

    def __init__(self, side: str, device: str, questions: TextIO, answers: TextIO) -> None:
        self.side, self.device = side, device
        self.questions, self.answers = questions, answers

    def run(self) -> None:
        """Answer until there are no more questions."""
        from gpu_work import create_side, release

        for line in self.questions:
            question = json.loads(line)
            if "work" not in question:
                continue  # turns of work that has failed: the error was the answer
            try:
                work = create_side(self.side, *question["work"], self.device)
                self.say("ready")
                work.turns(self.ask)
                self.say({"memory": work.memory(), "note": work.note})
            except BrokenPipeError:
                return  # nobody listens any more
            except Exception as error:
                traceback.print_exc()
                self.say({"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]})
            work = None
            release(self.device)

    def ask(self, seconds: float | None) -> int:
        """Tell the seconds per step of the last turn; return the steps of the next."""
        if seconds is not None:
            self.say(seconds)
        line = self.questions.readline()
        return int(json.loads(line)["steps"]) if line else 0

    def say(self, answer: Any) -> None:
        """Send an answer."""
        print(json.dumps(answer), file=self.answers, flush=True)


def serve(side: str, device: str) -> None:
    """Be a side, which chooses its algorithms anew; what libraries print is no answer."""
    answers, sys.stdout = sys.stdout, sys.stderr
    with TemporaryDirectory() as cache:
        os.environ["PYDTNN_CACHE"] = cache
        Server(side, device, sys.stdin, answers).run()
