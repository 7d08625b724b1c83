"""The examples in docstrings are executed."""

import doctest
import importlib
import re

import numpy as np
import pytest

from tests.launch import ROOT

EXAMPLE = re.compile(r"^ *>>> (?!.*doctest: \+SKIP)", re.M)
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
