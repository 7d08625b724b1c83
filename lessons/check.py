"""Exercises: lessons with a statement left out.

    python lessons/check.py make 02     # writes exercise_02.py to the current folder
    python lessons/check.py 02          # says whether it is filled in rightly

In each lesson a comment, ``# exercise: ...``, is before the statement that is left out. A solution
is right if the lesson's own assertions hold on 1, 2, 3 and 4 ranks.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parent
MARK = "# exercise: "


def lesson_of(number: str) -> Path:
    """Return the file of a lesson."""
    found = [*FOLDER.glob(f"{number}_*.py")]
    if len(found) != 1:
        raise SystemExit(f"check: expected the number of a lesson such as 02, got {number!r}")
    return found[0]


def lesson(number: str) -> ModuleType:
    """Return the module of a lesson."""
    return importlib.import_module(lesson_of(number).stem)


def with_hole(text: str) -> str:
    """Return a lesson without the statement after the comment of the exercise."""
    lines = text.split("\n")
    at = next(i for i, line in enumerate(lines) if line.strip().startswith(MARK))
    statement = next(
        node for node in ast.walk(ast.parse(text)) if getattr(node, "lineno", 0) == at + 2
    )
    indent, _, task = lines[at].partition(MARK)
    hole = f'{indent}raise NotImplementedError("{task}")  # write your solution here'
    lines[at + 1 : statement.end_lineno] = [hole]
    return "\n".join(lines)


def check(path: Path) -> str:
    """Return the last line of the first error on 1, 2, 3 or 4 ranks; "" if there is none."""
    program = "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); sys.argv.pop(0); "
    program += "runpy.run_path(sys.argv[0], run_name='__main__')"
    for ranks in (1, 2, 3, 4):
        command = [sys.executable, "-c", program, str(FOLDER), str(path), f"--ranks={ranks}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{ranks} ranks: {done.stderr.strip().splitlines()[-1]}"
    return ""


def main() -> int:
    """Write an exercise, or check a solution; return 1 if it is wrong."""
    parser = argparse.ArgumentParser(prog="lessons/check.py", description=main.__doc__)
    parser.add_argument("words", nargs="+", metavar="make 02 | 02", help="what to do")
    words = parser.parse_args().words
    path = Path(f"exercise_{words[-1]}.py")
    lesson = lesson_of(words[-1])
    if words[:-1] == ["make"]:
        if path.exists():
            raise SystemExit(f"check: {path} exists; move it to begin again")
        path.write_text(with_hole(lesson.read_text()))
        print(f"wrote {path}: fill in the line with NotImplementedError, then check it")
        return 0
    if words[:-1]:
        parser.error(f"expected make 02 or 02, got {' '.join(words)!r}")
    if not path.exists():
        raise SystemExit(f"check: {path} does not exist; write it by: check.py make {words[-1]}")
    error = check(path)
    print(error or f"exercise {words[-1]} is right, on 1, 2, 3 and 4 ranks")
    return int(bool(error))


if __name__ == "__main__":
    sys.exit(main())
