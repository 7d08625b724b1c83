"""Completion of commands, options and their values in bash, zsh and fish.

The script of a shell contains a table of all options, which is derived from the parsers when it is
printed, so that a completion starts no program: it would take a second to import all names. Each
line of the table is COMMAND|NAME|KIND|VALUES|DESCRIPTION: an option, a sub-command, or "*" for
other arguments. The kinds are "-" for an option without a value, ">" for a sub-command, and what a
value is:

- "c": one of the values;
- "v": one of the values, or a file;
- "l": a list of values, separated by commas;
- "f", "d", "r": a file, a folder, or the folder of a run;
- "=": anything else, such as a number.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from pydtnn.cli.parser import recipe_names
from pydtnn.cli.parts import PARTS
from pydtnn.kernels.dtypes import DTYPES
from pydtnn.tools.perfmodel.oracle.ranking import KINDS
from pydtnn.tools.perfmodel.oracle.what_if import SWEEPS
from pydtnn.tools.perfmodel.platform import platform_names
from pydtnn.tools.runs.table import COLUMNS
from pydtnn.utils.command import ALL, Parser, first_clause, run_command

SHELLS = ("bash", "zsh", "fish")

LISTS = ("LIST", "NAMES")
"""Placeholders of lists."""

FILES = ("FILE", "FILE.yaml", "FILE.py:CLASS", "PATH", "NETWORK")

FOLDERS = ("FOLDER", "SHARDS", "folder", "before", "after", "shards")

RUNS = ("resume", "runs", "diff")
"""Destinations of arguments that are folders of runs."""


def values_by_name() -> dict[str, Sequence[str]]:
    """Return the names that arguments accept, by destination; without dashes, of a command."""
    return {
        **{name: [*registry.entries] for name, registry in PARTS.items()},
        "platform": platform_names(),
        "recipe": recipe_names(),
        "strategies": [*KINDS],
        "sweep": [*SWEEPS],
        "sort": [*COLUMNS],
        "dtype": [*DTYPES],
        "device": ["cpu", "cuda", "numpy"],
        "comm name": [*PARTS["allreduce"].entries],
    }


def table(commands: Mapping[str, str]) -> list[str]:
    """Return the lines of the table.

    Parameters
    ----------
    commands : mapping of str to str
        Descriptions of the commands by name.
    """
    known = values_by_name()
    lines = [f"|{name}|>||{text}" for name, text in commands.items()]
    for name in commands:
        lines += _lines(name, parser_of(name), known)
    return lines


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command."""
    module = import_module("pydtnn.cli.parser" if command == "train" else _home(command))
    parser: argparse.ArgumentParser = module.create_parser()
    return parser


def _home(command: str) -> str:
    from pydtnn.__main__ import module_of

    return str(module_of(command).main.__module__)


def _lines(
    path: str, parser: argparse.ArgumentParser, known: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            texts = {choice.dest: choice.help for choice in action._choices_actions}
            for name, sub in action.choices.items():
                yield f"{path}|{name}|>||{texts.get(name) or ''}"
                yield from _lines(f"{path} {name}", sub, known)
            continue
        if action.help == argparse.SUPPRESS:
            continue
        kind, values = _kind(path, action, known)
        if action.dest == "help" and isinstance(parser, Parser) and parser.essential:
            kind, values = "c", [title.split()[0] for title in parser.sections] + [ALL]
        text = " ".join(first_clause(action.help or "").replace("%%", "%").split())
        for name in action.option_strings or ["*"]:
            if name.startswith("--") or name == "*":
                yield f"{path}|{name}|{kind}|{' '.join(values)}|{text}"


def _kind(
    path: str, action: argparse.Action, known: Mapping[str, Sequence[str]]
) -> tuple[str, Sequence[str]]:
    """Return the kind of an argument, and its values."""
    if action.nargs == 0:
        return "-", []
    shown = action.metavar if isinstance(action.metavar, str) else action.dest
    named = action.dest if action.option_strings else f"{path.split()[0]} {action.dest}"
    names = known.get(named)
    if action.choices is not None:
        return "c", [*map(str, action.choices)]
    if shown.startswith("{"):
        return "c", shown.strip("{}").split(",")
    if names is not None:
        return "l" if shown in LISTS else "v", names
    if action.dest in RUNS:
        return "r", []
    if shown in FOLDERS:
        return "d", []
    of_file = shown in FILES or action.dest == "output" or not action.option_strings
    return ("f" if of_file else "="), []


def script(shell: str, commands: Mapping[str, str]) -> str:
    """Return the script of a shell, one of `SHELLS`."""
    text = "\n".join(table(commands))
    quoted = shlex.quote(text)
    if shell == "fish":
        quoted = "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return Path(__file__).with_suffix(f".{shell}").read_text().replace("@TABLE@", quoted)


EXAMPLES = """to use it in new shells:
  pydtnn completion bash > ~/.pydtnn.bash; echo 'source ~/.pydtnn.bash' >> ~/.bashrc
  pydtnn completion zsh > ~/.pydtnn.zsh; echo 'source ~/.pydtnn.zsh' >> ~/.zshrc
  pydtnn completion fish > ~/.config/fish/conf.d/pydtnn.fish
"""


def create_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        "python -m pydtnn completion",
        description="Print a script that completes commands, options and values in a shell: also "
        "behind python -m and mpirun.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the script of a shell; return the exit status, 0 on success."""
    from pydtnn.__main__ import COMMANDS

    def run() -> None:
        print(script(create_parser().parse_args(arguments).shell, COMMANDS), end="")

    return run_command("pydtnn completion", run)


if __name__ == "__main__":
    sys.exit(main())
