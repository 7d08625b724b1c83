"""Packages that may not be installed are named with the command that installs them."""

import sys

import pytest

from pydtnn.utils.imports import import_optional


def test_a_module_of_an_installed_package_is_returned():
    assert import_optional("numpy.linalg", "numpy", "x") is sys.modules["numpy.linalg"]


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    for module in ("numpy", "numpy.linalg"):
        with pytest.raises(ImportError, match="^draw requires numpy; install it with: pip install"):
            import_optional(module, "numpy", "draw")
    with pytest.raises(ImportError, match="requires numpy and rich; .* install numpy rich$"):
        import_optional("numpy", "numpy rich", "x")
