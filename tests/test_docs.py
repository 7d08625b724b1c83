"""Paths and options that the pages name exist, and every option of training is on a page."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import textwrap
import tomllib
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from pydtnn.__main__ import COMMANDS
from pydtnn.cli.config import TrainConfig, flags
from pydtnn.cli.parser import Arguments
from pydtnn.saving import models
from pydtnn.tools.completion import parser_of
from pydtnn.tools.shards import reading as shards
from pydtnn.tools.tracing import records
from pydtnn.training.checkpoint import content
from pydtnn.utils.names import foreign_names
from tests.each import each
from tests.test_imports import ROOT

PAGES = [
    *sorted({*(ROOT / "docs").rglob("*.md")} - {*(ROOT / "docs/project").glob("*")}),
    *sorted({*ROOT.glob("*.md")} - {ROOT / "CHANGELOG.md"}),
]

MADE = {
    *("path/to/file.py", "program.py", "performance_models.py", "slow.py", "run.py"),
    *("pictures/train/CLASS/", "pictures/val", "runs/mine", "runs/x", "runs/resnet20-cifar10-1"),
    *("gpu-check/report.md", "gpu-check/gpu_", "build/gpu", "/local/me", "/dev/shm"),
    *("slow_momentum.py", "weights.npz"),
}
"""What readers and programs make, and files of others."""

OF_OTHERS = {
    "pip": ("--index-url", "--no-binary"),
    "mpirun and srun": (
        *("--bind-to", "--map-by", "--mpi", "--cpu-bind", "--signal", "--gpus"),
        *("--ntasks-per-node", "--cpus-per-task", "--nodes", "--ntasks", "--job-name", "--time"),
        "--nproc-per-node",  # torchrun
        *("--host", "--hostfile", "--no-kill", "--with-ft"),
    ),
    "tools": (
        "--logdir",
        "--check",
        "--fix",
        "--debug",
    ),  # tensorboard, sha256sum, ruff, setuptools
    "Chromium": (
        *("--headless", "--screenshot", "--window-size", "--hide-scrollbars"),
        *("--force-device-scale-factor", "--virtual-time-budget"),
    ),
}
"""Options of other programs."""


def code_of(page: Path) -> list[str]:
    """What a page shows as code, line by line, and the targets of its links."""
    blocks = re.split(r"^```.*$", page.read_text(), flags=re.M)
    inline = [re.findall(r"`([^`]+)`|\]\(([^)#]+)", text) for text in blocks[::2]]
    lines = [line for block in blocks[1::2] for line in block.splitlines()]
    return [*lines, *("".join(pair) for text in inline for pair in text)]


@cache
def names_of_files() -> set[str]:
    folders = ("pydtnn", "models", "tests", "benchmarks", "examples", "docs")
    return {path.name for folder in folders for path in (ROOT / folder).rglob("*")}


def exists(name: str, page: Path) -> bool:
    if "/" not in name:
        return name in names_of_files() or (ROOT / name).exists()
    return any((folder / name).exists() for folder in (ROOT, ROOT / "pydtnn", page.parent))


@each("page", PAGES)
def test_every_file_that_a_page_names_exists(page):
    text = re.sub(
        r"https?://\S+|\d[\d.]* [GM]?\w+/s|[GM](B|bit|flop)/s", "", "\n".join(code_of(page))
    )
    roots = "pydtnn|models|tests|benchmarks|examples|docs|comm|layers|kernels|training|perfmodel"
    named = re.findall(
        rf"(?<![\w/.$~*-])(?:(?:{roots})/[\w./-]*[\w/]|[\w-]+\.(?:py|md|pyx))(?![\w*:]|/)", text
    )
    wrong = sorted({name for name in named if not exists(name, page)} - MADE)
    assert not wrong, f"{page.name} names {', '.join(wrong)}"


@cache
def known_options() -> set[str]:
    """The options of all commands, of benchmarks and of tests."""
    sources = (
        path
        for top in ("pydtnn", "benchmarks", "tests", "packaging")
        for path in (ROOT / top).rglob("*.py")
    )
    texts = (text for path in sources if ".add" in (text := path.read_text()))
    found = {name for text in texts for name in re.findall(r'"(--[a-z][a-z0-9-]*)"', text)}
    found |= {own.label for own in flags(TrainConfig).values()}
    return found | {f"--no-{name[2:]}" for name in found}


@each("page", PAGES)
def test_every_option_that_a_page_names_exists(page):
    text = page.read_text()
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text))
    others = {name for names in OF_OTHERS.values() for name in names}
    tables = foreign_names()
    others |= {n.replace("_", "-") for t in ("options", "aliases") for n in tables[t]}
    wrong = named - known_options() - others
    if page.name == "pydtnn.md":  # the first column is that of another library
        wrong -= {*re.findall(r"--[a-z][a-z0-9-]*", "".join(re.findall(r"^\|[^|]*", text, re.M)))}
    assert not wrong, f"{page.name} names {', '.join(sorted(wrong))}"


def test_every_option_of_a_command_line_of_training_in_a_page_is_one_of_training():
    own = {option.label for option in flags(TrainConfig).values() if not option.owner}
    own |= {f"--no-{name[2:]}" for name in own} | {
        *("--recipe", "--config", "--print-config"),
        "--help",
        "--version",
    }
    for page in PAGES:
        for line in re.sub(r"\\\n", " ", page.read_text()).splitlines():
            _, found, rest = line.partition("pydtnn.train ")
            options = re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", re.split(r"[`#|]", rest)[0])
            assert not found or {*options} <= own, f"{page.name}: {line}"


def test_every_option_of_training_is_on_a_page():
    text = "\n".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"--[a-z][a-z0-9-]*", text))
    own = [option for option in flags(TrainConfig).values() if option.key != "options"]
    unnamed = [o.label for o in own if not {o.label, f"--no-{o.label[2:]}"} & named]
    assert [name for name in unnamed if f"{name.rpartition(' ')[2]}=" not in text] == []


def blocks(page: Path, *languages: str) -> list[str]:
    """The code blocks of a page in some languages."""
    found = re.findall(r"^( *)```(\w*)\n(.*?)^ *```", page.read_text(), re.M | re.S)
    return [textwrap.dedent(text) for _, language, text in found if language in languages]


@each("page", PAGES)
def test_every_python_block_of_a_page_is_python_and_imports_what_exists(page):
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("pydtnn"):
                module = import_module(str(node.module))
                for alias in node.names:
                    assert alias.name == "*" or hasattr(module, alias.name), ast.unparse(node)


@each("page", PAGES)
def test_every_shell_block_of_a_page_has_the_syntax_of_a_shell(page):
    text = "\n".join(blocks(page, "bash", "sh"))
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_page_of_the_manual_is_in_its_navigation():
    pages = {*(ROOT / "docs").rglob("*.md")} & {*PAGES}
    listed = {ROOT / "docs" / "index.md"}
    for page in pages:
        for entries in re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text(), re.M | re.S):
            names = re.findall(r"^[\w./-]+$", entries, re.M)
            listed |= {page.parent / f"{name}.md" for name in names}
    assert pages - listed == set()


def commands(page: Path) -> list[list[str]]:
    """The arguments of ``pydtnn`` in the shell blocks of a page, ["train", "--epochs", ...]."""
    found = []
    for block in blocks(page, "bash", "sh", ""):
        for line in re.sub(r"\\\n", " ", block).splitlines():
            begin = re.search(r"(?:^|\s)(?:python3? -m pydtnn[. ]|pydtnn[ -])(?=[a-z])", line)
            words = shlex.split(line[begin.end() :], comments=True) if begin else []
            end = [i for i, word in enumerate(words) if word in (">", "|", "...", ";")]
            found += [words[: min(end, default=len(words))]] if words else []
    return found


@each("page", PAGES)
def test_every_command_of_a_shell_block_is_accepted_by_its_parser(page):
    for command, *arguments in commands(page):
        assert command in COMMANDS, command
        if command in ("predict", "info") or "--help" in arguments:
            continue
        if command == "train":
            arguments = [word for word in arguments if word not in ("--print-config",)]
            values = {"$ranks": "4", "{...}": "{}"}
            Arguments([values.get(word, word) for word in arguments])
        else:
            parser_of(command).parse_args(arguments)


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings: lower case, without punctuation, with hyphens."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    found = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


@each("page", [*PAGES, ROOT / "CHANGELOG.md"])
def test_every_link_of_a_page_leads_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)", text):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in headings(file), f"{page.name} links to {target}#{anchor}"


def test_every_extra_that_a_page_or_an_error_names_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {*project["optional-dependencies"]}
    sources = [*(ROOT / "pydtnn").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    for path in [*PAGES, *sources]:
        text = path.read_text()
        lists = re.findall(r"(?:pip install|make)[^\n`]*?(?:\.|pydtnn)\[([\w,-]+)\]", text)
        named = {name for names in lists for name in names.split(",")}
        named |= {*re.findall(r"[Tt]he extra `(\w+)`", text)}
        assert named <= extras, f"{path.name} names the extra {min(named - extras)}"


def test_formats_of_files_in_the_page_about_versions_are_those_of_the_code():
    shown = dict(
        re.findall(r"^\| ([^|]+?) \| (\d+) \|", (ROOT / "docs/support.md").read_text(), re.M)
    )
    assert shown == {
        "saved model (`model.json`)": str(models.FORMAT),
        "checkpoint (`state.json`)": str(content.FORMAT),
        "index of shards (`index.json`)": str(shards.VERSION),
        "trace of a rank": str(records.VERSION),
    }


def test_every_stop_of_the_tour_is_defined_in_its_file():
    text = (ROOT / "docs/tour.md").read_text()
    for name, file in re.findall(r"(?:`([\w.]+)`\s+in\s+)?`([a-z0-9_/]+\.py)`", text):
        place: ast.AST = ast.parse((ROOT / "pydtnn" / file).read_text())
        for part in filter(None, name.split(".")):
            inside = {node.name: node for node in place.body if hasattr(node, "name")}
            assert part in inside, f"{file} has no {name}"
            place = inside[part]


def test_every_folder_of_the_repository_is_part_of_the_source_distribution():
    """A folder that a program has left behind and somebody has added is found here."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    folders = {name.partition("/")[0] for name in listed.split("\n") if "/" in name}
    packed = re.findall(r"^graft (\w+)$", (ROOT / "MANIFEST.in").read_text(), re.M)
    assert {name for name in folders if not name.startswith(".")} == {*packed}


def test_the_paper_has_the_form_of_its_journal_and_cites_its_bibliography():
    text = (ROOT / "paper/paper.md").read_text()
    bibliography = (ROOT / "paper/paper.bib").read_text()
    entries = re.findall(r"^@\w+\{(\w+),", bibliography, re.M)
    assert {*re.findall(r"@(\w+)", text)} == {*entries}
    assert len(re.findall(r"^  doi = \{10\.\d{4,}/\S+\}$", bibliography, re.M)) == len(entries)
    for section in (
        *("Summary", "Statement of need", "State of the field", "Software design"),
        *("Research impact statement", "AI usage disclosure", "Acknowledgements", "References"),
    ):
        assert f"\n# {section}\n" in text
    assert 750 <= len(text.partition("\n# Summary")[2].split()) <= 1750
    for name in re.findall(r"`(\w+\.txt)`", text):
        assert (ROOT / "benchmarks/results" / name).exists()
