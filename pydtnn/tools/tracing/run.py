"""``--trace``: what `pydtnn.train` records and writes; it finds this module by its entry point."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydtnn.comm import Communicator
from pydtnn.comm.agree import together
from pydtnn.model.summary import layer_costs
from pydtnn.tools.tracing.kernels import measure_limits, observed_kernels
from pydtnn.tools.tracing.recorder import Recorder
from pydtnn.tools.tracing.writing import Trace, check_folder
from pydtnn.utils import clock
from pydtnn.utils.machine import cpu_name

__all__ = ["prepare", "recorder_of", "traced"]


def prepare(config: Any, comm: Communicator) -> None:
    """Check the options of a trace before a run. Collective: all ranks call it.

    Raises
    ------
    AgreedError
        On all ranks, if steps are not a range, or the folder cannot be written or has a trace.
    """
    together(comm, steps_of, config.trace_steps)
    check_folder(config.trace, comm, "train: --trace")


def steps_of(text: str | None) -> range | None:
    """Return the steps of ``--trace FOLDER:steps=FIRST:STOP``; None for all that happens.

    Raises
    ------
    ValueError
        If the text is not a range of at least one step.
    """
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
    steps = range(*map(int, found.groups())) if found else range(0)
    if not steps:
        raise ValueError(
            "train: --trace steps must be a range of at least one step, such as 10:20, got "
            f"{text!r}"
        )
    return steps


def recorder_of(config: Any) -> Recorder:
    """Return the recorder of a run."""
    return Recorder(steps_of(config.trace_steps), clock.virtual())


@contextlib.contextmanager
def traced(job: Any) -> Iterator[Trace]:
    """Context in which what the recorder of a job sees is written to the folder of `--trace`.

    Collective: all ranks call it.

    Parameters
    ----------
    job : pydtnn.cli.build.Job
    """
    config, trainer, recorder = job.config, job.trainer, job.recorder
    backend = trainer.model.backend

    def limits() -> dict[str, float]:
        return dict(trainer.comm.share(lambda: measure_limits(backend)))

    machine = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "device": backend.name,
        "threads": backend.threads,
        "instruction set": backend.isa,
        "dtype": trainer.model.dtype.name,
        **limits(),
    }
    trace = Trace(
        Path(config.trace),
        recorder,
        trainer.comm,
        memory=backend.memory,
        layers=layer_costs(trainer.model, -(-job.work.batch // trainer.setup.data.size)),
        machine=machine,
        failures=[] if job.survival is None else job.survival.failures,
        begun=lambda: any(trainer.seconds.values()),
    )
    with trace, contextlib.ExitStack() as stack:
        if config.trace_kernels:
            stack.enter_context(observed_kernels(backend, recorder))
        yield trace
        stack.close()
        # Other work on the machine reduces limits, rarely before and after training alike.
        machine |= {name: max(machine[name], again) for name, again in limits().items()}
