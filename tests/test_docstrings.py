"""The examples in docstrings are executed, and defaults in texts are those of the code."""

import ast
import doctest
import importlib
import re

import numpy as np
import pytest

from tests.launch import ROOT

EXAMPLE = re.compile(r"^ *>>> (?!.*doctest: \+SKIP)", re.M)
DOCUMENTED = ast.ClassDef, ast.FunctionDef, ast.Call
FILES = [
    path.relative_to(ROOT).as_posix()
    for path in sorted(ROOT.glob("pydtnn/**/*.py"))
    if EXAMPLE.search(path.read_text())
]


@pytest.mark.parametrize("file", FILES)
def test_examples_have_the_results_that_are_written_below_them(file):
    name = re.sub(r"(/__init__)?\.py$", "", file).replace("/", ".")
    options = {"extraglobs": {"np": np}, "optionflags": doctest.ELLIPSIS}
    result = doctest.testmod(importlib.import_module(name), **options)
    assert result.attempted
    assert not result.failed


def test_numbers_that_texts_call_defaults_are_those_of_the_code():
    checked = 0
    for path in ROOT.glob("pydtnn/**/*.py"):
        source = path.read_text()
        lines = source.splitlines()
        nodes = ast.walk(ast.parse(source)) if "default" in source else ()
        for node in (one for one in nodes if isinstance(one, DOCUMENTED)):
            text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            for name, value in re.findall(r"^ +(\w+) : .*\bdefault ([\d.]+)$", text, re.M):
                given = rf"\b{name}(: [\w.| ]+)? ?= ?({re.escape(value)}(\.0)?|DEFAULT_\w+)[,)\n]"
                assert re.search(given, text), (path.name, name, value)
                checked += 1
            option = re.search(r"default: ([\d.]+)\b", text)
            if isinstance(node, ast.Call) and option and "add_argument(" in text:
                assert f"default={option[1]}" in text
                checked += 1
    assert checked > 10
