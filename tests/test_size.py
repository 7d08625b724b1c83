"""Lines of code are counted by folder, and held to a budget."""

from __future__ import annotations

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


def test_a_folder_above_its_budget_is_named(tmp_path, capsys):
    (tmp_path / "pydtnn").mkdir()
    (tmp_path / "pydtnn/a.py").write_text("x = 1\ny = 2\n")
    for budget, status in ((2, 0), (1, 1)):
        text = f"[tool.pydtnn.lines_of_code]\npydtnn = {budget}\n"
        (tmp_path / "pyproject.toml").write_text(text)
        assert main([], tmp_path) == status
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "pydtnn: 1 lines of code more than the budget in pyproject.toml"
