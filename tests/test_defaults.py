"""Defaults of the public interface, on which programs and their results rely."""

import importlib
import inspect
from pathlib import Path

from tests.core import MISSING

PUBLISHED = Path(__file__).with_name("defaults.txt").read_text()
"""A class or function of `pydtnn` a line, and its defaults; a new one is added at its place."""


def test_published_defaults_stay():
    for line in PUBLISHED.splitlines():
        name, *defaults = line.split()
        module, _, member = f"pydtnn.{name}".rpartition(".")
        if module.startswith(MISSING):  # of the tools, in a copy of the core
            continue
        parameters = inspect.signature(getattr(importlib.import_module(module), member)).parameters
        for default in defaults:
            argument, _, value = default.partition("=")
            assert repr(parameters[argument].default).replace(" ", "") == value, line
