"""Who may import whom: the direction of `docs/architecture.md`, read from the sources."""

from __future__ import annotations

import ast
import graphlib
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import pydtnn

ROOT = Path(__file__).resolve().parent.parent

# Area: the modules and packages in it, of which the longest name decides.
AREAS = {
    "utils": ["utils"],
    "kernels": ["kernels"],
    "random": ["kernels.reference.random"],
    "comm": ["comm"],
    "data": ["data"],
    "parameters": [
        *("layers.collectives", "layers.initializers", "layers.parameters", "layers.statistics")
    ],
    "layers": ["layers"],
    "model": ["model"],
    "weights": ["saving.weights"],
    "saving": ["saving"],
    "interchange": ["tools.interchange"],
    "rules": ["losses", "metrics", "optimizers", "schedules"],
    "parallel": ["parallel"],
    "training": ["training"],
    "callbacks": ["callbacks"],
    "models": ["models"],
    "testing": ["tools.testing"],
    "tracing": ["tools.tracing"],
    "allreduces": ["tools.schedules.check", "tools.schedules.timeline"],
    "figures": ["tools.schedules.figures"],
    "report": ["tools.report"],
    "runs": ["tools.runs"],
    "perfmodel": ["tools.perfmodel"],
    "programs": [
        *("__main__", "cli", "train"),
    ],
    "tools": [
        "tools",
        *(f"tools.{tool}.__main__" for tool in ("interchange", "report", "runs", "testing")),
    ],
}

BELOW_LAYERS = {"utils", "kernels", "random", "parameters"}
BELOW_MODEL = {*BELOW_LAYERS, "layers"}
BELOW_TRAINING = {
    *(*BELOW_MODEL, "model", "weights", "saving", "rules", "comm", "parallel", "data")
}
BELOW_PROGRAMS = {*BELOW_TRAINING, "training", "callbacks"}

# Area: what it may import besides itself.
ALLOWED = {
    "utils": set(),
    "kernels": {"utils", "random"},
    "random": {"kernels"},
    "comm": {"utils"},
    "data": {"utils", "random"},
    "parameters": {"utils", "kernels", "random"},
    "layers": BELOW_LAYERS,
    "model": {*BELOW_MODEL, "data"},
    "weights": {"utils", "kernels", "model"},
    "saving": {*BELOW_MODEL, "model", "weights", "data"},
    "interchange": {*BELOW_MODEL, "model", "weights", "saving", "data"},
    "rules": BELOW_LAYERS,
    "parallel": {*BELOW_LAYERS, "comm", "rules"},
    "training": {*BELOW_TRAINING, "models"},
    "callbacks": {*BELOW_TRAINING, "training"},
    "models": {"utils", "layers", "parameters"},
    "testing": {*BELOW_TRAINING, "training"},
    "tracing": {*BELOW_TRAINING, "training"},
    "allreduces": {"utils", "comm"},
    "figures": {"utils"},
    "report": {"utils", "tracing", "runs"},
    "runs": {*BELOW_TRAINING, "training"},
    "programs": {*BELOW_PROGRAMS, "models"},
    "perfmodel": {*BELOW_PROGRAMS, "models", "programs", "allreduces", "tracing", "figures"},
    "tools": {
        *(*BELOW_PROGRAMS, "models", "programs", "interchange", "testing", "tracing", "report"),
        *("runs", "perfmodel", "allreduces", "figures"),
    },
    "public": set(AREAS),  # pydtnn/__init__.py: every public name, loaded on first use
}

# Packages that may be missing, and the modules that may import them, inside a function.
CONFINED = {
    "mpi4py": ["comm.mpi", "cli.installation"],
    "cupy": ["kernels.cuda", "comm.nccl", "cli.installation"],
    "cupy_backends": ["kernels.cuda"],
    "cupyx": ["kernels.cuda"],
    "jinja2": ["tools.report.page"],
    "tensorboardX": ["tools.trackers"],
    "mlflow": ["tools.trackers"],
    "optuna": ["tools.search"],
    "tokenizers": ["data.tokenizer"],
    "wandb": ["tools.trackers"],
}

OUTSIDE = ("benchmarks", "tests")
"""Folders of this repository that are not part of the library."""

INSTALLED_ALWAYS = {"ml_dtypes", "numpy", "rich", "safetensors", "threadpoolctl", "yaml"}


@dataclass(frozen=True)
class Import:
    """One import statement's target, without the leading "pydtnn." where it has one.

    `name` is what it takes from the target, "" if that is the module itself; `ours` says whether it
    is in this repository, `for_types` whether it is under TYPE_CHECKING.
    """

    target: str
    name: str
    ours: bool
    line: int
    in_function: bool
    for_types: bool


@cache
def repository() -> dict[str, Path]:
    """Path of every module by its name without "pydtnn."; the package itself is ""."""
    found = {}
    for folder in ("pydtnn", "models", "benchmarks", "tests"):
        prefix = "" if folder == "pydtnn" else f"{folder}."
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = prefix + ".".join(part for part in parts if part != "__init__")
            found[name.rstrip(".")] = path
    return found


