"""The clock of a run, and who may read the time of the machine instead."""

from __future__ import annotations

import ast
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pydtnn
from pydtnn.utils import clock
from tests.each import each

ROOT = Path(pydtnn.__file__).parent

ROOMS = ("training", "callbacks", "tracing", "comm", "cli")
"""Packages whose times are those of the run."""

REAL = {
    "training/preparation.py": "kernels are timed",
    "comm/monitor": "waits of processes",
    "comm/waiting.py": "waits of a rank",
    "comm/mpi.py": "operations on groups with failed ranks",
    "comm/ulfm.py": "operations on revoked groups, and ranks that start",
    "tools/survival/attempts.py": "detection and agreement after a failure",
}
"""Modules that read the time of the machine, and what they measure."""

TIMES = {"perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns"}


def readings(source: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in TIMES:
            yield f"{source}:{node.lineno}"
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (f"{source}:{node.lineno}" for name in node.names if name.name in TIMES)


@each("room", ROOMS)
def test_only_what_concerns_the_machine_reads_its_time(room):
    found = []
    for source in sorted((ROOT / room).rglob("*.py")):
        place = source.relative_to(ROOT).as_posix()
        if not any(place.startswith(real) for real in REAL):
            found += readings(source)
    assert not found, f"{', '.join(found)}: read pydtnn.utils.clock instead"


class Fixed(clock.Clock):
    def now_ns(self) -> int:
        return 5_000_000_000


def test_a_thread_has_its_own_clock():
    seen = []

    def read() -> None:
        clock.use(Fixed())
        seen.extend([clock.now(), clock.now_ns()])

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert seen == [5.0, 5_000_000_000]
    assert clock.virtual() is None
    before = time.perf_counter()
    assert before <= clock.now() <= time.perf_counter()
