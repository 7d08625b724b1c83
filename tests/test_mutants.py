"""Mutants are drawn from syntax trees by a seed, and the runner tells which of them are found."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from tests import mutants
from tests.mutants import EQUIVALENT, ROOT, draw, main, stages

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


def test_texts_types_and_checks_of_invariants_stay_as_they_are(tmp_path):
    found = mutants.mutants(library(tmp_path, UNCHANGED))
    assert {*found} == {"pydtnn/a.py::f::boolean::1", "pydtnn/a.py::f::comparison::1"} | {
        "pydtnn/a.py::f::condition::1"
    }


def test_names_of_mutants_stay_when_other_code_changes(tmp_path):
    source = "class A:\n    def f(self):\n        return self.a + 1\n"
    found = mutants.mutants(library(tmp_path, source))
    assert [*found] == ["pydtnn/a.py::A.f::arithmetic::1", "pydtnn/a.py::A.f::constant::1"]
    moved = "x = 2 + y\n\n\ndef f(a):\n    return a + 1\n\n\n" + source.replace(".a", ".other")
    later = mutants.mutants(library(tmp_path, moved))
    for name in found:
        after = later[name].apply(tmp_path)[1]
        assert after.startswith(moved[: moved.index("class")])
        assert after != moved


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


def test_tests_of_the_module_come_first_and_all_others_follow(tmp_path):
    files = {
        "pydtnn/layers/linear.py": 'class Linear:\n    """\n    >>> Linear()\n    """',
        "pydtnn/model/graph.py": "from pydtnn.layers.linear import Linear\nclass Graph: ...",
        "tests/layers/test_linear.py": "Linear",
        "tests/layers/test_cost.py": "",
        "tests/layers/test_conv.py": "from pydtnn.layers import Conv2d",
        "tests/model/test_graph.py": "from pydtnn.layers import Linear",
        "tests/model/test_fusion.py": "from pydtnn.layers import Linear\nmodel = Linear()",
        "tests/model/test_costs.py": "# Linear.cost",
        "tests/model/test_shape.py": "from pydtnn.model import Graph",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = stages(tmp_path, "pydtnn/layers/linear.py::Linear.cost::arithmetic::1")
    names = [*files][2:]
    assert found == {
        "own tests": [f"{mutants.EXAMPLES}[pydtnn/layers/linear.py]", *names[:2]],
        "importing": names[4:2:-1],
        "package": names[2:3],
        "rest": names[:4:-1],
    }


def test_examples_that_are_not_executed_are_no_tests(tmp_path):
    (tmp_path / "pydtnn").mkdir()
    (tmp_path / "pydtnn/a.py").write_text('"""\n>>> f()  # doctest: +SKIP\n"""')
    assert stages(tmp_path, "pydtnn/a.py::f::arithmetic::1")["own tests"] == []


def test_the_test_of_examples_in_docstrings_exists():
    file, _, name = mutants.EXAMPLES.partition("::")
    assert f"\ndef {name}(file)" in (ROOT / file).read_text()


SOURCE = "def f(a):\n    if a < 3:\n        return a + 0\n    return 3\n"
TEST = """
import sys
sys.path.insert(0, ".")
from pydtnn.a import f
def test_a_small_value():
    assert f(2) == 2
def test_a_large_value():
    assert f(4) == 3
def test_what_always_fails():
    assert not f
"""


def test_the_runner_tells_killed_mutants_from_survivors(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take half of the time
    monkeypatch.setattr(mutants, "ROOT", library(tmp_path, SOURCE, TEST))
    alive, dead = "pydtnn/a.py::f::comparison::1", "pydtnn/a.py::f::constant::3"
    assert main([alive, dead, "--jobs", "1", "--at-least", "50"]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"own tests +\d+ s  {dead} tests/test_a.py::test_a_large_value\n", printed)
    assert re.search(rf"SURVIVED +\d+ s  {alive}\n", printed)
    assert "\n-    if a < 3:\n+    if (a <= 3):\n" in printed
    assert re.search(r"all +2 +50% +1 +0 +0 +0\n", printed)
    assert (tmp_path / "pydtnn/a.py").read_text() == SOURCE
    # Later runs read the results of the first one.
    assert main([alive, dead, "--jobs", "1"]) == 1
    assert " s  " not in capsys.readouterr().out
    (tmp_path / "tests/test_b.py").write_text("def test_of_another_module(): ...\n")
    assert main([alive, "--again", "--jobs", "1", "--budget", "0"]) == 1
    assert "UNDECIDED" in capsys.readouterr().out
