"""The command line of `pydtnn.train`, derived from `TrainConfig`."""

from __future__ import annotations

import re
from argparse import Action
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

import jsonargparse

from pydtnn.config import GROUPS, TrainConfig, options
from pydtnn.suggest import unknown

EXAMPLES = """examples:
  python -m pydtnn.train --model resnet20 --epochs 5
  mpirun -np 2 python -m pydtnn.train --model resnet20 --dataset cifar10 --augment crop:4,flip
  python -m pydtnn.train --config run.yaml --lr 0.2
  python -m pydtnn.train --output-dir runs/mine --epochs 20 --resume
"""


class _Help(jsonargparse.DefaultHelpFormatter):
    """Help without the types' names: the defaults show them."""

    def _get_help_string(self, action: Action) -> str:
        shown = action.default not in (None, "", {}, False) and action.dest not in (
            "help",
            "config",
        )
        return f"{action.help or ''} (default: {action.default})" if shown else action.help or ""


class _Parser(jsonargparse.ArgumentParser):
    """A parser whose errors are one sentence, raised as `ValueError`."""

    def error(self, message: str, ex: Exception | None = None) -> Any:
        raise ValueError(_sentence(message, self.flags()))

    def flags(self) -> list[str]:
        """Names of all options, without the dashes."""
        return [f.name.replace("_", "-") for f in fields(TrainConfig)] + ["config", "print-config"]


def parse(arguments: Sequence[str] | None = None) -> TrainConfig:
    """Read the command line, and the YAML files it names, into a configuration.

    Parameters
    ----------
    arguments : sequence of str, optional
        By default those of this process.

    Raises
    ------
    ValueError
        In one sentence, for an unknown option or key, a value of the wrong type or out of range.
    SystemExit
        After --help and --print-config.
    """
    values = _parser().parse_args(arguments).as_dict()
    values.pop("config", None)
    return TrainConfig(**{name.replace("-", "_"): value for name, value in values.items()})


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m pydtnn.train",
        usage="python -m pydtnn.train [options], or mpirun -np RANKS python -m pydtnn.train
        [options]", description="Train a network over the ranks that mpirun started, or in this
        process alone.", epilog=EXAMPLES,
        formatter_class=_Help,
        print_config="--print-config",
    )
    parser.add_argument("--config", action="config", help="read options from this YAML file")
    hints = get_type_hints(TrainConfig)
    for group in GROUPS:
        section = parser.add_argument_group(group)
        for option in options(group):
            default = option.default if option.default is not MISSING else {}
            kind: dict[str, Any] = {"type": hints[option.name]}
            if hints[option.name] is bool:
                kind = {"action": jsonargparse.ActionYesNo(no_prefix="no-")}
            flag = "--" + option.name.replace("_", "-")
            section.add_argument(flag, default=default, help=option.metadata["help"], **kind)
    return parser


def _sentence(message: str, flags: list[str]) -> str:
    """Turn a parser's message into one sentence with the flag's name, and the nearest if it is unknown."""
    text = " ".join(message.split())
    if match := re.search(r"unrecognized arguments: (--)?([\w-]+)", text):
        return unknown("option" if match[1] else "argument", match[2], flags)
    if match := re.search(r"Option '([\w.-]+)' is not accepted", text):
        return unknown(
            "key in the configuration file", match[1], [f.replace("-", "_") for f in flags]
        )
    if match := re.search(r'Parser key "([\w.-]+)": (.*)', text):
        text = re.sub(r"<class '(\w+)'>|typing\.", lambda m: m[1] or "", match[2])
        text = text.replace("Expected a", "expected a").replace(". Got value:", ", got")
        return f"--{match[1].replace('_', '-')}: {text}"
    return text
