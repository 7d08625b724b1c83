"""Mutants are drawn from syntax trees by a seed, and the runner tells which of them are found."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from tests import mutants
from tests.mutants import EQUIVALENT, ROOT, draw, main

ERRORS = {
    "x = a + b * c": {"a - b * c": "arithmetic", "b / c": "arithmetic"},
    "x = 'é', a < b is c": {"a <= b is c": "comparison", "a < b is not c": "comparison"},
    "x = a and b": {"a or b": "boolean"},
    "x = -a, ~b, not c": {"x = (a), ~b": "unary", "(b), not": "unary", "~b, (c)": "unary"},
    "x = f(1), True": {"f(2)": "constant", "False": "constant"},
    "x = f((a), (b), c)": {"f((b), (a), c)": "arguments"},
    "if a: pass": {"if (not (a)): pass": "condition"},
    "x = [a for a in b if c]": {"if (not (c))]": "condition"},
    "f()": {"pass": "statement"},
    "a += b": {"pass": "statement", "a -= b": "arithmetic"},
    "a[i] = b": {"pass": "statement"},
    "for a in b: continue": {"for a in b: pass": "statement"},
}


def library(folder: Path, source: str, test: str = "") -> Path:
    """Write a checkout of a library of one module and its test."""
    files = {"pydtnn/a.py": source, "tests/test_a.py": test, "pyproject.toml": "[tool.pytest]"}
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize("source", ERRORS)
def test_each_kind_of_mutant_is_another_program(tmp_path, source):
    found = mutants.mutants(library(tmp_path, source))
    kinds = [name.split("::")[2] for name in found]
    assert kinds == [*ERRORS[source].values()]
    for part, mutant in zip(ERRORS[source], found.values(), strict=True):
        _, after = mutant.apply(tmp_path)
        assert part in after
        assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(source))


UNCHANGED = """
'''Text.'''
from a import b
a: Literal[1] = "x" + b
@cached(size=1)
def f(a: 1 | 2) -> -3:
    '''Text.'''
    assert a < 0
    if a is None or isinstance(a, b): raise ValueError(f"{a + 1}", 2)
    _log.warning("%d", a + 1)
    return zip(a, strict=True), max(a, b), f"{a - b}", a.reshape(-1, b), check_int("f", "a", a)
def __repr__(): return a + b
if TYPE_CHECKING: f(1, 2)
if sys.platform == "linux": f(1, 2)
"""


def test_texts_types_and_checks_of_invariants_stay_as_they_are(tmp_path):
    found = mutants.mutants(library(tmp_path, UNCHANGED))
    assert {*found} == {"pydtnn/a.py::f::boolean::1", "pydtnn/a.py::f::comparison::1"} | {
        "pydtnn/a.py::f::condition::1"
    }


def test_draws_are_those_of_their_seed_and_most_stay_when_mutants_are_added():
    names = [f"mutant {i}" for i in range(1000)]
    drawn = draw(names, 1, 20)
    assert drawn == draw(names[::-1], 1, 20)
    assert len({*drawn, *draw(names, 2, 20)}) > 30
    assert len({*drawn} & {*draw([*names, "new"], 1, 20)}) >= 19


@pytest.mark.tools
def test_mutants_of_the_library_compile_and_equivalent_ones_exist():
    names = tomllib.loads(EQUIVALENT.read_text())
    for file in {name.split("::")[0] for name in names}:
        found = mutants.mutants(ROOT, file)
        assert found.keys() >= {name for name in names if name.startswith(file)}
        for name in draw([*found], 1, 1):
            before, after = found[name].apply(ROOT)
            compile(after, name, "exec")
            assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(before))


SOURCE = """
LIMIT = 4
def f(a):
    if a < 3:
        return a + 0
    return 3
def g():
    return 2 * LIMIT
def h():
    return 3 + 4
"""
TEST = """
import subprocess, sys
from functools import cache
import pytest
from pydtnn.a import f, g
def test_a_small_value():
    assert f(2) == 2
def test_a_large_value():
    assert f(4) == 3
def test_another_process():
    assert not subprocess.call([sys.executable, "-c", "from pydtnn.a import g; assert g() == 8"])
@cache
def once():
    return f(5)
@pytest.mark.parametrize("i", range(2))
def test_what_others_have_called(i):
    assert once() < 3 + i
def test_what_always_fails():
    assert not f
"""


@pytest.mark.long
def test_a_mutant_is_tested_by_what_executes_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take half of the time
    monkeypatch.setattr(mutants, "ROOT", library(tmp_path, SOURCE, TEST))
    scope = "pydtnn/a.py"
    alive, unseen = f"{scope}::f::comparison::1", f"{scope}::h::constant::1"
    killed = {
        f"{scope}::f::constant::3": "test_a_large_value",
        f"{scope}::g::constant::1": "test_another_process",
        f"{scope}::module::constant::1": "test_another_process",
    }
    assert main([alive, unseen, *killed, "--jobs", "1", "--at-least", "60"]) == 0
    printed = capsys.readouterr().out
    assert "tests/test_a.py::test_what_always_fails\n" in printed
    for name, test in killed.items():
        assert re.search(rf"fast +\d+ s  {name} tests/test_a.py::{test}\n", printed)
    for name in (alive, unseen):
        assert re.search(rf"SURVIVED +\d+ s  {name}\n", printed)
    assert "\n-    if a < 3:\n+    if (a <= 3):\n" in printed
    assert printed.endswith("\n5 mutants: 3 fast 2 SURVIVED\n")
    assert (tmp_path / "pydtnn/a.py").read_text() == SOURCE
    # Later runs read the results of the first one, and what new tests execute is recorded.
    assert main([alive, "--jobs", "1"]) == 1
    assert " s  " not in capsys.readouterr().out
    (tmp_path / "tests/test_a.py").unlink()
    (tmp_path / "tests/test_b.py").write_text("from pydtnn.a import h\ndef test_h(): h() == 7\n")
    assert main([unseen, "--again", "--jobs", "1"]) == 1
    assert "1 tests recorded, 0 failed" in capsys.readouterr().out
    results = (tmp_path / "build/mutants").glob("*.jsonl")
    assert '"tests": 1,' in next(results).read_text().splitlines()[-1]
