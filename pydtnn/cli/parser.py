"""The command line of `pydtnn.train`, derived from `TrainConfig`."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydtnn.cli.config import GROUPS, REMOVED, Flag, TrainConfig, flags
from pydtnn.utils import plain_yaml
from pydtnn.utils.command import ALL, HelpFormatter, Parser, help_columns
from pydtnn.utils.files import read_file
from pydtnn.utils.names import answer, foreign_names, key_of, unknown
from pydtnn.utils.version import __version__

EXAMPLES = """examples:
  mpirun -np 2 python -m pydtnn.train --dataset cifar10 --augment crop:4,flip
  python -m pydtnn.train --recipe mnist-99 --print-config > run.yaml
  python -m pydtnn.train --config run.yaml --output-dir runs/mine
  python -m pydtnn.train --resume runs/mine --epochs 8
"""

RECIPES = Path(__file__).parent / "recipes"
"""Folder of the recipes: files of `--config` that are part of the package."""

NAMES = "names"
"""Section of the help page with the names that options accept."""

ESSENTIAL = (
    *("model", "dataset", "data_dir", "augment", "epochs", "batch_size", "loss", "metrics"),
    *("optimizer", "lr", "schedule", "output_dir", "save", "load", "resume", "evaluate_only"),
    *("device", "dtype", "threads", "scheme", "parallel", "recipe", "config", "print_config"),
)
"""Options that the short help page contains, in the order of use."""


Setting = tuple[Flag, Any, bool]
"""An option, its value, and whether that is a text to be read."""


class Arguments:
    """The arguments of a command line, before values are checked.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default: the arguments of this process.

    Attributes
    ----------
    folder : str or None
        Value of `--resume`.
    given : set of str
        Names of the options that are set.

    Raises
    ------
    ValueError, TypeError, OSError
        If an option is unknown, or a file of `--config` is invalid.
    SystemExit
        After --help and --version.
    """

    def __init__(self, arguments: Sequence[str] | None = None) -> None:
        given = sys.argv[1:] if arguments is None else arguments
        parser = create_parser()
        known = [name for action in parser._actions for name in action.option_strings]
        texts = vars(parser.parse_args(list(_join_dictionaries(_translate(given, known)))))
        self._printing = texts.pop("print_config", False)
        files = [*map(recipe_file, texts.pop("recipe", [])), *texts.pop("config", [])]
        sources = [*map(_read_file, files), _read_texts(texts)]
        self._values = [setting for source in sources for setting in _names_first(source)]
        self.given = {own.name for own, *_ in self._values}
        resume = texts.get("resume")
        self.folder = resume if isinstance(resume, str) else None
        if self.folder == "":
            raise ValueError("train: --resume must not be empty; name the folder of a run")
        if self.folder is not None:
            self._values = [item for item in self._values if item[0].name != "resume"]
            if "output_dir" in self.given:
                raise ValueError(
                    f"train: --resume {self.folder} continues in that folder; omit --output-dir"
                )

    def configure(self, start: Mapping[str, Any] | None = None) -> TrainConfig:
        """Return the configuration.

        Parameters
        ----------
        start : mapping, optional
            Values of options that the arguments override.

        Raises
        ------
        TypeError, ValueError
            If a value has a wrong type or is out of range.
        SystemExit
            After --print-config.
        """
        values = dict(start or {})
        for own, given, is_text in self._values:
            before = values.get(own.name)
            value = _read_value(own, given, before) if is_text else given
            if before not in (None, value) and own.metavar == "NAME" and "options" in own.members:
                values.pop(own.members["options"].name, None)  # they are those of another name
            values[own.name] = value
        config = TrainConfig(**values)
        if self._printing:
            lines = (f"{name}: {plain_yaml.dump(v)}\n" for name, v in asdict(config).items())
            print("".join(lines), end="")
            raise SystemExit(0)
        return config


def parse(arguments: Sequence[str] | None = None) -> TrainConfig:
    """Parse a command line without ``--resume FOLDER`` into a configuration: see `Arguments`."""
    return Arguments(arguments).configure()


def _translate(arguments: Sequence[str], known: Sequence[str]) -> Iterator[str]:
    """Replace names of other programs, and underscores in names, in a command line.

    Parameters
    ----------
    arguments : sequence of str
    known : sequence of str
        The options of the parser, such as "--lr".

    Raises
    ------
    ValueError
        For a name whose meaning differs or depends on the program; the message contains what to
        type instead.
    """
    for argument in arguments:
        name, equals, value = argument.partition("=")
        flag, dot, item = name.partition(".")
        if flag.startswith("-") and flag not in known:
            flag = flag.replace("_", "-")
            if flag not in known:
                if hint := answer("options", flag):
                    raise ValueError(f"train: there is no option {flag}{hint}")
                flag = foreign_names()["aliases"].get(key_of(flag), flag)
        yield flag + dot + item + equals + value


def _join_dictionaries(arguments: Iterable[str]) -> Iterator[str]:
    """Rewrite ``--model-options.shortcut A`` as one argument, ``--model-options=.shortcut=A``."""
    dictionaries = [own.spelling for own in flags(TrainConfig).values() if own.kind is dict]
    rest = iter(arguments)
    for argument in rest:
        flag, dot, item = argument.partition(".")
        if dot and flag in dictionaries:
            if "=" not in item:
                item = f"{item}={next(rest, '')}"
            argument = f"{flag}=.{item}"
        yield argument


def recipe_names() -> list[str]:
    """Return the names of the recipes, in alphabetical order."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def recipe_file(name: str) -> Path:
    """Return the path of a recipe.

    Raises
    ------
    ValueError
        If the name is unknown; the message contains the nearest one.
    """
    if name not in (names := recipe_names()):
        raise ValueError(f"train: {unknown('recipe', name, names)}")
    return RECIPES / f"{name}.yaml"


