"""Defaults of the public interface, on which programs and their results rely."""

import importlib
import inspect
from pathlib import Path

from pydtnn.cli.config import TrainConfig
from tests.core import MISSING

PUBLISHED = Path(__file__).with_name("defaults.txt").read_text()
"""A class or function of `pydtnn` a line, and its defaults; a new one is added at its place."""


def test_published_defaults_stay():
    for line in PUBLISHED.splitlines():
        name, *defaults = line.split()
        module, _, member = f"pydtnn.{name}".rpartition(".")
        if module.startswith(MISSING):  # of the tools, in a copy of the core
            continue
        owner = getattr(importlib.import_module(module), member)
        found = {one.name: one.default for one in inspect.signature(owner).parameters.values()}
        found = vars(owner()) if owner is TrainConfig else found
        for default in defaults:
            argument, _, value = default.partition("=")
            assert repr(found[argument]).replace(" ", "") == value, line
