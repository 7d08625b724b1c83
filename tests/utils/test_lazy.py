"""Packages whose names are imported when they are used."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import pydtnn
from pydtnn.utils.lazy import Named, homes
from tests.each import each

ROOT = Path(pydtnn.__file__).parent
PACKAGES = sorted(
    ".".join(file.relative_to(ROOT.parent).parent.parts)
    for file in ROOT.rglob("__init__.py")
    if " = lazy(__name__" in file.read_text()
)


@each("package", PACKAGES)
def test_every_name_of_a_package_is_imported_from_its_module(package):
    module = import_module(package)
    assert homes(package)
    for name, home in homes(package).items():
        assert getattr(module, name) is getattr(import_module(home), name)
    tools = getattr(module, "FROM_TOOLS", {})
    names = getattr(module, "__all__", [])  # a tool without names of its own has none
    assert all(hasattr(module, name) for name in names if name not in tools)


@pytest.mark.tools
@each("package", ["pydtnn.callbacks", "pydtnn.data"])
def test_names_of_tools_are_members_of_the_package(package):
    module = import_module(package)
    for name in module.FROM_TOOLS:
        assert name not in module.__all__  # `import *` needs no tools
        assert getattr(module, name).__module__.startswith("pydtnn.tools.")


def test_a_module_is_imported_when_one_of_its_names_is_used():
    code = """
import sys
from pydtnn import layers
before = "pydtnn.layers.attention" in sys.modules
layers.MultiHeadAttention
print(before, "pydtnn.layers.attention" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False True\n"


def test_members_by_other_names_are_those_of_the_package():
    from pydtnn import layers

    named = Named("pydtnn.layers", {"dense": "Linear", "relu": "ReLU"})
    assert dict(named) == {"dense": layers.Linear, "relu": layers.ReLU}
    assert "dense" in named
    assert Named("pydtnn.layers", ["ReLU"])["ReLU"] is layers.ReLU
    with pytest.raises(KeyError):
        named["Linear"]
