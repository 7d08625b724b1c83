"""Lines of code are counted by folder, compared with a commit, and held to a budget."""

from __future__ import annotations

import subprocess

from tests.size import lines_of_code, main

SOURCE = '''"""A module."""

import os  # a comment


class A:
    """A class.

    With two paragraphs.
    """

    x = """
a text
"""
    """About x."""

    def f(self):
        """Return."""
        # nothing
        return (
            1
        )
'''


def test_blank_lines_comments_and_docstrings_are_not_counted():
    assert lines_of_code(SOURCE) == 1 + 1 + 3 + 1 + 1 + 3
    assert lines_of_code("") == 0


def test_a_folder_above_its_budget_is_named_and_changes_are_counted(tmp_path, capsys):
    def write(**files: str) -> None:
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_py", ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def git(*arguments: str) -> None:
        own = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *own, *arguments], cwd=tmp_path, check=True, capture_output=True)

    budgets = "[tool.pydtnn.lines_of_code]\npydtnn = 3\ntests = 3\n"
    (tmp_path / "pyproject.toml").write_text(budgets)
    write(pydtnn__a__b_py="x = 1\ny = 2\n", pydtnn__c_py="x = 1\n", tests__old_py="x = 1\n")
    assert main([], tmp_path) == 0  # not in a repository
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    write(pydtnn__a__b_py="x = 1\n", pydtnn__d_py="x = 1\ny = 2\n")
    (tmp_path / "tests/old.py").unlink()
    git("add", ".")
    capsys.readouterr()
    assert main(["--since", "HEAD"], tmp_path) == 1
    _, *rows, last = capsys.readouterr().out.splitlines()
    assert [row.split() for row in rows] == [
        ["pydtnn", "4", "3", "+1"],
        ["pydtnn/*.py", "3", "+2"],
        ["pydtnn/a", "1", "-1"],
    ]
    assert last == "pydtnn: 1 lines of code more than the budget in pyproject.toml"
