"""Text output of a pipeline schedule: what each stage computes at each time."""

from __future__ import annotations

from pydtnn.parallel.pipeline.check import Timeline


def text(name: str, done: Timeline) -> str:
    """Format a schedule as a table, with a row for each stage and a column for each unit of time.

    Parameters
    ----------
    name : str
        Name of the schedule.
    done : Timeline
        The schedule, as `check` returns it, with whole numbers as times.

    >>> from pydtnn.parallel.pipeline.check import check
    >>> print(text("1f1b", check("1f1b", 2, 2)))
    1f1b: 2 stages, 2 micro-batches, 33 % of the time idle; values of 2, 1 micro-batches kept
    f0: forward of micro-batch 0, b0: backward
    <BLANKLINE>
    stage 0  f0 f1    b0 b0 b1 b1
    stage 1     f0 b0 b0 f1 b1 b1
    """
    width = len(str(done.micro_batches - 1)) + 1
    columns = round(done.duration)
    lines = [title(name, done), "f0: forward of micro-batch 0, b0: backward", ""]
    for stage in range(done.stages):
        cells = [""] * columns
        for event in done.of(stage):
            label = f"{event.action.kind[0]}{event.action.micro_batch}"
            for time in range(round(event.begin), round(event.end)):
                cells[time] = label
        row = " ".join(cell.ljust(width) for cell in cells)
        lines.append(f"stage {stage}  {row}".rstrip())
    return "\n".join(lines)


def title(name: str, done: Timeline) -> str:
    """Return a line with the numbers of stages and micro-batches, the bubble and the memory."""
    kept = ", ".join(map(str, done.in_flight))
    return (
        f"{name}: {done.stages} stages, {done.micro_batches} micro-batches, "
        f"{100 * done.bubble:.0f} % of the time idle; values of {kept} micro-batches kept"
    )
