"""The environment of the check of a GPU, where pydtnn cannot be built."""

import subprocess
import sys

import pytest


@pytest.fixture
def setup(monkeypatch, tmp_path):
    """The script, over sources that no compiler could build."""
    from tests.gpu_check import setup as gpu_setup

    root = tmp_path / "sources"
    for file in ("pydtnn/__init__.py", "models/__init__.py", "models/resnet.py"):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(f"told = {file!r}\n")
    (root / "pyproject.toml").write_text("[project]\n")
    (root / "setup.py").write_text("raise SystemExit('Python.h: no such file')\n")
    monkeypatch.setattr(gpu_setup, "ROOT", root)
    return gpu_setup


def test_without_a_compiler_the_sources_are_used_as_they_lie(setup, tmp_path, capsys):
    environment = tmp_path / "environment"
    code = "import pydtnn.models.resnet as it, pytest; print(it.told)"
    for _ in range(2):
        setup.make(environment)
        setup.install(environment, None)
        assert "pydtnn is used without its extensions" in capsys.readouterr().out
        python = [str(setup.python_of(environment)), "-c", code]
        told = subprocess.run(python, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert told.stdout == "models/resnet.py\n", told.stderr


def test_what_goes_wrong_is_told_with_the_last_words(setup):
    with pytest.raises(RuntimeError, match=r"status 3\nnothing fits"):
        setup.run(sys.executable, "-c", "print('nothing fits'); raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="no-such-program: "):
        setup.run("no-such-program")
