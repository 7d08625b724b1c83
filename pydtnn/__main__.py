"""All commands as one: ``pydtnn COMMAND ...``, or ``python -m pydtnn``; it lists them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from pydtnn.utils.command import printing
from pydtnn.utils.errors import printable
from pydtnn.utils.names import unknown
from pydtnn.utils.version import __version__

COMMANDS = {
    "train": "train a network on this process, or on the ranks of mpirun",
    "launch": "start a training run, and start it again after a failure",
    "recipes": "values of options that reach an accuracy in the least time",
    "search": "search for hyper-parameters over the ranks of a job",
    "predict": "predict the classes of images with a saved model",
    "runs": "a table of runs, and what differs between them",
    "report": "one HTML page about runs",
    "checkpoint": "list and verify the checkpoints of a run",
    "trace": "summarise, compare and export what every rank did",
    "oracle": "predict the time of all parallel strategies on a platform",
    "calibrate": "measure the platform of a job",
    "info": "this machine and this installation",
    "data": "pack folders of images into shards, and verify them",
    "interchange": "convert weights and networks of other programs",
    "comm": "draw and check allreduce schedules",
    "model.pipeline": "draw schedules of pipelines",
    "testing": "check a scheme, layer, loss or plan",
    "completion": "complete commands and options in bash, zsh and fish",
}
"""Commands, and what they do: ``pydtnn NAME`` is ``python -m pydtnn NAME``."""

ELSEWHERE = {
    "comm": "tools.schedules.allreduce",
    "data": "tools.shards",
    "model.pipeline": "tools.schedules.pipeline",
    "oracle": "tools.perfmodel.oracle",
    "calibrate": "tools.perfmodel.calibration",
    "train": "train",
}
"""Modules of commands that are not `tools.NAME`."""

HELP = ("-h", "--help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, or print their list; return the exit status, 1 if there is no such command.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default: the arguments of this process.
    """
    name, *rest = [*(sys.argv[1:] if arguments is None else arguments), ""]
    absent = find_spec("pydtnn.tools") is None
    tools = {*COMMANDS} - {"train"} if absent else set[str]()
    if name in tools:
        print(f"pydtnn: {name} requires the tools of pydtnn, not installed here", file=sys.stderr)
        return 1
    if name in COMMANDS:
        return module_of(name).main(rest[:-1])
    if name and name not in HELP:
        if name == "--version":
            print(f"pydtnn {__version__}")
            return 0
        print(printable(f"pydtnn: {unknown('command', name, COMMANDS)}"), file=sys.stderr)
        return 1
    with printing():
        print(f"pydtnn {__version__}: pydtnn COMMAND --help, or python -m pydtnn COMMAND --help\n")
        width = max(map(len, COMMANDS))
        for name, purpose in COMMANDS.items():
            if name not in tools:
                print(f"{name:{width}}  {purpose}")
    return 0


def module_of(name: str) -> ModuleType:
    """Return the module with the ``main`` of a command."""
    module = f"pydtnn.{ELSEWHERE.get(name, f'tools.{name}')}"
    spec = find_spec(module)
    package = spec is not None and spec.submodule_search_locations is not None
    return import_module(f"{module}.__main__" if package else module)


if __name__ == "__main__":
    sys.exit(main())
