"""List recipes, values of options that reach an accuracy: ``python -m pydtnn recipes``.

A recipe is a file of options, as those of ``train --config``: ``train --recipe NAME`` reads it, and
options of the command line override its values. The comment at its beginning says what to expect.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence

from pydtnn.cli.parser import recipe_file, recipe_names
from pydtnn.utils.command import Parser, help_columns, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the recipes, or one of them; return the exit status, 0 on success."""
    return run_command("pydtnn recipes", lambda: _run(arguments))


def create_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser("python -m pydtnn recipes", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipe", nargs="?", help="print its options; by default a list")
    return parser


def _run(arguments: Sequence[str] | None) -> None:
    name = create_parser().parse_args(arguments).recipe
    if name is not None:
        print(recipe_file(name).read_text(), end="")
        return
    width = max(map(len, recipe_names()))
    for name in recipe_names():
        lines = recipe_file(name).read_text().splitlines()
        about = " ".join(line.removeprefix("# ") for line in lines if line.startswith("#"))
        first, then = f"{name:{width}}  ", " " * (width + 2)
        print(textwrap.fill(about, help_columns(), initial_indent=first, subsequent_indent=then))


if __name__ == "__main__":
    sys.exit(main())
