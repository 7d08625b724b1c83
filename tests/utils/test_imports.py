"""Packages that may not be installed are named with the command that installs them."""

from __future__ import annotations

import sys

import pytest

from pydtnn.utils.imports import import_optional
from tests.each import each


def test_a_module_of_an_installed_package_is_returned() -> None:
    assert import_optional("numpy.linalg", "numpy", "x") is sys.modules["numpy.linalg"]


@each("module", ["numpy", "numpy.linalg"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(ImportError, match="^draw requires numpy; install it with: pip install n"):
        import_optional(module, "numpy", "draw")


def test_several_packages_are_named_with_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    told = "^x requires numpy and rich; install them with: pip install numpy rich$"
    with pytest.raises(ImportError, match=told):
        import_optional("numpy", "numpy rich", "x")
