"""Python started in a checkout finds it before the installed package, which it uses instead."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import ROOT


def python(
    *arguments: str, cwd: Path, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python without the packages of this environment, such as an editable pydtnn."""
    environment = {} if path is None else {"PYTHONPATH": str(path)}
    command = [sys.executable, "-S", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of little more than what is imported first."""
    for file in ("__init__.py", "utils/moved.py", "utils/version.py"):
        (tmp_path / "checkout" / "pydtnn" / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "pydtnn" / file, tmp_path / "checkout" / "pydtnn" / file)
    (tmp_path / "checkout" / "models").mkdir()
    (tmp_path / "checkout" / "models" / "__init__.py").write_text("")
    return tmp_path / "checkout"


@pytest.fixture
def site(checkout: Path, tmp_path: Path) -> Path:
    """A folder of packages with an installed pydtnn, of another version."""
    package = tmp_path / "site" / "pydtnn"
    shutil.copytree(checkout / "pydtnn", package)
    shutil.copytree(checkout / "models", package / "models")
    source = (package / "__init__.py").read_text()
    (package / "__init__.py").write_text(source + '__version__ = "installed"\n')
    (package / "program.py").write_text(
        "import pydtnn, pydtnn.models, pydtnn.utils.version\n"
        "modules = (pydtnn, pydtnn.models, pydtnn.utils.version)\n"
        "print(pydtnn.__version__, *(m.__file__ for m in modules), __file__, sep='\\n')\n"
    )
    return package.parent


def test_a_program_in_a_checkout_is_that_of_the_installed_package(checkout, site):
    for cwd in (checkout, checkout.parent):
        done = python("-m", "pydtnn.program", cwd=cwd, path=site)
        assert done.returncode == 0, done.stderr
        version, *files = done.stdout.splitlines()
        assert version == "installed"
        assert len(files) == 4
        assert all(file.startswith(str(site)) for file in files)


def test_a_checkout_without_an_installed_package_says_what_to_do(checkout):
    done = python("-m", "pydtnn.train", cwd=checkout)
    assert done.returncode == 1
    assert (
        f"pydtnn: the checkout {checkout} is not installed; run `make setup` or `pip" in done.stderr
    )


@pytest.mark.tools
def test_an_editable_installation_is_imported_from_its_checkout():
    import pydtnn.models

    assert Path(pydtnn.__file__) == ROOT / "pydtnn" / "__init__.py"
    assert Path(pydtnn.models.__file__) == ROOT / "models" / "__init__.py"
