"""The figures of a report as files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pydtnn.tools.report.__main__ import main
from pydtnn.tools.report.drawing import COLUMN_INCHES, FORMATS, PAGE_INCHES, draw_figures
from pydtnn.tools.report.page import sections_of
from pydtnn.tools.report.runs import read_runs
from pydtnn.tools.report.section import Figure, Section, line, stacked_bars
from tests.each import each
from tests.tools.report.folders import write_run
from tests.tools.tracing.synthetic import write_run as write_trace

pytest.importorskip("matplotlib")

Capture = pytest.CaptureFixture[str]


@each("format", FORMATS)
def test_each_figure_of_the_page_is_a_file(tmp_path, format, capsys):
    ranks = (1, 2) if format == "svg" else (2,)
    runs = [str(write_run(tmp_path / f"run-{n}", ranks=n)) for n in ranks]
    for n, run in zip(ranks, runs, strict=True) if format == "svg" else ():
        write_trace(Path(run) / "trace", ranks=n)
    target = tmp_path / "drawn"
    assert main([*runs, f"--figures={format}", "-o", str(target)]) == 0
    printed = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert {*printed} == {*target.iterdir()}
    sections = sections_of(read_runs(runs))
    assert len(printed) == sum(len(section.figures) for section in sections) > 2
    starts = {"pdf": b"%PDF", "png": b"\x89PNG", "svg": b"<?xml"}
    contents = [path.read_bytes() for path in printed]
    assert all(content.startswith(starts[format]) for content in contents)
    assert not any(b"/Type3" in content.replace(b" ", b"") for content in contents)  # are vectors
    names = {"training-loss"} | ({"layers-run-2-roofline"} if format == "svg" else set())
    assert names <= {path.stem for path in printed}
    again = draw_figures(sections[:2], tmp_path / "again", format)  # equal runs give equal files
    assert all(path.read_bytes() == (target / path.name).read_bytes() for path in again)


def drawn(section: Section, folder: Path) -> str:
    [path] = draw_figures([section], folder, "svg")
    return path.read_text()


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def width(svg: str) -> float:
    """In inches."""
    return float(re.search(r'<svg .*?width="([\d.]+)pt"', svg, re.S)[1]) / 72  # type: ignore[index]


def test_a_figure_has_axes_and_a_legend_of_several_meanings_but_no_title(tmp_path):
    names = {"a_run_with_a_long_name (seed 1)": "#112233", "another " * 12: "#445566"}
    kinds = {"training": {}, "validation": {"dash": "dash"}}
    data = [
        line(name, [1, 2, 3], [0.5, None, 0.7], colour, **look)
        for name, colour in names.items()
        for look in kinds.values()
    ]
    spread = {"array": [0.1] * 3, "arrayminus": [0.2] * 3, "color": "#778899"}
    data.append({**data[0], "error_y": spread})
    figure = Figure("A title", data, "epoch", "loss", "A caption.")
    legend = {name: f"{colour} line" for name, colour in names.items()}
    legend |= {"training": "#888888 line", "validation": "#888888 dash", "absent": "#000000"}
    svg = drawn(Section("training", "Training", "", [figure], legend=legend), tmp_path)
    found = texts(svg)
    assert {"epoch", "loss", next(iter(names)), *kinds, "1", "2", "3"} <= {*found}
    assert not {"A title", "A caption.", "absent", "Training"} & {*found}
    assert sum(text.count("another") for text in found) == 12  # in several lines
    assert max(map(len, found)) < 50
    assert "#112233" in svg
    assert "#778899" in svg
    assert width(svg) == pytest.approx(COLUMN_INCHES)
    figure = Figure("A", [line("run", [1, 2], [0.5, 0.7], "#112233")], "x", "y", wide=True)
    svg = drawn(Section("s", "S", "", [figure], legend={"run": "#112233 line"}), tmp_path / "wide")
    assert "run" not in texts(svg)  # a single meaning needs no legend
    assert width(svg) == pytest.approx(PAGE_INCHES)


def test_bars_of_a_stack_begin_where_the_preceding_ones_end(tmp_path):
    parts = {"compute": [1.0, 2.0], "data": [3.0, 1.0], "other": [0.0, 0.0]}
    legend = {"compute": "#3B5998", "data": "#E69F00", "other": "#8A8A8A"}
    figure = stacked_bars("A", ["rank 0", "rank 1"], parts, {"title": "time (s)", "range": [0, 4]})
    svg = drawn(Section("s", "S", "", [figure], legend=legend), tmp_path)
    assert {"rank 0", "rank 1", "time (s)", "compute", "data"} <= {*texts(svg)}
    assert "other" not in texts(svg)  # has no length
    paths = re.findall(r'<path d="M ([^"]*)z\s*"[^>]*style="fill: (#[0-9a-f]{6})"', svg)
    ends: dict[str, list[tuple[float, float]]] = {}
    for path, colour in paths:
        x = [float(point.split()[0]) for point in re.split(r"\s*[ML]\s*", path) if point.strip()]
        ends.setdefault(colour, []).append((min(x), max(x)))
    # besides the bars, each colour has a patch in the legend
    stacked = [(a, b) for a in ends["#3b5998"] for b in ends["#e69f00"] if abs(b[0] - a[1]) < 1e-3]
    assert len(stacked) == 2
    lengths = [(b[1] - a[0]) / (a[1] - a[0]) for a, b in stacked]
    assert lengths == pytest.approx([4 / 1, 3 / 2], rel=1e-3)
