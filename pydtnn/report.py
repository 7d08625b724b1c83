"""What a run leaves behind: a file that says how it was made, and a table that says how it went."""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from pydtnn.info import collect

if TYPE_CHECKING:
    from pydtnn.job import Job


def write_run_file(job: Job) -> None:
    """Write run.json: configuration, versions, ranks, threads, instruction set and commit.

    Collective: all ranks call it; rank 0 writes.
    """
    trainer = job.trainer
    hosts = trainer.comm.hosts
    if trainer.comm.rank == 0:
        backend = trainer.model.backend
        content = {
            "configuration": asdict(job.config),
            "ranks": trainer.comm.size,
            "hosts": len(set(hosts)),
            "threads": backend.threads,
            "instruction_set": backend.isa,
            "environment": collect(),
        }
        (job.directory / "run.json").write_text(json.dumps(content, indent=2, default=str) + "\n")


def print_report(job: Job) -> None:
    """Print the table that ends a run: what was reached, how fast, and where the time went.

    Collective: all ranks call it; rank 0 prints.
    """
    trainer = job.trainer
    comm = trainer.comm
    own = {
        "seconds": trainer.seconds,
        "peak": peak_memory(),
        "bytes": comm.traffic.bytes,
    }
    ranks = comm.gather_object(own)
    if comm.rank:
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{job.config.model} on {job.train.name}", show_header=False)
    for name, value in _rows(job, ranks):
        table.add_row(name, value)
    Console().print(table)


def _rows(job: Job, ranks: list[dict]) -> list[tuple[str, str]]:
    trainer = job.trainer
    last = trainer.history[-1] if trainer.history else {}
    steps, communication, data, evaluation = (
        sum(r["seconds"][part] for r in ranks) / len(ranks)
        for part in ("steps", "communication", "data", "evaluation")
    )
    wall = steps + data
    rows = [("ranks", f"{len(ranks)}, {trainer.model.backend.threads} threads each")]
    rows += [
        (name.replace("_", " "), f"{value:.4f}") for name, value in last.items() if name != "lr"
    ]
    rows += [
        ("images/s", f"{trainer.samples_seen / wall:.0f}" if wall else "no step made"),
        ("time in compute", f"{steps - communication:.1f} s"),
        ("time in communication", f"{communication:.1f} s, not hidden behind compute"),
        ("time waiting for data", f"{data:.1f} s"),
        ("time in evaluation", f"{evaluation:.1f} s"),
        ("sent per rank", f"{max(r['bytes'] for r in ranks) / 1e6:.0f} MB"),
        ("peak memory per rank", f"{max(r['peak'] for r in ranks) / 1e6:.0f} MB"),
        ("run folder", str(job.directory)),
    ]
    return rows


def peak_memory() -> int:
    """Largest resident memory of this process so far, in B."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
