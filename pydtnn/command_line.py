"""The command line of `pydtnn.train`, derived from `TrainConfig`."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from argparse import Action, RawDescriptionHelpFormatter
from collections.abc import Sequence
from typing import Any

import jsonargparse

from pydtnn.config import TrainConfig
from pydtnn.options import Option, options
from pydtnn.suggest import unknown

EXAMPLES = """examples:
  python -m pydtnn.train --model resnet20 --epochs 5
  mpirun -np 2 python -m pydtnn.train --dataset cifar10 --augment crop:4,flip
  python -m pydtnn.train --print-config > run.yaml
  python -m pydtnn.train --config run.yaml --output-dir runs/mine
  python -m pydtnn.train --config run.yaml --output-dir runs/mine --resume
"""

WIDEST = 100
"""Columns of the help page, at most."""

CONFIG = {
    "config": ("--config FILE", "read options from this YAML file; the command line wins"),
    "print_config": ("--print-config", "print all options as YAML, and leave"),
    "help": ("-h, --help", "show this page, and leave"),
}
"""What the help page says of the options that are no part of the configuration."""


def parse(arguments: Sequence[str] | None = None) -> TrainConfig:
    """Read the command line, and the YAML files it names, into a configuration.

    Parameters
    ----------
    arguments : sequence of str, optional
        By default those of this process.

    Raises
    ------
    TypeError, ValueError
        In one sentence, for an unknown option or key, a value of another type or out of range.
    SystemExit
        After --help and --print-config.
    """
    given = sys.argv[1:] if arguments is None else arguments
    try:
        values = _parser().parse_args(_files_first(given)).as_dict()
    except BrokenPipeError:  # of the help page's reader, not of a file
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"train: --config: {error}") from error
    values.pop("config", None)
    return TrainConfig(**values)


def _files_first(arguments: Sequence[str]) -> list[str]:
    """Move the configuration files to the front, as what is read later wins."""
    files: list[str] = []
    others: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--config" and (file := next(rest, None)) is not None:
            files += [argument, file]
        else:
            (files if argument.startswith("--config=") else others).append(argument)
    return files + others


class _Parser(jsonargparse.ArgumentParser):
    """A parser whose errors are one sentence, raised as an exception."""

    def error(self, message: str, ex: Exception | None = None) -> Any:
        raise _explain(" ".join(message.split()))

    def format_help(self, *args: Any) -> str:
        self.epilog = f"{_names()}\n{EXAMPLES}"
        return super().format_help(*args)


class _Help(RawDescriptionHelpFormatter, jsonargparse.DefaultHelpFormatter):
    """A help page with short placeholders and without types, which the defaults show."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=_columns())

    def _format_action_invocation(self, action: Action) -> str:
        if action.dest in CONFIG:
            return CONFIG[action.dest][0]
        return _invocation(options(TrainConfig)[action.dest])

    def _get_help_string(self, action: Action) -> str:
        if action.dest in CONFIG:
            return CONFIG[action.dest][1]
        own = options(TrainConfig)[action.dest]
        shown = own.default and own.default is not True
        return f"{own.help} (default: {own.default})" if shown else own.help

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)  # names of options stay whole


def _columns() -> int:
    return min(shutil.get_terminal_size().columns - 2, WIDEST)


def _invocation(own: Option) -> str:
    """Write an option as it is used: "--lr X", "--[no-]overlap"."""
    if own.kind is bool:
        return own.flag.replace("--", "--[no-]")
    return f"{own.flag} {own.metavar or '{' + ','.join(own.choices) + '}'}"


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m pydtnn.train",
        usage="[mpirun -np RANKS] python -m pydtnn.train [options]",
        description="Train a network over the ranks that mpirun started, or in this process alone.",
        formatter_class=_Help,
        print_config="--print-config",
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config")
    groups: dict[str, Any] = {}
    for own in options(TrainConfig).values():
        group = groups.setdefault(own.group, None) or parser.add_argument_group(own.group)
        groups[own.group] = group
        kind: dict[str, Any] = {"type": own.hint}
        if own.kind is bool:
            kind = {"action": jsonargparse.ActionYesNo(no_prefix="no-")}
        group.add_argument(own.flag, default=own.default, help=own.help, **kind)
    return parser


