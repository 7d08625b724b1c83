"""The trace of a run that `--trace` asks for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydtnn.cli.build import Job
from pydtnn.kernels.limits import measure_limits
from pydtnn.kernels.observed import observed_kernels
from pydtnn.model.summary import layer_costs
from pydtnn.tracing.writing import Trace
from pydtnn.training.trainer import Trainer
from pydtnn.utils.machine import cpu_name


@contextlib.contextmanager
def traced(job: Job) -> Iterator[Trace | None]:
    """Context that is recorded and written to the folder of `--trace`, if the run has one.

    Collective: all ranks call it.
    """
    config, trainer, recorder = job.config, job.trainer, job.recorder
    if recorder is None:
        yield None
        return
    backend = trainer.model.backend

    def limits() -> dict[str, float]:
        return dict(trainer.comm.share(lambda: measure_limits(backend)))

    machine = _facts(trainer) | limits()
    samples = -(-job.work.batch // trainer.setup.data.size)
    trace = Trace(
        Path(str(config.trace)),
        recorder,
        trainer.comm,
        memory=backend.memory,
        layers=layer_costs(trainer.model, samples),
        machine=machine,
    )
    with trace, contextlib.ExitStack() as stack:
        if config.trace_kernels:
            stack.enter_context(observed_kernels(backend, recorder))
        yield trace
        stack.close()
        # Other work on the machine reduces limits, rarely before and after training alike.
        machine |= {name: max(machine[name], again) for name, again in limits().items()}


def _facts(trainer: Trainer) -> dict[str, Any]:
    """Return the facts of this rank's machine that summaries use."""
    backend = trainer.model.backend
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "device": backend.name,
        "threads": backend.threads,
        "instruction set": backend.isa,
        "dtype": trainer.model.dtype.name,
    }


def describe_trace(trace: Trace) -> str:
    """Describe a trace that was written in one line."""
    ranks = trace.comm.size
    clocks = f", clocks equal within {trace.error / 1e3:.1f} us" if ranks > 1 else ""
    return (
        f"trace: {trace.records:,} records of {ranks} rank{'s' * (ranks > 1)} in {trace.folder}"
        f"{clocks}; see python -m pydtnn.trace summary {trace.folder}"
    )
