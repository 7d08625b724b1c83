"""docs/tour.md: its files and functions exist, and it is as short as it says."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs/tour.md").read_text()
FILES, *WALKS = TEXT.split("\n## ")[1:]
STOPS = sorted(set(re.findall(r"(?:`([\w.]+)`\s+in\s+)?`([a-z0-9_/]+\.py)`", TEXT)))


def defined(tree: ast.Module | ast.ClassDef) -> dict[str, ast.stmt]:
    kinds = ast.ClassDef | ast.FunctionDef
    return {node.name: node for node in tree.body if isinstance(node, kinds)}


@pytest.mark.parametrize(("name", "file"), STOPS)
def test_a_stop_exists(name: str, file: str) -> None:
    place: ast.stmt | ast.Module = ast.parse((ROOT / "pydtnn" / file).read_text())
    for part in filter(None, name.split(".")):
        assert isinstance(place, ast.Module | ast.ClassDef)
        assert part in defined(place), f"{file} has no {name}"
        place = defined(place)[part]


def test_twelve_files_have_at_most_2670_lines() -> None:
    files = re.findall(r"^\d+\. `([^`]+)`", FILES, re.M)
    assert len(files) == 12
    assert sum(len((ROOT / "pydtnn" / f).read_text().splitlines()) for f in files) <= 2670


@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.split("\n")[0])
def test_a_walk_has_at_most_ten_stops(walk: str) -> None:
    assert 6 <= len(re.findall(r"^\d+\. ", walk, re.M)) <= 10
