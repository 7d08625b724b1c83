"""The public names of pydtnn, and a page of the reference for each module that has some.

Public are the names in ``__all__`` of a module, and those of each module from which a page, a
notebook or an example imports. A name that several modules offer is documented in one of them, its
home; the others refer to it.
"""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent

AREAS = {
    "pydtnn": "The library",
    "models": "Networks by name",
    "layers": "Layers and blocks",
    "model": "Models",
    **{"losses": "Losses", "metrics": "Metrics", "optimizers": "Optimizers"},
    "schedules": "Learning rates",
    "data": "Data",
    "training": "Training",
    "callbacks": "Callbacks",
    "saving": "Saved models",
    "runs": "Runs",
    "interchange": "Other libraries' files",
    "parallel": "Parallel schemes",
    "comm": "Communication",
    "kernels": "Kernels",
    "tracing": "Traces",
    "report": "Reports",
    "perfmodel": "Predictions",
    "testing": "Checks",
    "utils": "Utilities",
}
"""Title of the modules below each package of pydtnn, in the order of the reference."""

CONSTANTS = (int, float, str, tuple)
"""Types whose equal values may be one object."""


@cache
def modules() -> dict[str, list[str]]:
    """Public modules, and the public names of each."""
    found = {}
    for name, path in sources().items():
        listed = re.search(r"^__all__\b", path.read_text(), re.M)
        if listed or name in imported():
            module = import_module(name)
            names = module.__all__ if listed else own_names(module)
            found |= {name: sorted(names, key=str.lower)} if names else {}
    return found


