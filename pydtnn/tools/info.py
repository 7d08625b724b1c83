"""Report on the machine and the installation: ``python -m pydtnn info`` prints it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from pydtnn.cli.installation import collect
from pydtnn.utils.command import Parser, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report as text; return the exit status, 0 on success."""
    return run_command("pydtnn info", lambda: _run(arguments))


def create_parser() -> Parser:
    """Return the parser of the command line, which has no options."""
    return Parser("python -m pydtnn info", description=__doc__)


def _run(arguments: Sequence[str] | None) -> None:
    create_parser().parse_args(arguments)
    for name, value in _lines(collect(probe=True)):
        print(f"{name:<18}{value}")


def _lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return name and value of each line of the report."""
    cpu = found["cpu"]
    return [
        ("pydtnn", f"{found['pydtnn']} ({found['commit'] or 'no git checkout'})"),
        ("Python", f"{found['python']} on {found['system']}"),
        *((name, number or "not installed") for name, number in found["packages"].items()),
        ("CPU", f"{cpu['name']}, {cpu['usable']} of {cpu['cores']} cores usable"),
        ("instruction sets", f"{', '.join(cpu['instruction_sets'])}; {cpu['isa']} is used"),
        ("float64", f"by the kernels of {cpu['isa_of_float64']}"),
        ("threads", f"{cpu['threads']} in one process"),
        ("tuning", found["tuning"]),
        ("BLAS", "; ".join(found["blas"]) or "unknown to threadpoolctl"),
        ("MPI", found["mpi"]),
        *found["gpu"].items(),
        *(("environment", f"{name}={value}") for name, value in found["environment"].items()),
    ]


if __name__ == "__main__":
    sys.exit(main())
