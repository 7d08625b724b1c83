"""The command ``python -m pydtnn calibrate``."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from pydtnn.comm import Communicator, create_communicator
from pydtnn.comm.agree import on_rank_0, together
from pydtnn.tools.perfmodel.calibration.calibrate import calibrate, describe
from pydtnn.tools.perfmodel.platform import Platform, platform_names
from pydtnn.utils.command import Parser, printing
from pydtnn.utils.errors import EXPLAINED, AgreedError, requested_traceback
from pydtnn.utils.errors import describe as describe_error

WHO = "calibrate"

DESCRIPTION = """Measure this machine, or the hosts of an MPI job, and write a platform file: peaks
and achieved rates of kernels, memory, Python, network, loader and disk. All ranks measure at the
same time. It takes less than a minute."""

EPILOG = """example: mpirun -np 4 python -m pydtnn calibrate --output cluster.yaml

On a machine under load nothing is written and the status is 1."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status, 0 on success. Collective: all ranks call it.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default: the arguments of this process.
    """
    comm = None
    try:
        comm = create_communicator()
        with printing() if comm.rank == 0 else contextlib.redirect_stdout(io.StringIO()):
            _run(comm, arguments)
    except EXPLAINED as error:
        if comm is not None and comm.size > 1 and not isinstance(error, AgreedError):
            raise  # the communicator prints it and ends all ranks
        if comm is None or comm.rank == 0:
            text = describe_error(error).removeprefix(f"{WHO}: ")
            print(f"{requested_traceback(error)}{WHO}: {text}", file=sys.stderr)
        return 1
    return 0


def _run(comm: Communicator, arguments: Sequence[str] | None) -> None:
    options = together(comm, _parse, arguments)
    if options.list:
        print(listing())
        return
    folder = options.output.absolute().parent
    name = options.name or options.output.stem
    same = {name: getattr(options, name) for name in ("threads", "isa", "allow_noise")}
    found = calibrate(comm, name=name, folder=folder, **same)
    load = f"the machine is under load, spread of {', '.join(found.spreads)}"
    if found.spreads and not options.allow_noise:
        raise AgreedError(
            f"{load}; nothing was written: repeat it when the machine is idle, or use --allow-noise"
        )
    on_rank_0(comm, found.save, options.output)
    warning = [f"warning: {load}"] * bool(found.spreads)
    print(*describe(found), *warning, f"written to {options.output}", sep="\n")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    options = create_parser().parse_args(arguments)
    if not options.list and options.output.suffix not in (".yaml", ".yml"):
        raise ValueError(f"--output must be a file named *.yaml, got {options.output}; rename it")
    return options


def listing() -> str:
    """Return a line for each platform of the package: its name and the comment of its file."""
    names = platform_names()
    width = max(map(len, names))
    return "\n".join(f"{name:{width}}  {Platform.comment(name)}" for name in names)


def create_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="python -m pydtnn calibrate",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--output", type=Path, metavar="FILE.yaml", help="platform file to write")
    what.add_argument("--list", action="store_true", help="print the platforms of the package")
    parser.add_argument("--name", help="name of the platform (default: that of the file)")
    parser.add_argument("--threads", type=int, help="threads of a rank (default: as in training)")
    parser.add_argument("--isa", help="instruction set of the kernels: avx512, avx2 or generic")
    parser.add_argument(
        "--allow-noise", action="store_true", help="write the file on a machine under load, too"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
