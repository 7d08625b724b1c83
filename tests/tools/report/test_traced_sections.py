"""The sections of a report that need a trace, from a trace whose numbers are known."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pydtnn.tools.report.layers import layers
from pydtnn.tools.report.memory import memory, peaks_of
from pydtnn.tools.report.messages import blocks, messages
from pydtnn.tools.report.page import sections_of
from pydtnn.tools.report.runs import MESSAGES, RunView, read_runs
from pydtnn.tools.report.section import COLOURS, RUN_COLOURS, Figure, Section, colour
from pydtnn.tools.report.steps import PARTS, steps
from pydtnn.tools.report.timeline import timeline
from tests.tools.report.folders import write_run as write_folder
from tests.tools.tracing.synthetic import LAYERS, MS, write_run

SLOW = 3 * MS
SCALED = {"phases": "xy", "layers": "xy", "steps": "x", "memory": "y"}
"""Axes with equal scales for all runs, by section."""


def traced(tmp_path: Path, *, ranks: int = 4, messages: bool = True) -> RunView:
    """A run whose rank 1 needs 3 ms more in backward of conv2."""
    folder = write_folder(tmp_path / "run", ranks=ranks)

    def slower(rank: int, epoch: int, step: int, activity: str) -> int:
        return SLOW * (rank == 1 and activity == "conv2 backward") + step * MS // 100

    write_run(folder / "trace", ranks=ranks, slower=slower, messages=messages)
    return read_runs([folder])[0]


def cells(section: Section, title: str) -> list[str]:
    return [*next(table for table in section.tables if table.title.startswith(title)).rows[0]]


def test_the_parts_of_a_step_add_up_to_it_and_the_slow_rank_and_layer_are_named(tmp_path):
    run = traced(tmp_path)
    assert run.traced
    section = steps([run])
    bars = {bar["name"]: np.array(bar["x"]) for bar in section.figures[0].data}
    durations = run.traced.timeline.steps
    whole = (durations.stop - durations.start).mean(axis=0) / 1e6
    assert [*bars] == [*PARTS]
    np.testing.assert_allclose(sum(bars.values()), whole, rtol=0.01)
    forward = sum(forward for forward, _ in LAYERS.values()) / MS
    np.testing.assert_allclose(bars["forward"], forward, rtol=0.02)
    assert bars["waiting for a rank"][0] > 2.5 > 0.5 > bars["waiting for a rank"][1]
    assert cells(section, "Slower")[1:3] == ["rank 1", "layer conv2 (backward)"]
    assert cells(section, "What made")[1:4] == ["rank 1", "layer conv2 (backward)", "5 of 5"]


def test_the_timeline_has_the_activities_of_the_step_of_median_duration_and_of_the_slowest(
    tmp_path,
):
    median, slowest = timeline([traced(tmp_path)]).figures
    assert median.title.startswith("run: median duration, step 2 of epoch 1, ")
    assert slowest.title.startswith("run: the slowest step, step 4 of epoch 1, ")
    bars = {bar["name"]: bar for bar in median.data}
    assert len(bars["backward"]["x"]) == 4 * (1 + len(LAYERS))  # per rank a phase and its layers
    assert max(bars["backward"]["x"]) == pytest.approx(16.05, rel=0.02)
    labels = median.properties()["layout"]["yaxis"]["ticktext"]
    assert labels[:5] == ["<b>rank 0</b>  phases", "layers", "calls", "received", "loader 0"]
    assert len(labels) == 4 * 5
    places = [place for bar in median.data for place in bar["y"]]
    assert {*places} == {*range(len(labels))}


def test_the_timeline_has_no_short_activities_if_there_are_many(tmp_path, monkeypatch):
    run = traced(tmp_path, ranks=2)
    monkeypatch.setattr("pydtnn.tools.report.timeline.MAX_BARS", 40)
    for figure in timeline([run]).figures:
        assert sum(len(bar["x"]) for bar in figure.data) == 20
        assert figure.caption.startswith("Activities below ")


def test_messages_are_counted_from_rank_to_rank_per_step(tmp_path):
    sent, waited = messages([traced(tmp_path)]).figures
    assert sent.title == "run: bytes sent per step"
    expected = np.roll(np.eye(4), 1, axis=1) * 2 * 2 * 1.5  # kB: buckets x rounds x 1500 B
    np.testing.assert_allclose(matrix(sent, 4), expected)
    assert sent.caption == "In kB; the strongest colour is 6 kB."
    assert sent.x["range"] == sent.y["range"][::-1] == [-0.5, 3.5]
    assert matrix(waited, 4)[2].argmax() == 1  # a ring: rank 2 waits for rank 1


def matrix(figure: Figure, size: int) -> np.ndarray:
    """The numbers of a figure whose bars are the cells of a matrix."""
    [bars] = figure.data
    found = np.zeros((size, size))
    columns = (np.asarray(bars["base"]) + np.asarray(bars["x"]) / 2).round().astype(int)
    found[np.asarray(bars["y"]).astype(int), columns] = [float(text) for text in bars["text"]]
    return found


def test_of_many_ranks_neighbours_are_added_up_and_of_many_points_the_highest_are_kept():
    values = np.arange(130.0 * 130).reshape(130, 130)
    sums = blocks(values)
    assert sums.shape == (44, 44)
    assert sums[0, 1] == values[:3, 3:6].sum()
    assert sums.sum() == values.sum()
    np.testing.assert_array_equal(blocks(values[:64, :64]), values[:64, :64])
    y = np.random.default_rng(0).random(1000)
    x, peaks = peaks_of(np.arange(1000), y, 90)
    assert len(x) == 90
    assert peaks.max() == y.max()
    np.testing.assert_array_equal(peaks, y[x])


def test_collective_calls_have_waits_and_memory_but_no_messages(tmp_path):
    run = traced(tmp_path, messages=False)
    [waited] = messages([run]).figures
    assert waited.title == "run: waiting per step"
    z = matrix(waited, 4)
    assert z[0].argmax() == z[2].argmax() == z[3].argmax() == 1
    [figure] = memory([run]).figures
    assert [curve["name"] for curve in figure.data] == [f"rank {rank}" for rank in range(4)]
    assert all(np.diff(curve["x"]).min() >= 0 for curve in figure.data)
    np.testing.assert_allclose(figure.data[0]["y"], 1e-3)


def test_layers_have_points_of_both_directions_and_a_table(tmp_path):
    section = layers([traced(tmp_path)])
    forward, backward = section.figures[0].data
    assert section.figures[0].title == "run: roofline"
    assert len(forward["x"]) == len(backward["x"]) == len(LAYERS)
    np.testing.assert_allclose(forward["x"], 2)  # flop/B
    np.testing.assert_allclose(forward["y"], 2, rtol=0.02)  # Gflop/s: 2 flop per ns
    [table] = section.tables
    assert table.rows[0][:3] == ["conv2", "Linear", "backward"]
    first, second = section.figures[1].data
    assert first["y"] == second["y"] == ["conv2", "conv1", "fc"]
    np.testing.assert_allclose(first["x"], [3.02, 2.02, 1.02], rtol=0.01)  # ms


def test_the_roofline_is_drawn_if_the_trace_has_the_limits_of_the_machine(tmp_path):
    run = traced(tmp_path)
    assert run.traced
    limits = {"flops_per_second": 8e9, "bytes_per_second": 2e9}
    run.traced.timeline.about[0]["machine"] = limits
    section = layers([run])
    line = section.figures[0].data[0]
    assert line["name"] == "limit of the machine"
    assert not section.figures[0].caption
    np.testing.assert_allclose(line["x"], [1, 4, 8])
    np.testing.assert_allclose(line["y"], [2, 8, 8])
    assert section.tables[0].rows[0][-1] == "50 %"
    run.traced.timeline.about[0]["machine"] = {name: one / 4 for name, one in limits.items()}
    assert layers([run]).figures[0].caption.startswith("6 of 6 points are above the line: ")


def test_every_colour_has_one_meaning_and_figures_of_several_runs_have_equal_scales(tmp_path):
    folders = [write_folder(tmp_path / f"run-{n}", ranks=n) for n in (1, 2)]
    for n, folder in zip((1, 2), folders, strict=True):
        write_run(folder / "trace", ranks=n, slower=lambda *where: n * MS // 10)  # noqa: B023
    runs, scales = read_runs(folders), dict[str, set[str]]()
    assert len({*RUN_COLOURS, *COLOURS.values()}) == len(RUN_COLOURS) + len(COLOURS)
    known = COLOURS | {run.title: colour(i) for i, run in enumerate(runs)}
    known |= dict.fromkeys(("limit of the machine", "ideal", "measured"), COLOURS["other"])
    for section in sections_of(runs):
        for one in section.figures if section.name in SCALED else ():
            kind = section.name + one.title.partition(": ")[2] * (section.name != "memory")
            layout = one.properties()["layout"]
            ranges = [layout[f"{axis}axis"].get("range") for axis in SCALED[section.name]]
            assert any(ranges)
            scales.setdefault(kind, set()).add(str(ranges))
        if section.name in ("messages", "memory"):
            continue
        for trace in (trace for figure in section.figures for trace in figure.data):
            used = trace["line" if "lines" in trace.get("mode", "") else "marker"]["color"]
            assert used == known[trace["name"]], (section.name, trace["name"])
            assert trace["name"] in section.legend
    assert all(len(ranges) == 1 for ranges in scales.values())


def test_traces_of_which_nothing_can_be_shown_say_why(tmp_path):
    found = sections_of(read_runs([write_folder(tmp_path / "without")]))
    absent = {section.name: section.absent for section in found if section.empty}
    for name in ("steps", "timeline", "layers", "messages", "memory"):
        assert "--trace FOLDER:steps=10:20" in absent[name]
    run = traced(tmp_path, ranks=1)
    assert messages([run]).absent == "the traces are those of one rank"
    assert not timeline([run]).empty
    assert not steps([run]).empty
    folder = write_folder(tmp_path / "early")
    write_run(folder / "trace", ranks=2, steps=0)
    told = memory(read_runs([folder])).absent
    assert "contains no training step that all ranks have recorded" in told
    (folder / "trace" / "rank-0001.npz").unlink()  # is reported, and refused if it was given
    [run] = read_runs([folder])
    assert run.traced is None
    assert timeline([run]).absent.endswith("has the files of ranks 0 of 2; copy all")
    with pytest.raises(ValueError, match="has the files of ranks 0 of 2; copy all"):
        read_runs([folder], [str(folder / "trace")])


def test_a_trace_is_found_by_the_option_of_the_run_or_given(tmp_path):
    options = {"configuration": {"model": "mlp", "trace": str(tmp_path / "elsewhere")}}
    folders = [write_folder(tmp_path / name, **options) for name in ("a", "b")]
    assert read_runs(folders)[0].traced is None
    write_run(tmp_path / "elsewhere", ranks=1, steps=2)
    write_run(tmp_path / "given", ranks=2, steps=3)
    sizes = [
        run.traced.timeline.size if run.traced else 0
        for run in read_runs(folders, [str(tmp_path / "given")])
    ]
    assert sizes == [2, 1]
    with pytest.raises(ValueError, match=r"trace: .*nothing has no rank-\*\.npz; give the folder"):
        read_runs(folders, [str(tmp_path / "nothing")])
    with pytest.raises(ValueError, match="report: --trace: expected at most one trace per run"):
        read_runs(folders[:1], ["a", "b"])


def test_runs_without_traces_of_several_ranks_say_which_they_have():
    traced = SimpleNamespace(traced=True, untraced="")
    untraced = SimpleNamespace(traced=None, untraced="")
    assert MESSAGES.why_absent([untraced, traced]) == "the traces are those of one rank"
    assert "no run has a trace" in MESSAGES.why_absent([untraced])