def _names() -> str:
    """List what can be named, for the end of the help page."""
    from pydtnn.comm.compression import COMPRESSORS
    from pydtnn.comm.schedules.auto import NAMES
    from pydtnn.comm.schemes import SCHEMES
    from pydtnn.data import AUGMENTATIONS, DATASETS
    from pydtnn.losses import LOSSES
    from pydtnn.metrics import METRICS
    from pydtnn.models import MODELS
    from pydtnn.optimizers import OPTIMIZERS
    from pydtnn.schedules import SCHEDULES as RATES

    kinds = {
        "models": MODELS,
        "data sets": DATASETS,
        "augmentations": AUGMENTATIONS,
        "losses": LOSSES,
        "metrics": METRICS,
        "optimizers": OPTIMIZERS,
        "schedules": RATES,
        "schemes": SCHEMES,
        "compressors": COMPRESSORS,
        "allreduces": NAMES,
    }
    widest = max(map(len, kinds))
    lines = [
        textwrap.fill(
            ", ".join(names),
            _columns(),
            initial_indent=f"  {kind:<{widest}}  ",
            subsequent_indent=" " * (widest + 4),
        )
        for kind, names in kinds.items()
    ]
    return "\n".join(["names:", *lines, ""])


def _explain(message: str) -> Exception:
    """Turn a parser's message into one sentence, with the nearest name where one is unknown."""
    own = options(TrainConfig)
    flags = [*(o.flag for o in own.values()), "--config", "--print-config", "--help"]
    message = re.sub(r"^train: ", "", message)  # of ours, about a configuration file
    if match := re.search(r"unrecognized arguments: ([^\s=]+)", message):
        if match[1].startswith("-"):
            return ValueError(_nearest("option", match[1], flags))
        return ValueError(f"train: unexpected argument {match[1]!r}; options begin with --")
    if match := re.search(r"Option '([\w.-]+)' is not accepted", message):
        return ValueError(_nearest("key in the configuration file", match[1], [*own]))
    if match := re.search(r"argument .*?(--[\w-]+): expected one argument", message):
        return ValueError(f"train: {match[1]} needs a value")
    if match := re.search(r"argument .*?(--[\w-]+).*: ignored explicit argument '(.*)'", message):
        return ValueError(f"train: {match[1]} takes no value, so not {match[2]!r}")
    if match := re.search(r'Parser key "config": (.*)', message):
        return ValueError(f"train: --config: {match[1][0].lower()}{match[1][1:]}")
    if match := re.search(r'Parser key "(\w+)":.* (?:Got|Given) value: ?(.*)', message):
        if own[match[1]].kind is str:
            return TypeError(f"train: --config: {match[1]} must be text, not {match[2]}; quote it")
        return own[match[1]].wrong_type(match[2])
    if match := re.search(r"Problems parsing config: (.*)", message):
        return ValueError(f"train: --config: the file is not valid YAML: {match[1]}")
    if match := re.search(r"Unexpected config: ?(.{0,40})", message):
        return ValueError(
            f"train: --config: the file must hold lines like 'epochs: 3', not {match[1]!r}"
        )
    if match := re.search(r"Value not boolean: (.*)\.", message):
        return TypeError(
            "train: --config: expected true or false for one of "
            f"{', '.join(o.name for o in own.values() if o.kind is bool)}, not {match[1]}"
        )
    return ValueError(f"train: {message}")


def _nearest(kind: str, name: str, choices: list[str]) -> str:
    """Offer the nearest of many names, but not all of them where none is near."""
    return re.sub(r"; choose one of .*", "; see --help", unknown(kind, name, choices))
