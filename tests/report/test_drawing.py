"""The figures of a report as files."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from pydtnn.report.__main__ import main
from pydtnn.report.drawing import COLUMN_INCHES, FORMATS, PAGE_INCHES, draw_figures
from pydtnn.report.page import sections_of
from pydtnn.report.runs import read_runs
from pydtnn.report.section import Figure, Section, line, stacked_bars
from tests.each import each
from tests.report.folders import write_run
from tests.tracing.synthetic import write_run as write_trace

pytest.importorskip("matplotlib")

Capture = pytest.CaptureFixture[str]


def folders(tmp_path: Path, *ranks: int) -> list[str]:
    found = [write_run(tmp_path / f"run-{n}", ranks=n) for n in ranks]
    for n, folder in zip(ranks, found, strict=True):
        write_trace(folder / "trace", ranks=n)
    return [*map(str, found)]


@each("format", FORMATS)
def test_each_figure_of_the_page_is_a_file(tmp_path: Path, format: str, capsys: Capture) -> None:
    runs, target = folders(tmp_path, 2), tmp_path / "drawn"
    assert main([*runs, f"--figures={format}", "-o", str(target)]) == 0
    printed = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert {*printed} == {*target.iterdir()}
    sections = sections_of(read_runs(runs))
    assert len(printed) == sum(len(section.figures) for section in sections) > 10
    starts = {"pdf": b"%PDF", "png": b"\x89PNG", "svg": b"<?xml"}
    assert all(path.read_bytes().startswith(starts[format]) for path in printed)
    assert {"training-loss", "layers-run-2-roofline"} <= {path.stem for path in printed}


def test_figures_of_several_runs_are_drawn_without_warnings(tmp_path: Path) -> None:
    sections = sections_of(read_runs(folders(tmp_path, 1, 2, 4)))
    paths = draw_figures(sections, tmp_path / "drawn", "svg")
    assert len({*paths}) == len(paths)


def drawn(section: Section, folder: Path) -> str:
    [path] = draw_figures([section], folder, "svg")
    return path.read_text()


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_a_figure_has_axes_and_a_legend_but_no_title(tmp_path: Path) -> None:
    data = [
        line("training", [1, 2, 3], [0.5, None, 0.7], "#112233"),
        line("other", [1], [2], "#445566"),
    ]
    figure = Figure("A title", data, "epoch", "loss", "A caption.")
    legend = {"training": "#112233 line", "other": "#445566 dash", "absent": "#000000"}
    svg = drawn(Section("training", "Training", "", [figure], legend=legend), tmp_path)
    found = texts(svg)
    assert {"epoch", "loss", "training", "other", "1", "2", "3"} <= {*found}
    assert not {"A title", "A caption.", "absent", "Training"} & {*found}
    assert "#112233" in svg
    width = float(re.search(r'<svg .*?width="([\d.]+)pt"', svg, re.S)[1])  # type: ignore[index]
    assert width == pytest.approx(72 * COLUMN_INCHES)


def test_a_single_meaning_needs_no_legend_and_a_wide_figure_is_as_wide_as_a_page(
    tmp_path: Path,
) -> None:
    figure = Figure("A", [line("run", [1, 2], [0.5, 0.7], "#112233")], "x", "y", wide=True)
    svg = drawn(Section("s", "S", "", [figure], legend={"run": "#112233 line"}), tmp_path)
    assert "run" not in texts(svg)
    width = float(re.search(r'<svg .*?width="([\d.]+)pt"', svg, re.S)[1])  # type: ignore[index]
    assert width == pytest.approx(72 * PAGE_INCHES)


def test_names_of_runs_are_inside_of_a_figure_and_kinds_of_lines_are_explained(
    tmp_path: Path,
) -> None:
    names = ["a_run_with_a_rather_long_name_1 (seed 1)", "another " * 12]
    kinds = [{}, {"dash": "dash"}]
    data = [line(name, [1, 2], [3, 4], "#112233", **look) for name in names for look in kinds]
    looks = {name: "#112233 line" for name in names}
    looks |= {"training": "#888888 line", "validation": "#888888 dash"}
    section = Section("s", "S", "", [Figure("A", data, "x", "y")], legend=looks)
    svg = drawn(section, tmp_path)
    found = texts(svg)
    assert {names[0], "training", "validation"} <= {*found}
    assert sum(text.count("another") for text in found) == 12  # in several lines
    for text in found:  # a character has at most 7 points
        place = re.search(rf'<text[^>]*?(?:x="|translate\()([\d.]+)[^>]*>{re.escape(text)}<', svg)
        assert place is not None
        if len(text) > 20:
            assert float(place[1]) + 4.2 * len(text) < 72 * COLUMN_INCHES


def test_bars_of_a_stack_begin_where_the_preceding_ones_end(tmp_path: Path) -> None:
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


def test_equal_runs_give_equal_files(tmp_path: Path) -> None:
    sections = sections_of(read_runs([write_run(tmp_path / "run")]))
    for format in ("pdf", "svg"):
        first, second = (draw_figures(sections, tmp_path / part, format) for part in "ab")
        assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]


def test_fonts_of_pdf_files_are_vectors(tmp_path: Path) -> None:
    sections = sections_of(read_runs([write_run(tmp_path / "run")]))
    content = draw_figures(sections, tmp_path / "drawn", "pdf")[0].read_bytes()
    assert b"/Type3" not in content.replace(b" ", b"")


def test_a_missing_package_and_a_wrong_format_are_sentences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    run = str(write_run(tmp_path / "run"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([run, "--figures=pdf", "-o", str(tmp_path / "drawn")]) == 1
    said = "report: --figures requires matplotlib; install it with: pip install matplotlib\n"
    assert capsys.readouterr().err == said
    with pytest.raises(SystemExit):
        main([run, "--figures=gif"])
    assert "invalid choice: 'gif'" in capsys.readouterr().err