@cache
def sources() -> dict[str, Path]:
    """Those of the library."""
    return {name: path for name, path in repository().items() if name.split(".")[0] not in OUTSIDE}


def imports(module: str, *, annotations: bool = False) -> list[Import]:
    """Every import that can run, and with `annotations` those under TYPE_CHECKING, too."""
    return [found for found in all_imports(module) if annotations or not found.for_types]


@cache
def all_imports(module: str) -> list[Import]:
    return [found for found in parsed(module) if isinstance(found, Import)]


@cache
def parsed(module: str) -> tuple[Import | str, ...]:
    """Return the imports of a module, and the names of its classes."""
    text = repository()[module].read_text()
    with_calls = "import_optional" in text

    def visit(node: ast.AST, in_function: bool, for_types: bool) -> Iterator[Import | str]:
        names: list[tuple[str, str]] = []
        if isinstance(node, ast.ClassDef):
            yield node.name
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = node.module or ""  # ruff forbids relative imports
            # "from package import name" imports package.name where that is a module
            names = [
                (f"{start}.{alias.name}", "")
                if without_prefix(f"{start}.{alias.name}") in repository()
                else (start, alias.name)
                for alias in node.names
            ]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_optional":
            names = [(ast.unparse(node.args[0]).strip("f'\""), "")]
        for target, name in names:
            ours = target.split(".")[0] in {"pydtnn", *OUTSIDE}
            target = without_prefix(target)
            yield Import(target, name, ours, node.lineno, in_function, for_types)
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        guarded = isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for child in ast.iter_child_nodes(node) if with_calls else statements(node):
            typing = for_types or (guarded and child in node.body)
            yield from visit(child, inside, typing)

    return tuple(visit(ast.parse(text), in_function=False, for_types=False))


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Those in a node, and what contains more of them."""
    for part in ("body", "handlers", "orelse", "finalbody", "cases"):
        found = getattr(node, part, ())
        yield from found if isinstance(found, list) else ()


def without_prefix(name: str) -> str:
    return name.removeprefix("pydtnn").removeprefix(".")


def belongs(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def area(module: str) -> str | None:
    """Area of a module of ours; None if the table does not say."""
    if module == "":
        return "public"
    homes = [
        (len(name), key) for key, names in AREAS.items() for name in names if belongs(module, name)
    ]
    return max(homes)[1] if homes else None


def test_a_module_imports_only_what_lies_below_it():
    wrong = []
    for module, path in sources().items():
        here = area(module)
        assert here, f"{module} has no place in AREAS: say what it may import"
        for found in filter(lambda f: f.ours, imports(module)):
            if (there := area(found.target)) != here and there not in ALLOWED[here]:
                place = f"{path.relative_to(ROOT)}:{found.line}"
                wrong.append(
                    f"{place} imports {found.target} ({there}); {here} may import only "
                    f"{sorted(ALLOWED[here])}"
                )
    assert not wrong, "\n".join(wrong)


def is_package(module: str) -> bool:
    return repository()[module].name == "__init__.py"


def definitions(module: str, name: str) -> Iterator[str]:
    """The modules that a name comes from, if `module` is a package that offers it."""
    if module in repository() and is_package(module):
        for found in imports(module, annotations=True):
            if found.target != module and name == (found.name or found.target.rpartition(".")[2]):
                yield found.target
                if found.name:
                    yield from definitions(found.target, name)


def executed(module: str) -> set[str]:
    """The modules that can run because this one is imported or called.

    They are the targets of its imports, those within functions and, in the library, for annotations
    included; with the name of a package, the module that defines it; and the packages of all these,
    because Python runs their ``__init__`` first. The packages in which the module itself lies run
    before it. What a package imports for type checkers is loaded when a name is used.
    """
    annotations = not is_package(module) and module.split(".")[0] != "tests"
    found = [f for f in imports(module, annotations=annotations) if f.ours]
    targets = {f.target for f in found}
    targets.update(*(definitions(f.target, f.name) for f in found if f.name))
    packages = {p for t in targets for p in itertools.accumulate(t.split("."), "{}.{}".format)}
    return {t for t in targets | packages if t in targets or not belongs(module, t)} - {module}


@pytest.mark.parametrize("modules", [sources, pytest.param(repository, marks=pytest.mark.long)])
def test_no_circle_between_modules(modules):
    arrows = {module: executed(module) for module in modules()}
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def rooms() -> dict[str, set[str]]:
    """The entries at the top of the package, and those whose modules each of them imports."""
    arrows: dict[str, set[str]] = {}
    for module in filter(None, sources()):
        room = module.partition(".")[0]
        targets = {f.target.partition(".")[0] for f in imports(module, annotations=True) if f.ours}
        arrows.setdefault(room, set()).update(targets - {room, ""})
    return arrows


def test_no_circle_between_rooms():
    try:
        graphlib.TopologicalSorter(rooms()).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def modules_in_order() -> list[list[str]]:
    """All modules of the library, room after room: each imports those before it only."""
    order = [*graphlib.TopologicalSorter(rooms()).static_order()]
    return [[f"pydtnn.{name}" for name in sources() if belongs(name, room)] for room in order]


PUBLIC_TWICE = {"AllReduce", "Constant"}
"""A scheme and a collective; a learning rate and an initializer: users import both."""


@cache
def class_homes() -> dict[str, list[Path]]:
    """Files of the classes of each name."""
    homes: dict[str, list[Path]] = {}
    for module, path in sources().items():
        for name in (found for found in parsed(module) if isinstance(found, str)):
            homes.setdefault(name, []).append(path)
    return homes


def test_a_class_name_exists_once():
    assert {name for name, homes in class_homes().items() if len(homes) > 1} == PUBLIC_TWICE


@pytest.mark.tools
def test_the_classes_of_the_glossary_are_where_it_says():
    text = (ROOT / "docs" / "architecture.md").read_text()
    found = re.findall(r"\| `(\w+)` in `([\w/.]+)` \|$", text, re.MULTILINE)
    assert len(found) >= 25
    for name, path in found:
        assert ROOT / "pydtnn" / path in class_homes()[name], (name, path)


def names_of_tests() -> list[str]:
    return sorted(
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "tests").rglob("test_*.py")
    )


def test_the_top_of_the_package_holds_what_users_import_and_rooms():
    entries = [path.name for path in (ROOT / "pydtnn").iterdir()]
    assert len({*entries} - {"__main__.py", "__pycache__", "models"}) <= 20


def test_optional_packages_are_imported_only_where_they_are_needed():
    wrong = []
    for module, path in sources().items():
        for found in imports(module):
            top = found.target.split(".")[0]
            if found.ours or top in sys.stdlib_module_names or top in INSTALLED_ALWAYS:
                continue
            place = f"{path.relative_to(ROOT)}:{found.line} imports {top}"
            if not found.in_function:
                wrong.append(f"{place} on import; move it into the function that needs it")
            elif not any(belongs(module, home) for home in CONFINED.get(top, [module])):
                wrong.append(f"{place}, which belongs in {' and '.join(CONFINED[top])}")
    assert not wrong, "\n".join(wrong)


def python(
    code: str, *arguments: str, cwd: Path | None = None, given: str = "", timeout: float = 600
) -> str:
    """Run code in a fresh interpreter and return what it prints."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, input=given, timeout=timeout, check=False
    )
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.measure
def test_import_pydtnn_takes_less_than_a_third_of_a_second():
    code = "import time; t = time.perf_counter(); import pydtnn; print(time.perf_counter() - t)"
    assert min(float(python(code)) for _ in range(3)) < 0.3  # s; the promise of the README


