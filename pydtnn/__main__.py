"""List the commands: ``python -m pydtnn``."""

from __future__ import annotations

import sys

from pydtnn import __version__
from pydtnn.utils.command import run_command
from pydtnn.utils.names import unknown

COMMANDS = {
    "train": "train a network on this process, or on the ranks of mpirun",
    "predict": "predict the classes of images with a saved model",
    "report": "one HTML page about runs",
    "trace": "summarise, compare and export what every rank did",
    "oracle": "predict the time of all parallel strategies on a platform",
    "calibrate": "measure the platform of a job",
    "info": "this machine and this installation",
    "data": "pack folders of images, and look at data sets",
    "interchange": "convert weights and networks of other programs",
    "comm": "draw and check allreduce schedules",
    "parallel.pipeline": "draw schedules of pipelines",
    "perfmodel.paradl": "the published performance model ParaDL",
    "testing": "check a scheme, layer, loss or plan",
}
"""Modules that are run, and what they do."""


def main(arguments: list[str]) -> int:
    """Print the commands; return the exit status, 1 if there is an argument."""
    return run_command("pydtnn", lambda: _print_commands(arguments))


def _print_commands(arguments: list[str]) -> None:
    if arguments and arguments[0] not in ("-h", "--help"):
        name, use = arguments[0], "use python -m pydtnn."
        hint = use + name if name in COMMANDS else unknown("command", name, COMMANDS)
        raise ValueError(f"expected no arguments; {hint}")
    print(f"pydtnn {__version__}: python -m pydtnn.COMMAND --help\n")
    width = max(map(len, COMMANDS))
    for name, purpose in COMMANDS.items():
        print(f"{name:{width}}  {purpose}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
