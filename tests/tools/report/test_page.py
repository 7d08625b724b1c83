"""The page: complete, valid for Plotly, and drawn by a browser."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import pytest

from pydtnn.tools.perfmodel import job, predicted
from pydtnn.tools.report.__main__ import main
from pydtnn.tools.report.page import sections_of
from pydtnn.tools.report.runs import read_runs
from pydtnn.train import main as train
from tests.each import each
from tests.small_run import TINY
from tests.tools.report import browser
from tests.tools.report.folders import write_run
from tests.tools.tracing.synthetic import write_run as write_trace

pytest.importorskip("jinja2")


def folders(tmp_path: Path, *ranks: int) -> list[Path]:
    """Folders of runs with traces."""
    found = [
        write_run(tmp_path / f"run-{n}", ranks=n, environment={"commit": 40 * str(n), "cpu": "<b>"})
        for n in ranks
    ]
    for n, folder in zip(ranks, found, strict=True):
        write_trace(folder / "trace", ranks=n)
    return found


def written(tmp_path: Path, *ranks: int) -> Path:
    """The page of runs with traces."""
    file = tmp_path / "page.html"
    assert main([*map(str, folders(tmp_path, *ranks)), "-o", str(file)]) == 0
    return file


def test_the_page_has_all_figures_escapes_text_and_refers_to_no_other_file(tmp_path, capsys):
    file = written(tmp_path, 1, 2)
    text = file.read_text()
    assert capsys.readouterr().out == f"{file}: {file.stat().st_size / 1e6:.1f} MB\n"
    assert file.stat().st_size < 1.5e6
    page = re.sub(r"(?s)<script>.*?</script>", "", text)
    assert "&lt;b&gt;" in page
    assert not re.search(r"""(src|href)=["'](?!#|data:)""", page)
    figures = re.findall(r'(?s)<script type="application/json">(.*?)</script>', page)
    assert len(figures) == page.count("<figure") > 15
    for figure in figures:
        json.loads(figure)


def test_a_run_of_the_command_line_with_a_trace_has_all_sections_but_those_of_several_ranks(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job, "MAX_SPREAD", math.inf)  # other tests keep the machine busy
    monkeypatch.setattr(predicted, "MIN_STEPS", 0)
    options = ["--progress=none", "--output-dir=run", "--trace=steps", "--trace-steps=2:6"]
    assert train([*TINY, *options]) == 0
    [run] = read_runs(["run"])
    [*_, line] = Path("run", "measurements.jsonl").read_text().splitlines()
    assert "step_memory" in json.loads(line)["ranks"][0]
    assert run.traced
    assert len(run.traced.steps) == 4
    assert {section.name for section in sections_of([run]) if section.empty} == {
        "scaling",
        "messages",
    }
    assert main(["run"]) == 0
    assert "report.html: " in capsys.readouterr().out
    assert "run: the slowest step, step " in Path("report.html").read_text()


def test_a_missing_package_is_a_sentence_with_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main([str(write_run(tmp_path / "run")), "-o", str(tmp_path / "page")]) == 1
    assert "requires jinja2; install it with: pip install" in capsys.readouterr().err
    assert main(["run", "--figures=pdf"]) == 1
    assert "--figures has been removed: the page saves each" in capsys.readouterr().err


