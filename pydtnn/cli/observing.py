"""Options of traces."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pydtnn.cli.options import OBSERVATION, option


@dataclass(frozen=True)
class TraceOptions:
    """Options of the configuration that choose what a trace contains."""

    trace: str | None = option(
        OBSERVATION,
        str,
        "record what every rank does, and write it to this folder: docs/tracing.md",
        metavar="FOLDER",
    )
    trace_steps: str | None = option(
        OBSERVATION,
        str,
        "record these steps only, counted from 0 at the start of this run, such as 10:20, which "
        "excludes step 20",
        metavar="FIRST:STOP",
    )
    trace_kernels: bool = option(OBSERVATION, False, "record every call of a kernel too")

    def check_trace(self) -> None:
        """Raise ValueError if an option of traces is invalid or has no effect."""
        for label, given in (
            ("--trace-steps", self.trace_steps is not None),
            ("--trace-kernels", self.trace_kernels),
        ):
            if given and self.trace is None:
                raise ValueError(f"train: {label} requires --trace FOLDER")
        self.traced_steps()

    def traced_steps(self) -> range | None:
        """Return the steps of `trace_steps`; None for all that happens.

        Raises
        ------
        ValueError
            If the text is not a range of at least one step.
        """
        if self.trace_steps is None:
            return None
        found = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", self.trace_steps)
        steps = range(*map(int, found.groups())) if found else range(0)
        if not steps:
            raise ValueError(
                "train: --trace-steps must be a range of at least one step, such as 10:20, got "
                f"{self.trace_steps!r}"
            )
        return steps
