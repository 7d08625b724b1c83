"""A table on a terminal: the best trial, those in progress, and how far the search is."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, TextIO

from pydtnn.tools.search.lines import (
    STATES,
    best_of,
    describe_trial,
    name_ranks,
    options_of,
    result_of,
    seconds_left,
    seconds_of,
    use_of,
)
from pydtnn.tools.search.space import Space
from pydtnn.tools.search.study import GROUP, SharedStudy, is_paused
from pydtnn.utils.errors import printable
from pydtnn.utils.terminal import height_of, terminal_of, width_of
from pydtnn.utils.units import align, duration

REFRESH_S = 1.0
"""Time between two updates, in s."""

COLUMNS = ("trial", "ranks", "epoch", "value", "time")


class Region:
    """The last lines of a terminal, which are replaced by others.

    Parameters
    ----------
    file : text stream
        The terminal.
    """

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self._lengths: list[int] = []

    def show(self, permanent: Sequence[str], lines: Sequence[str]) -> None:
        """Write lines that remain, and below them lines that are cut to the width."""
        width = width_of(self.file)
        rows = sum(max(1, -(-length // width)) for length in self._lengths)  # narrower: wrapped
        cut = [printable(line)[: width - 1] for line in lines]
        text = "".join(f"{line}\n" for line in [*map(printable, permanent), *cut])
        self.file.write((f"\r\x1b[{rows}A\x1b[J" if rows else "") + text)  # up, and erase
        self.file.flush()
        self._lengths = [*map(len, cut)]


def create_table(shared: SharedStudy, job: int) -> LiveTable | None:
    """Return a table if standard output is a terminal on which lines can be replaced."""
    terminal = None if os.environ.get("TERM") == "dumb" else terminal_of(sys.stdout)
    return None if terminal is None else LiveTable(shared, job, terminal)


class LiveTable(contextlib.AbstractContextManager["LiveTable"]):
    """Context in which a thread shows the trials of a study on a terminal.

    A line for each trial that ends remains above the table. Without effect after the terminal has
    been closed.

    Parameters
    ----------
    shared : SharedStudy
    job : int
        The job whose trials are listed while they are in progress; other jobs may share the study.
    terminal : text stream
    """

    def __init__(self, shared: SharedStudy, job: int, terminal: TextIO) -> None:
        self._space, self._study, self._job = shared.space, shared.study, job
        self._terminal, self._region = terminal, Region(terminal)
        self._known = {one.number for one in self._trials() if one.state.is_finished()}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="search table", daemon=True)

    def __enter__(self) -> LiveTable:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the table, and close the terminal if it is not standard output."""
        self._stop.set()
        self._thread.join()
        if self._terminal is not sys.stdout:
            with contextlib.suppress(OSError):
                self._terminal.close()

    def _trials(self) -> list[Any]:
        return list(self._study.get_trials(deepcopy=False))

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # the terminal was closed
            while not self._stop.wait(REFRESH_S):
                self._refresh(table=True)
            self._refresh(table=False)

    def _refresh(self, *, table: bool) -> None:
        trials = self._trials()
        ended = [t for t in trials if t.state.is_finished() and t.number not in self._known]
        new = [one.number for one in sorted(ended, key=lambda one: one.datetime_complete)]
        self._known.update(new)
        lines = [describe_trial(self._space, trials, number) for number in new]
        height = height_of(self._terminal)
        rows = rows_of(self._space, trials, self._job, time.time()) if table else []
        self._region.show(lines, rows if len(rows) < height else rows[: height - 1])


def rows_of(space: Space, trials: Sequence[Any], job: int, now: float) -> list[str]:
    """Return the lines of the table: counts, the best trial, and those in progress.

    Parameters
    ----------
    space : Space
    trials : sequence of optuna.trial.FrozenTrial
    job : int
        The job whose trials in progress are listed.
    now : float
        The time, in s.
    """
    states = Counter(one.state.name for one in trials if one.state.is_finished())
    counts = ", ".join(f"{states[name]} {STATES[name]}" for name in ("COMPLETE", "PRUNED", "FAIL"))
    begun = [one for one in trials if one.state.name == "RUNNING"]
    if paused := sum(map(is_paused, begun)):
        counts += f", {paused} paused"
    share, _ = use_of(trials, now, job)
    rows = [f"{states.total()}/{space.trials}  {counts}", f"ranks used {share:.1%}"]
    left = seconds_left(space, trials, now)
    if left is not None:
        rows[1] += f"  about {duration(left)} left"
    rows += [
        f"best  trial {one.number}  {result_of(space, one)}  {options_of(one)}"
        for one in best_of(space, trials)[:1]
    ]
    running = [one for one in begun if not is_paused(one) and _is_of(one, job)]
    if running:
        rows += align([COLUMNS, *(_row(space, one, now) for one in running)], 0)
    return rows


def _is_of(one: Any, job: int) -> bool:
    spans = one.user_attrs.get(GROUP, [])
    return bool(spans) and spans[-1]["job"] == job


def _row(space: Space, one: Any, now: float) -> list[str]:
    epoch = max(one.intermediate_values, default=0)
    epochs = one.params.get("epochs", space.fixed.get("epochs"))
    value = f"{one.intermediate_values[epoch]:.4g}" if epoch else ""
    shown = f"{epoch}/{epochs}" if epochs else str(epoch)
    ranks = one.user_attrs[GROUP][-1]["ranks"]
    return [str(one.number), name_ranks(ranks), shown, value, duration(seconds_of(one, now))]
