"""Why a process does not run, as `/proc` tells."""

import os

from pydtnn.comm.monitor.processes import condition_of
from tests.each import each


@each(
    ("state", "swap", "why", "frozen"),
    [
        ("R", 900, "", False),
        ("S", 0, "", False),
        ("T", 0, "stopped by a signal (SIGSTOP)", True),
        ("t", 0, "stopped by a debugger", True),
        ("Z", 0, "has ended", True),
        ("D", 2048, "swapped out (2 MiB in swap)", False),
        ("D", 0, "waits for a disk or a file system", False),
    ],
)
def test_the_state_of_a_process_tells_why_it_does_not_run(state, swap, why, frozen, tmp_path):
    process = tmp_path / "12"
    process.mkdir()
    (process / "stat").write_text(f"12 (a) b (python) {state} 1 2 3")
    (process / "status").write_text(f"Name:\tpython\nVmSwap:\t{swap} kB\n")
    assert condition_of(12, tmp_path) == (why, frozen)


def test_a_process_that_is_not_there_has_ended(tmp_path):
    assert condition_of(12, tmp_path) == ("has ended", True)


def test_this_process_runs():
    assert condition_of(os.getpid()).why == ""
