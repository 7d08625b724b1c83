"""Modules under their former names."""

import subprocess
import sys
from importlib import import_module

import pytest

from pydtnn.utils.moved import MOVED, RENAMED
from tests.each import each

pytestmark = pytest.mark.tools


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@each(("name", "home"), [*MOVED.items(), ("pydtnn.testing.plan", "pydtnn.tools.testing.plan")])
def test_a_former_name_is_the_module_of_today(name, home):
    assert import_module(name) is import_module(home)
    assert import_module(home).__spec__.name == home


def test_a_former_name_is_imported_with_a_warning(monkeypatch):
    monkeypatch.delitem(sys.modules, "pydtnn.predict", raising=False)
    with pytest.warns(DeprecationWarning, match="pydtnn.predict is now pydtnn.tools.predict"):
        import_module("pydtnn.predict")


def test_a_command_with_a_former_name_is_executed():
    command = [sys.executable, "-m", "pydtnn.runs", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: python -m pydtnn runs")


@each("package", RENAMED)
def test_a_former_name_of_a_member_is_that_of_today(package):
    module = import_module(package)
    for former, name in RENAMED[package].items():
        home, _, own = name.rpartition(".")
        expected = getattr(import_module(home or package), own)
        with pytest.warns(DeprecationWarning, match=f"{package}.{former} is now {name}"):
            assert getattr(module, former) is expected
    with pytest.raises(AttributeError, match="no attribute 'Stop'"):
        _ = module.Stop
