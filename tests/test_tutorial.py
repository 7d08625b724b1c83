"""The code of the tutorial, of comparisons and of notebooks runs; their form is as promised."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.digits import needs_digits
from tests.each import each
from tests.test_docs import PAGES, blocks
from tests.test_imports import ROOT

DOCS = ROOT / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
CODE = [
    page for page in PAGES if page.parent.name in ("compare", "tutorial") and blocks(page, "python")
]


def run(parts: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Execute pieces of code one after the other; one that begins with a file's name is one."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    for part in parts:
        if file := re.match(r"# (\w+\.py)\n", part):
            (folder / file[1]).write_text(part)
        exec(compile(part, "<manual>", "exec"), names)


@needs_digits
@pytest.mark.few(1)
@pytest.mark.parametrize("page", CODE, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    run(blocks(page, "python"), tmp_path, monkeypatch)


def cells(notebook: Path) -> list[dict[str, Any]]:
    found = json.loads(notebook.read_text())["cells"]
    return [cell for cell in found if cell["cell_type"] == "code"]


@needs_digits
@pytest.mark.long
@each("notebook", NOTEBOOKS)
def test_a_notebook_runs_from_top_to_bottom(notebook, tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="needs the extra plot")
    run(["".join(cell["source"]) for cell in cells(notebook)], tmp_path, monkeypatch)
    pyplot.close("all")


@each("notebook", NOTEBOOKS)
def test_a_notebook_stores_small_outputs_and_no_error(notebook):
    assert notebook.stat().st_size < 100_000
    outputs = [output for cell in cells(notebook) for output in cell["outputs"]]
    assert any("image/png" in output.get("data", ()) for output in outputs)
    assert {output["output_type"] for output in outputs} <= {
        *("stream", "display_data", "execute_result")
    }
    for cell in cells(notebook):
        assert cell["outputs"] or "print(" not in "".join(cell["source"])


def test_there_are_six_chapters_and_four_notebooks():
    chapters = sorted(page.stem for page in (DOCS / "tutorial").glob("[0-9]*.md"))
    assert [int(name[0]) for name in chapters] == [1, 2, 3, 4, 5, 6]
    assert len(NOTEBOOKS) == 4


def test_every_page_about_a_topic_of_research_has_a_figure_a_command_and_papers():
    topics = {*(DOCS / "research").glob("*.md")} - {DOCS / "research" / "index.md"}
    assert {topic.stem for topic in topics} == {
        *("schemes", "rare", "muon", "asynchronous", "oracle", "virtual_ranks"),
        *("traces", "exactness", "over_ranks"),
    }
    for topic in topics:
        text = topic.read_text()
        assert re.search(r"^!\[.+\]\(.+\.png\)", text, re.M), topic.name
        assert re.search(r"^(mpirun .*)?python ", "\n".join(blocks(topic, "bash")), re.M)
        assert len(re.findall(r"\b(?:19|20)\d\d\b", text.partition("**Papers**")[2])) >= 3


def test_the_readme_is_one_page():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 80


FIGURES = [
    "schemes",
    "muon",
    "asynchronous",
    "rare",
    "decoupled",
    "buckets",
    "exactness",
    "step",
    "speed",
    "packages",
]


@needs_digits
@pytest.mark.few(1)
@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_of_the_manual_is_drawn(name, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra plot")
    code = "import figures as f; f.EPOCHS |= dict.fromkeys(f.EPOCHS, 2) | {'seeds': 1}; f.main()"
    command = [sys.executable, "-c", code, name, "drawn.png"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{DOCS}:{ROOT}"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")
    assert (DOCS / "pictures" / f"{name}.png").exists()


def test_every_public_name_has_a_docstring(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import reference

    monkeypatch.delitem(sys.modules, "reference")
    names = {(module, name) for module, names in reference.modules().items() for name in names}
    assert [full for full in sorted(names) if not reference.entry(*full)[0]] == []
