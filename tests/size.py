"""Lines of code by folder, beside those of the parent commit and a budget: ``make size``.

Counted are lines of Python without blank ones, comments and docstrings. Budgets are in
``pyproject.toml``: a change that needs more lines says what it made unnecessary, or raises the
budget in a commit of its own, with the reason.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
"""Tokens that make no line one of code."""


def lines_of_code(source: str) -> int:
    """Count lines without blank ones, comments and docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(ast.Constant(str())) as text, *_]:
                    docstrings.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - docstrings)


def rooms_of(file: str) -> list[str]:
    """Return where a file is counted: in its folder, and in the one of the library it is in."""
    top, inner, *_ = file.split("/")
    return [top, f"{top}/{inner if not inner.endswith('.py') else '*.py'}"][: 1 + (top == "pydtnn")]


def sizes(root: Path, folders: Sequence[str]) -> Counter[str]:
    """Return the lines of code by folder."""
    found: Counter[str] = Counter()
    for path in (path for folder in folders for path in (root / folder).rglob("*.py")):
        lines = lines_of_code(path.read_text())
        found.update(dict.fromkeys(rooms_of(path.relative_to(root).as_posix()), lines))
    return found


def changes(root: Path, folders: Sequence[str], commit: str) -> Counter[str]:
    """Return how many lines of code more there are than in a commit, by folder."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    found: Counter[str] = Counter()
    patterns = [f":(glob){folder}/**/*.py" for folder in folders]
    listed = git("diff", "--name-status", "--no-renames", commit, "--", *patterns)
    for status, file in (line.split("\t") for line in listed.splitlines()):
        before = "" if status == "A" else git("show", f"{commit}:{file}")
        after = "" if status == "D" else (root / file).read_text()
        more = lines_of_code(after) - lines_of_code(before)
        found.update(dict.fromkeys(rooms_of(file), more))
    return found


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Print lines of code; return 1 if a folder has more than its budget."""
    parser = argparse.ArgumentParser(prog="python -m tests.size", description=main.__doc__)
    parser.add_argument("--since", default="HEAD^", metavar="COMMIT", help="default: %(default)s")
    commit = parser.parse_args(arguments).since
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    budgets: dict[str, int] = settings["tool"]["pydtnn"]["lines_of_code"]
    lines = sizes(root, [*budgets])
    try:
        more = changes(root, [*budgets], commit)
    except (OSError, subprocess.CalledProcessError):  # no checkout, or the first of its commits
        more = Counter()
    print(f"{'':20}{'lines':>8}{'budget':>8}  since {commit}")
    for room in sorted(lines):
        print(f"{room:20}{lines[room]:8}{budgets.get(room, ''):>8}{more[room]:+8}")
    over = {folder: lines[folder] - most for folder, most in budgets.items()}
    for folder, number in over.items():
        if number > 0:
            print(f"{folder}: {number} lines of code more than the budget in pyproject.toml")
    return int(max(over.values()) > 0)


if __name__ == "__main__":
    sys.exit(main())