def test_import_pydtnn_loads_nothing_but_itself():
    code = "import json, sys, pydtnn; print(json.dumps(sorted(sys.modules)))"
    loaded = {name.split(".")[0] for name in json.loads(python(code))}
    assert not loaded & {"numpy", "mpi4py", "cupy", *INSTALLED_ALWAYS}


@pytest.mark.tools
def test_all_public_names_load_without_mpi4py_and_cupy():
    code = (
        "import json, sys, pydtnn\n"
        "for name in pydtnn.__all__: getattr(pydtnn, name)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    loaded = {name.split(".")[0] for name in json.loads(python(code))}
    assert "numpy" in loaded
    assert not loaded & set(CONFINED)


LATER = {
    *("yaml", "PIL", "simplejpeg", "scipy", "matplotlib", "pandas", "torch", "onnx", "rich"),
    *("threadpoolctl", "safetensors", "jinja2", "tarfile", "gzip", "statistics", "subprocess"),
    *("tempfile", "multiprocessing", "http.client", "email", "ssl"),
    *("pydtnn.kernels.cuda", "pydtnn.data.folder"),
    *("pydtnn.data.augment.randaugment", "pydtnn.utils.plain_yaml", "pydtnn.training.capture"),
}
"""Modules that a training imports when it needs them."""


def test_what_only_some_runs_need_is_not_imported_with_the_trainer():
    code = (
        "import json, sys\n"
        "before = set(sys.modules)\n"
        "from pydtnn import Model, Trainer, layers\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    loaded = set(json.loads(python(code)))
    assert "pydtnn.training.trainer" in loaded
    assert not loaded & LATER


def test_public_names_are_listed_and_others_are_attribute_errors():
    assert set(pydtnn.__all__) <= set(dir(pydtnn))
    with pytest.raises(AttributeError, match="no attribute 'Modell'"):
        pydtnn.Modell  # noqa: B018


WITHOUT_MPI4PY = """
import runpy, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "mpi4py":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
sys.argv[0] = "pydtnn.train"
runpy.run_module("pydtnn.train", run_name="__main__")
"""


def test_serial_training_works_where_mpi4py_cannot_be_imported(tmp_path):
    options = "--model mlp --dataset synthetic --epochs 1 --steps-per-epoch 2 --output-dir"
    python(WITHOUT_MPI4PY, *options.split(), str(tmp_path / "run"), cwd=tmp_path)
    assert (tmp_path / "run" / "run.json").exists()
