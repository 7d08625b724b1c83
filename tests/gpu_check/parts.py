"""Parts of a long check: processes with time limits, inside a budget for all of them.

A part may hang, crash or take its output with it; the others must not notice. So each is a session
of its own that is ended, with all that it started, when its time is up, and whatever it has written
until then stays.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.processes import end

ROOT = Path(__file__).resolve().parents[2]

LEAST = 0.6
"""Part of the expected seconds that must be left for a part to be started at all."""


@dataclass
class Part:
    """One process of the check.

    Attributes
    ----------
    name : str
    command : tuple of str
    expected : float
        Seconds that it takes on one H200 with 16 cores, to plan with.
    limit : float
        Seconds after which it is ended.
    alone : bool
        Whether nothing else may run beside it, because it measures time.
    environment : dict
        Variables beside ours.
    state : str
        "waiting", "running", "done", "status N", "ended after N s" or "not started: ...".
    seconds : float
        That it took.
    """

    name: str
    command: tuple[str, ...]
    expected: float
    limit: float
    alone: bool = False
    environment: Mapping[str, str] | None = None
    state: str = "waiting"
    seconds: float = 0.0
    log: Path = Path()
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0

    def start(self, folder: Path, seconds: float) -> None:
        """Start it, to be ended after so many seconds; what it prints goes to a file."""
        self.log = folder / f"{self.name}.log"
        self.limit = min(self.limit, seconds)
        self.began = time.monotonic()
        budget = {"GPU_CHECK_SECONDS": f"{self.limit:.0f}"}
        try:
            with self.log.open("wb") as out:
                self.process = subprocess.Popen(
                    self.command,
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**os.environ, **(self.environment or {}), **budget},
                )
        except OSError as error:
            self.state = f"not started: {error}"
        else:
            self.state = "running"

    def poll(self) -> bool:
        """Whether it has ended, or has just been ended."""
        if self.process is None or self.state != "running":
            return True
        self.seconds = time.monotonic() - self.began
        status = self.process.poll()
        if status is None and self.seconds < self.limit:
            return False
        if status is None:
            end(self.process)
            self.state = f"ended after {self.seconds:.0f} s"
        else:
            self.state = f"status {status}" if status else "done"
        return True

    def tail(self, lines: int) -> list[str]:
        """Return the last lines that it has printed."""
        if not self.log.is_file():
            return []
        return self.log.read_text(errors="replace").splitlines()[-lines:]


def run(
    parts: Sequence[Part],
    folder: Path,
    deadline: float,
    told: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run parts in their order: those that may share the machine side by side, then each alone.

    A part leaves time for those after it, in their expected seconds: the first ones matter most
    where parts are alone, so a later one is left out if less than `LEAST` of what it needs is left.

    Parameters
    ----------
    parts : sequence of Part
    folder : Path
        Of their logs.
    deadline : float
        When all must be over, by `clock`.
    told : callable
        Called after each part, and whatever happens.
    """
    together = [part for part in parts if not part.alone]
    alone = [part for part in parts if part.alone]
    try:
        _side_by_side(together, folder, deadline - clock() - reserved(alone), told)
        for place, part in enumerate(alone):
            left = deadline - clock() - reserved(alone[place + 1 :])
            _side_by_side([part], folder, max(left, _own(part, deadline - clock())), told)
    finally:
        for part in parts:
            if part.state == "running" and part.process:
                end(part.process)
                part.state = f"interrupted after {clock() - part.began:.0f} s"
        told()


def reserved(parts: Sequence[Part]) -> float:
    """Count the seconds that parts expect."""
    return sum(part.expected for part in parts)


def _own(part: Part, left: float) -> float:
    """What a part may have at the cost of later ones: what it expects, as far as it is there."""
    return min(part.expected, left)


def _side_by_side(
    parts: Sequence[Part], folder: Path, seconds: float, told: Callable[[], None]
) -> None:
    for part in parts:
        if seconds < LEAST * part.expected:
            part.state = (
                f"not started: it takes about {part.expected:.0f} s, {max(seconds, 0):.0f} s "
                "were left"
            )
        else:
            part.start(folder, seconds)
    running = list(parts)
    while running:
        still = [part for part in running if not part.poll()]
        if len(still) < len(running):
            told()
        running = still
        if running:
            time.sleep(0.1)