def test_wrong_folders_and_outputs_are_sentences(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert "contains no run; give the folder that a run prints" in capsys.readouterr().err
    run = str(write_run(tmp_path / "run"))
    assert main([run, "--step", "0:7"]) == 1
    assert "--step has been removed: pydtnn trace export FOLDER" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main([run, "-o", str(tmp_path / "file" / "page.html")]) == 1
    assert "report: --output: cannot write" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.skipif(not browser.find(), reason="there is no Chromium on the PATH")
@each("ranks", [(2,), (1, 2), (1, 2, 4)])
def test_a_browser_draws_every_figure_without_errors_at_both_widths_light_and_dark(tmp_path, ranks):
    file = written(tmp_path, *ranks)
    with browser.browser(tmp_path / "profile") as tab:
        for width, scheme in ((1280, "light"), (400, "light"), (400, "dark")):
            scheme_of = [{"name": "prefers-color-scheme", "value": scheme}]
            tab.call("Emulation.setEmulatedMedia", features=scheme_of)
            tab.open(file, width)
            assert tab.complaints == []
            assert {url for url in tab.requested if not url.startswith("data:")} == {file.as_uri()}
            assert tab.value("document.documentElement.scrollWidth") == width
            assert tab.value(COUNT.format("!f.querySelector('.trace, .point')")) == 0
            # Plotly knows all properties of the figures.
            assert not tab.value(COUNT.format("Plotly.validate(...drawing(f))"))
            assert tab.value(ILLEGIBLE) == []
            assert tab.value(CUT) == []
            assert tab.value("getComputedStyle(document.body).backgroundColor") == PAGE[scheme]
            papers = "[...document.querySelectorAll('.main-svg')].map(s => s.style.background)"
            assert {*tab.value(papers)} <= {PAGE[scheme], ""}


@pytest.mark.long
@pytest.mark.skipif(not browser.find(), reason="there is no Chromium on the PATH")
def test_headings_sort_rows_by_number_and_entries_of_legends_hide_traces(tmp_path):
    file = written(tmp_path, 1, 2, 4)
    with browser.browser(tmp_path / "profile") as tab:
        tab.open(file, 1280)
        column = (
            "[...document.querySelectorAll('#scaling tbody tr')].map(r => r.cells[3].innerText)"
        )
        rates = ["640", "1,280", "2,560"]
        for order in (rates, rates[::-1]):
            tab.value("document.querySelectorAll('#scaling thead th')[3].click()")
            assert [text.split()[0] for text in tab.value(column)] == order
        tab.value("document.querySelectorAll('#training .legend button')[1].click()")
        shown = "document.querySelector('#training .plot').data.map(t => t.visible !== false)"
        assert tab.value(shown) == [True, False, True] * 2  # also its validation
        tab.value("document.querySelectorAll('#training .legend button')[1].click()")
        assert all(tab.value(shown))


PAGE = {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 24, 28)"}

COUNT = """
(() => {{
  const drawing = (figure) => {{
    const {{ data, layout }} = JSON.parse(figure.querySelector("script").textContent);
    return [data, layout];
  }};
  return [...document.querySelectorAll("figure")].filter((f) => {}).length;
}})()
"""
"""How many figures fulfil a condition."""

CUT = """
[...document.querySelectorAll("table:not(details:not([open]) table) :is(th, td)")]
  .filter((cell) => cell.getClientRects().length)
  .filter((cell) => cell.getBoundingClientRect().right > innerWidth)
  .map((cell) => cell.textContent)
"""
"""The cells of tables that are cut off at the right side of the window."""

ILLEGIBLE = """
[...document.querySelectorAll("figure")].flatMap((figure) => {
  const inner = figure.getBoundingClientRect();
  const texts = [...figure.querySelectorAll("svg text")].filter((text) => text.textContent.trim());
  const boxes = texts.map((text) => text.getBoundingClientRect());
  const cut = texts.filter(
    (_, i) => boxes[i].right > inner.right + 1 || boxes[i].left < inner.left - 1);
  const hidden = texts.filter((_, i) => boxes.some((other, j) =>
    j < i
    && Math.min(boxes[i].right, other.right) - Math.max(boxes[i].left, other.left) > 2
    && Math.min(boxes[i].bottom, other.bottom) - Math.max(boxes[i].top, other.top) > 3));
  const title = figure.querySelector("h3").textContent;
  return [...cut, ...hidden].map((text) => title + ": " + text.textContent);
})
"""
"""The texts in figures that are cut off at a side or cover another one."""