@cache
def sources() -> dict[str, Path]:
    """Modules of the library by name."""
    found = {}
    for folder, prefix in (("pydtnn", ""), ("models", "pydtnn.")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[prefix + ".".join(part for part in parts if part != "__init__")] = path
    return found


@cache
def imported() -> set[str]:
    """Modules from which pages, notebooks and examples import."""
    files = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")]
    files += [*(ROOT / "examples").glob("*.py"), ROOT / "README.md"]
    found = re.findall(r"\bfrom (pydtnn[\w.]*) import (\w*)", "\n".join(map(Path.read_text, files)))
    return {name for pair in found for name in (pair[0], ".".join(pair))}


def own_names(module: ModuleType) -> list[str]:
    """Names that a module without ``__all__`` defines."""
    assert module.__file__
    nodes = ast.parse(Path(module.__file__).read_text()).body
    defined: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined.add(node.name)
        defined |= {*assigned(node)}
    return [name for name in defined if name[0] != "_" and documented(module, name)]


def documented(module: ModuleType, name: str) -> bool:
    value = getattr(module, name)
    return (
        inspect.isclass(value)
        or inspect.isroutine(value)
        or bool(constant_text(module.__name__, name))
    )


def assigned(node: ast.AST) -> list[str]:
    """Names to which a statement assigns."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [target.id for target in targets if isinstance(target, ast.Name)]
    return []


@cache
def homes() -> dict[int, str]:
    """The full name under which each object is documented, by the object's identity.

    It is that in the highest package below ``pydtnn`` that offers it.
    """
    found: dict[int, str] = {}
    for module in sorted(modules(), key=lambda name: (name == "pydtnn", name.count("."), name)):
        values = {name: getattr(import_module(module), name) for name in modules()[module]}
        own_first = sorted(values, key=lambda name: getattr(values[name], "__name__", "") != name)
        for name in own_first:  # before other names of the same object
            if not isinstance(value := values[name], CONSTANTS):
                found.setdefault(id(value), f"{module}.{name}")
    return found


def entry(module: str, name: str) -> tuple[str, str]:
    """The first sentence about a name, and the directive that documents it."""
    value = getattr(import_module(module), name)
    full = f"{module}.{name}"
    if inspect.ismodule(value):
        link = f":doc:`{value.__name__}`" if value.__name__ in modules() else f"``{name}``"
        return first_sentence(value.__doc__), f".. py:data:: {name}\n\n   The module {link}."
    if (home := homes().get(id(value), full)) != full:
        short = "~" if home.startswith(f"{module}.") else ""
        same = f"The same as :py:obj:`{short}{home}`."
        return same, f".. py:data:: {name}\n\n   {same}"
    if inspect.isclass(value):
        bases = "   :show-inheritance:" if value.__bases__ != (object,) else ""
        return first_sentence(value.__doc__), f".. autoclass:: {full}\n   :members:\n{bases}"
    if isinstance(value, partial):
        given = [*map(repr, value.args), *(f"{k}={v!r}" for k, v in value.keywords.items())]
        text = f":py:obj:`{homes()[id(value.func)]}` with ``{', '.join(given)}``."
        return text, f".. py:function:: {name}(*args, **options)\n\n   {text}"
    if inspect.isroutine(value) or hasattr(value, "__wrapped__"):
        return first_sentence(value.__doc__), f".. autofunction:: {full}"
    text = constant_text(module, name)
    body = "\n\n".join(f"   {' '.join(part.split())}" for part in text.split("\n\n"))
    return first_sentence(text), f".. py:data:: {name}\n\n{body}"


def first_sentence(text: str | None) -> str:
    without_signature = re.sub(r"\A\w+\(.*\).*\n", "", (text or "").strip())  # of Cython
    first = " ".join(without_signature.strip().partition("\n\n")[0].split())
    return re.split(r"(?<=\.)(?<!et al\.)\s", first, maxsplit=1)[0]


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse(sources()[module].read_text())


def constant_text(module: str, name: str) -> str:
    """The string below an assignment, in this module or in that from which it comes."""
    tree = parsed(module)
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if name in assigned(node):
            text = isinstance(after, ast.Expr) and getattr(after.value, "value", None)
            return inspect.cleandoc(text) if isinstance(text, str) else ""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in sources():
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return constant_text(node.module, alias.name)
    return ""


def page(module: str) -> str:
    """One module: what it is for, a table of its names, and their documentation."""
    entries = {name: entry(module, name) for name in modules()[module]}
    rows = [
        f"   * - :py:obj:`{name} <{module}.{name}>`\n     - {entries[name][0]}" for name in entries
    ]
    table = [".. list-table::", "   :widths: 30 70", "   :class: names", "", *rows]
    parts = [module, "=" * len(module), scope(module), module_text(module)]
    named = (f"{name}\n{'-' * len(name)}\n\n{text}" for name, (_, text) in entries.items())
    return "\n\n".join(["\n".join(parts[:2]), *parts[2:], "\n".join(table), *named])


def scope(module: str) -> str:
    """Declare the module, unless a function of its name is documented as a part of its package."""
    package, _, name = module.rpartition(".")
    kind = "currentmodule" if name in modules().get(package, ()) else "module"
    return f".. py:{kind}:: {module}"


def module_text(module: str) -> str:
    return inspect.cleandoc(import_module(module).__doc__ or "")


def index() -> str:
    """The first page of the reference."""
    titles = AREAS | {area(m): area(m).capitalize() for m in modules() if area(m) not in AREAS}
    text = ["API", "===", INTRODUCTION.strip()]
    for key, title in titles.items():
        names = [module for module in modules() if area(module) == key]
        toctree = [".. toctree::", "   :maxdepth: 1", "", *(f"   {name}" for name in names)]
        text += ["\n".join([title, "-" * len(title)]), "\n".join(toctree)]
    return "\n".join(text[:2]) + "\n\n" + "\n\n".join(text[2:])


def area(module: str) -> str:
    return "pydtnn" if module == "pydtnn" else module.split(".")[1]


INTRODUCTION = """
Every public name: those that a package offers, and those of the modules from which the pages of
this manual import something. A class is documented with the methods that it defines; what it
inherits is on the page of its base class.
"""


def project_page(path: Path) -> str:
    """One of the project's own pages, as a neighbour of the others, with links that hold there."""

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        target = target.replace("docs/", "../", 1) if target.startswith("docs/") else target
        known = target.startswith(("http", "#", "../")) or f"{target}" in PROJECT
        return f"[{text}]({target})" if known else text

    return re.sub(r"\[([^]]+)\]\(([^)\s]+)\)", link, path.read_text()).rstrip()


PROJECT = ("CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md")
"""Pages of the project that are not in the folder docs."""


def write(docs: Path) -> None:
    """Write the pages in docs/api and docs/project; files that do not change are not touched."""
    pages = {f"api/{module}.rst": page(module) for module in modules()}
    pages |= {"api/index.rst": index()}
    pages |= {f"project/{name}": project_page(ROOT / name) for name in PROJECT}
    for folder in (docs / "api", docs / "project"):
        folder.mkdir(exist_ok=True)
        for old in {*folder.iterdir()} - {docs / name for name in pages}:
            old.unlink()
    for name, text in pages.items():
        path = docs / name
        if not path.exists() or path.read_text() != text + "\n":
            path.write_text(text + "\n")