def _read_file(file: str | Path) -> Iterator[Setting]:
    """Yield the options in a YAML file."""
    who = "train: --config"
    try:
        text = read_file(who, file, plain_yaml.MAX_B).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{who}: expected text in UTF-8 in {file} ({error})") from error
    try:
        content = plain_yaml.load(text)
    except ValueError as error:
        raise ValueError(f"{who}: the file is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        start = " ".join(text.split())[:40]
        raise ValueError(f"{who}: expected lines such as 'epochs: 3' in {file}, got {start!r}")
    known, seen = flags(TrainConfig), set()
    for key, value in content.items():
        name = key.replace("-", "_")
        if name in REMOVED:  # what an earlier version has printed has all options
            if value not in (None, False, "auto"):
                raise ValueError(f"{who}: {key} has been removed: {REMOVED[name]}")
            continue
        if name not in known:
            raise ValueError(_nearest("key in the configuration file", key, [*known]))
        if name in seen:
            raise ValueError(f"{who}: key {name!r} occurs twice; remove one of them")
        own = known[name]
        if own.kind is str and not isinstance(value, str | None):
            raise TypeError(f"{who}: {name} must be text, got {value!r}; quote it")
        seen.add(name)
        parts = [*own.parts(value)] if isinstance(value, str) else []
        if len(parts) > 1:
            yield from ((*part, True) for part in parts)
        else:
            yield own, value, False


def _read_texts(texts: Mapping[str, Any]) -> Iterator[Setting]:
    """Yield the options of the command line."""
    for name, found in texts.items():
        for text in found if isinstance(found, list) else [found]:
            own, is_text = flags(TrainConfig)[name], isinstance(text, str)
            for part in own.parts(text) if is_text else [(own, text)]:
                yield *part, is_text


def _names_first(settings: Iterable[Setting]) -> list[Setting]:
    """Sort settings of one source: a name comes before the options of what it names."""
    return sorted(settings, key=lambda setting: setting[0].metavar != "NAME")


def _read_value(own: Flag, text: Any, before: Any) -> Any:
    """Convert an argument of the command line to a value; `before` is the option's value so far."""
    if text is True:
        return text
    if text == "null" and own.optional:
        return None
    if own.kind is dict:
        item = re.fullmatch(r"\.([^=]*)=(.*)", text, re.DOTALL)
        try:
            value = plain_yaml.load(item[2] if item else text)
        except ValueError as error:
            raise ValueError(f"train: {own.label}: {error}") from error
        if item:
            for key in reversed(item[1].split(".")):
                value = {key: value}
            value = {**(before or {}), **value}
        return own.check(value)
    if own.kind is str:
        return text
    value = plain_yaml.scalar(text.strip())
    return text if value is None else value


class _Parser(Parser):
    """Parser that raises its errors as exceptions with a one-sentence message."""

    def error(self, message: str) -> Any:
        raise _explain(" ".join(message.split()))

    def format_help(self, section: str = ALL) -> str:
        if section:
            self.sections[NAMES].description = _names()
        return super().format_help(section)


def create_parser() -> _Parser:
    """Return the parser, in which values are text."""
    parser = _Parser(
        prog="python -m pydtnn.train",
        usage="[mpirun -np RANKS] python -m pydtnn.train [options]",
        description="Train a network over the ranks that mpirun started, or in this process alone.",
        epilog=EXAMPLES,
        essential=ESSENTIAL,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    shown = "show the version and exit"
    parser.add_argument("--version", action="version", version=f"pydtnn {__version__}", help=shown)
    read = "read options from this file of the package: pydtnn recipes lists them"
    parser.add_argument("--recipe", action="append", metavar="NAME", help=read)
    read = "read options from this YAML file; the command line overrides them"
    parser.add_argument("--config", action="append", metavar="FILE", help=read)
    shown = "print all options as YAML and exit"
    parser.add_argument("--print-config", action="store_true", help=shown)
    keywords: dict[str, Any]
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    for own in flags(TrainConfig).values():
        group, keywords = groups[own.group], {"help": _help(own)}
        if own.kind is bool and not (own.metavar or own.members):
            keywords["action"] = argparse.BooleanOptionalAction
        elif own.kind is bool:
            keywords |= {"nargs": "?", "const": True, "metavar": own.metavar or "NAME=VALUE,..."}
            no = f"--no-{own.spelling[2:]}"
            group.add_argument(no, dest=own.name, action="store_false", help=argparse.SUPPRESS)
        else:
            repeated = own.members or own.kind is dict
            keywords |= {"metavar": own.metavar, "action": "append" if repeated else "store"}
        group.add_argument(own.spelling, **keywords)
    parser.add_argument_group(NAMES)
    parser.removed = {"--" + name.replace("_", "-"): use for name, use in REMOVED.items()}
    return parser


def _help(own: Flag) -> str:
    """Return the description of an option with those in its value, each on lines of its own."""
    if own.owner:
        return argparse.SUPPRESS
    lines = []
    for flag in (own, *own.members.values()):
        default = f" (default: {flag.default})" if flag.default and flag.default is not True else ""
        name = "" if flag is own else f"  {flag.key}={flag.metavar or 'true|false'}: "
        lines.append(f"{name}{flag.help}{default}")
    return "\n".join(lines).replace("%", "%%")


def _names() -> str:
    """Return the list of available names, a section of the help page."""
    from pydtnn.cli.parts import PARTS

    widest = max(map(len, PARTS))
    lines = [
        textwrap.fill(
            ", ".join(kind.entries),
            help_columns() - 2,
            initial_indent=f"{option:<{widest}}  ",
            subsequent_indent=" " * (widest + 2),
        )
        for option, kind in PARTS.items()
    ]
    return "\n".join(lines)


def _explain(message: str) -> Exception:
    """Convert a message of argparse to one sentence, with the nearest name for an unknown one."""
    own = flags(TrainConfig)
    names = [
        *(o.label for o in own.values() if not o.owner),
        *("--recipe", "--config", "--print-config"),
        "--help",
        "--version",
    ]
    if match := re.search(r"unrecognized arguments: ([^\s=]+)", message):
        if match[1].startswith("-"):
            return ValueError(_nearest("option", match[1], names))
        return ValueError(f"train: unexpected argument {match[1]!r}; options begin with --")
    message = re.sub(
        r"argument .*?(--[\w-]+): expected one argument", r"\1 requires a value", message
    )
    if match := re.search(r"argument .*?(--[\w-]+).*: ignored explicit argument '(.*)'", message):
        return ValueError(f"train: {match[1]} must have no value, got {match[2]!r}; remove it")
    return ValueError(f"train: {message}")


def _nearest(kind: str, name: str, choices: list[str]) -> str:
    """Return the message for an unknown name, without the full list if no name is near."""
    return "train: " + re.sub(r"; choose one of .*", "; see --help", unknown(kind, name, choices))
