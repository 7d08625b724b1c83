"""Lessons end in what serial training ends in, and their assertions find errors."""

import ast
import importlib
import json
import re
import runpy
import sys

import numpy as np
import pytest

from pydtnn.kernels.cpu.isa import runs
from tests.ahead import mpiexec
from tests.launch import ROOT
from tests.size import lines_of_code

FOLDER = ROOT / "lessons"
LESSONS = {path.stem[:2]: path for path in sorted(FOLDER.glob("[0-9]*.py"))}

EVERY = f"""import runpy, sys
sys.path.insert(0, {str(FOLDER)!r})
for path in {[str(path) for path in LESSONS.values()]!r}:
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")
"""


LONG = pytest.mark.long
SIZES = [pytest.param(1, marks=LONG), 3, pytest.param(2, marks=LONG), pytest.param(4, marks=LONG)]
"""Numbers of ranks."""


@pytest.fixture
def lesson(monkeypatch):
    """Return a function that carries out a lesson on threads."""
    monkeypatch.syspath_prepend(str(FOLDER))
    ranks = importlib.import_module("ranks")
    monkeypatch.setattr(ranks, "world", ranks.Threads)
    monkeypatch.setattr(ranks, "TIMEOUT_S", 60.0)

    def carry_out(path, size):
        monkeypatch.setattr(sys, "argv", [str(path), f"--ranks={size}"])
        runpy.run_path(str(path), run_name="__main__")

    return carry_out


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("number", LESSONS)
def test_a_lesson_ends_in_the_parameters_of_serial_training(number, size, lesson, capsys):
    lesson(LESSONS[number], size)
    ranks = "1 rank" if size == 1 else f"{size} ranks"
    assert f"{ranks}, largest difference from one process" in capsys.readouterr().out


@pytest.mark.parametrize("size", [6, 8])
def test_a_mesh_of_three_axes_trains(size, lesson, capsys):
    lesson(LESSONS["24"], size)
    assert f"{size} ranks" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3])
def test_lessons_run_on_processes(size):
    done = mpiexec(size, ["-c", EVERY])
    assert done.returncode == 0, done
    assert done.stdout.count(f"{size} ranks, largest difference") == len(LESSONS)


def test_gradients_of_the_layers_are_those_of_differences(lesson):
    nets, rng = importlib.import_module("nets"), np.random.default_rng(0)
    q, k, v, weight = rng.standard_normal((4, 2, 3, 5, 2))
    x, kernel, out = (rng.standard_normal(s) for s in ((2, 6, 5, 3), (3, 3, 3, 4), (2, 4, 3, 4)))
    params = nets.parameters()
    cases = [
        ([q, k, v], lambda: (nets.attention(q, k, v)[0] * weight).sum()),
        ([x, kernel], lambda: (nets.conv(x, kernel) * out).sum()),
        (params, lambda: nets.gradients(params, *nets.batch(0))[0]),
    ]
    inner = nets.conv(nets.frame(out), nets.turned(kernel))
    padded = np.pad(out, ((0, 0), (2, 2), (2, 2), (0, 0)))
    assert np.allclose(inner, nets.conv(padded, nets.turned(kernel))[:, 1:-1, 1:-1])
    expected = [
        nets.attention_backward(weight, q, k, v, nets.attention(q, k, v)[1]),
        [nets.conv(padded, nets.turned(kernel)), nets.conv_backward(out, x, kernel)],
        nets.gradients(params, *nets.batch(0))[1],
    ]
    for (arrays, loss), gradients in zip(cases, expected, strict=True):
        for array, gradient in zip(arrays, gradients, strict=True):
            direction = rng.standard_normal(array.shape)
            array += 1e-6 * direction
            above = loss()
            array -= 2e-6 * direction
            below = loss()
            array += 1e-6 * direction
            assert np.isclose((above - below) / 2e-6, (gradient * direction).sum(), rtol=1e-6)


BROKEN = {
    "01": ("d3 /= BATCH", "d3 /= BATCH + 1"),
    "02": ("total = rank.allreduce(join(grads))", "total = join(grads)"),
    "03": ("buckets.append(join([dw, db]))", "buckets.append(2 * join([dw, db]))"),
    "04": ("+= rank.receive(left)", "= rank.receive(left)"),
    "05": ("array + rank.receive(rank.rank ^ bit)", "rank.receive(rank.rank ^ bit)"),
    "06": ("BIASED = False", "BIASED = True"),
    "07": ("normal * sums[0] / BATCH", "normal * (d1 * normal).mean(axis=0)"),
    "08": ("rank.allreduce(join(params)) / rank.size", "join(params)"),
    "09": ("rank.allreduce(change) / rank.size", "rank.allreduce(change)"),
    "10": ("total[where] += what  # positions", "total[where] = what  # positions"),
    "11": ("rank.reduce_scatter(list(padded))", "padded[rank.rank].copy()"),
    "12": ("RATE / BATCH * gradient", "RATE * gradient"),
    "13": ("RATE / BATCH * rank", "RATE * rank"),
    "14": ("padded[:, 0, 1:-1] = rank.receive(up)", "rank.receive(up)"),
    "15": ("scores = rank.allreduce(mean @ w) + b", "scores = rank.allreduce(mean @ w + b)"),
    "16": ("dh0 = rank.allreduce(dh0) *", "dh0 = dh0 *"),
    "17": ("dx = dout + rank.allreduce(dx)", "dx = rank.allreduce(dout + dx)"),
    "18": ("total = rank.allreduce(join([dtable, dgain]))", "total = join([dtable, dgain])"),
    "19": ("out * shrink + p @ v", "out + p @ v"),
    "20": ("reversed(range(micro_batches))", "range(1, micro_batches)"),
    "21": ("ahead = min(size - rank - 1", "ahead = min(size - rank"),
    "22": ("if i >= rank:", "if i > rank:"),
    "23": ("theirs[..., None] == mine", "theirs[..., None] >= mine"),
    "24": ("data.allreduce(join(grads))", "join(grads)"),
    "25": ("tree(ordered)", "sum(ordered[rank.rank :] + ordered[: rank.rank])"),
    "26": ("continue  # repeat", "step += 1  # repeat"),
    "27": ("x, labels = (part(a, rank.rank, rank.size)", "x, labels = (part(a, 0, rank.size)"),
}
"""A line of each lesson, and one that is wrong."""


@pytest.mark.parametrize("number", LESSONS)
def test_the_assertions_of_a_lesson_find_an_error(number, lesson, tmp_path):
    before, after = BROKEN[number]
    text = LESSONS[number].read_text()
    assert text.count(before) == 1
    copy = tmp_path / LESSONS[number].name
    copy.write_text(text.replace(before, after))
    with pytest.raises((AssertionError, KeyError)):
        lesson(copy, 4)


@pytest.mark.parametrize("number", LESSONS)
def test_an_exercise_is_a_lesson_without_a_statement(number, lesson, tmp_path, monkeypatch):
    check = importlib.import_module("check")
    text = check.with_hole(LESSONS[number].read_text())
    copy = tmp_path / "exercise.py"
    copy.write_text(text)
    with pytest.raises(NotImplementedError):
        lesson(copy, 3)
    assert len(text.split("\n")) <= len(LESSONS[number].read_text().split("\n"))


def test_a_solution_is_checked_on_all_numbers_of_ranks(lesson, tmp_path, monkeypatch, capsys):
    check = importlib.import_module("check")
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["check.py", *words])
        return check.main()

    assert run("make", "02") == 0
    assert run("02") == 1
    assert "1 ranks: NotImplementedError" in capsys.readouterr().out
    copy = tmp_path / "exercise_02.py"
    hole = re.search(r"raise NotImplementedError.*", copy.read_text())[0]
    copy.write_text(copy.read_text().replace(hole, "total = rank.allreduce(join(grads))"))
    assert run("02") == 0
    assert "exercise 02 is right" in capsys.readouterr().out


@pytest.fixture
def library(lesson):
    return importlib.import_module("library")


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("number", LESSONS)
def test_the_library_trains_to_the_parameters_of_a_lesson(number, size, library):
    if number == "26":
        pytest.importorskip("pydtnn.tools")
    assert library.difference(number, size) <= 1e-10


def test_another_program_of_the_library_ends_in_other_parameters(library, monkeypatch):
    for number, other in (("08", "02"), ("09", "08"), ("10", "02"), ("11", "02")):
        monkeypatch.setitem(library.PROGRAMS, number, library.PROGRAMS[other])
        assert library.difference(number, 2) > 1e-4


def test_figures_are_drawn_from_what_the_lessons_compute(lesson, monkeypatch, tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="needs the extra plot")
    figures = importlib.import_module("figures")
    pipelines = importlib.import_module("pipelines")
    bars = [len(axes.patches) for axes in figures.schedules().axes]
    assert bars == [n * 4 * pipelines.MICRO_BATCHES for n in (2, 2, 3)]
    for line in figures.volumes().axes[0].lines:
        number = line.get_label()[:2]
        sent = figures.lesson(number).bytes_sent(4) / pipelines.STEPS / 1e3
        assert line.get_ydata()[2] == sent
    left, right = figures.losses(24).axes
    for line, other in zip(left.lines, right.lines, strict=True):
        first, last = line.get_ydata()
        assert last < first
        assert [*other.get_ydata()] == [first, last]
    with pyplot.rc_context({"figure.dpi": 20}):
        monkeypatch.setattr(sys, "argv", ["figures.py", str(tmp_path)])
        monkeypatch.setattr(figures.losses, "__defaults__", (12,))
        figures.main()
    pictures = sorted(path.name for path in tmp_path.iterdir())
    assert pictures == sorted(path.name for path in (FOLDER / "pictures").iterdir())
    assert pictures == re.findall(r"\(pictures/(\w+.png)\)", (FOLDER / "README.md").read_text())
    pyplot.close("all")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_stores(path, lesson, monkeypatch, capsys):
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="needs the extra plot")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    names = {"__name__": "__main__"}
    assert path.stat().st_size < 100_000
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        exec(compile("".join(cell["source"]), path.name, "exec"), names)
        stored = {output["output_type"]: output for output in cell["outputs"]}
        assert capsys.readouterr().out == "".join(stored.get("stream", {"text": []})["text"])
        assert ("display_data" in stored) == bool(pyplot.get_fignums())
        pyplot.close("all")


@pytest.fixture
def steps(lesson, monkeypatch):
    pytest.importorskip("pydtnn.tools")
    monkeypatch.syspath_prepend(str(FOLDER / "allreduce"))
    return importlib.import_module("steps")


@pytest.mark.parametrize("ranks", [3, 5, *(pytest.param(n, marks=LONG) for n in (1, 2, 8))])
def test_each_step_of_an_allreduce_sums_what_numpy_does(ranks, steps):
    for name in steps.STEPS:
        steps.outcome(name, ranks)  # asserts the sum
        assert (FOLDER / "allreduce" / f"{name}.py").read_text().count("\n") <= 80


def test_each_step_of_an_allreduce_is_faster_and_the_table_of_contents_has_its_row(steps, capsys):
    done = steps.table(steps.STEPS, 8)
    seconds = [outcome.seconds for outcome in done.values()]
    assert seconds == sorted(seconds, reverse=True)
    n = 8 * steps.ELEMENTS
    sent = [7 * n, 3 * n, 3 * n, *[2 * 7 * n // 8] * 4]
    assert [outcome.nbytes for outcome in done.values()] == sent
    text = (FOLDER / "README.md").read_text()
    for line in capsys.readouterr().out.splitlines()[1:]:
        name, messages, size, time, share = line.replace("%", " %").split(maxsplit=4)
        assert f"(allreduce/{name}.py) | {messages} | {size} | {time} | {share} |" in text


RUNGS = sorted(path for path in (FOLDER / "kernels").glob("*_*.c"))


OTHERS = {"avx2": ["-mavx2", "-mfma"], "generic": []}
TARGETS = {"machine": ["-march=native"], **OTHERS}
"""Vectors of 64 bytes where the machine has them, of 32, and those of any processor."""


@pytest.mark.parametrize("target", ["machine", *(pytest.param(n, marks=LONG) for n in OTHERS)])
@pytest.mark.parametrize("path", RUNGS, ids=lambda path: path.stem)
def test_a_rung_computes_what_numpy_does(path, target, lesson, monkeypatch, tmp_path):
    if target == "avx2" and not runs(target):
        pytest.skip("kernels for AVX2 are not built, or do not run here")
    monkeypatch.syspath_prepend(str(FOLDER / "kernels"))
    ladder = importlib.import_module("ladder")
    ladder.check(path.stem, ladder.compiled(path.stem, tmp_path, TARGETS[target]))


def test_rungs_are_short_and_in_the_table_of_contents():
    table = (FOLDER / "README.md").read_text()
    for path in [*RUNGS, *(FOLDER / "kernels").glob("*.h")]:
        assert path.read_text().count("\n") <= 80, path.name
        assert path.suffix == ".h" or f"(kernels/{path.name})" in table


def test_the_speeds_of_rungs_and_libraries_are_printed_and_drawn(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(FOLDER / "kernels"))
    ladder = importlib.import_module("ladder")
    monkeypatch.setattr(ladder, "PRODUCT", (24, 40, 16))
    monkeypatch.setattr(ladder, "IMAGES", (1, 8, 8, 16, 16))
    monkeypatch.setattr(ladder, "LEAST_S", 0)
    monkeypatch.setattr(sys, "argv", ["ladder.py", "--plot", str(tmp_path / "ladder.png")])
    ladder.main()
    printed = capsys.readouterr().out
    for name in [path.stem for path in RUNGS] + ["NumPy", "pydtnn", "pydtnn fused"]:
        assert re.search(rf"^{name} .* GFLOP/s .* of the roof$", printed, re.MULTILINE), name
    assert (tmp_path / "ladder.png").stat().st_size > 0


@pytest.mark.parametrize("number", LESSONS)
def test_a_lesson_is_short_and_the_table_of_contents_tells_its_title_and_place(number):
    path, table = LESSONS[number], (FOLDER / "README.md").read_text()
    text = path.read_text()
    assert lines_of_code(text) <= 120
    title = text[3:].partition("\n")[0].removeprefix(f"{number} ").rstrip(".")
    row = re.search(rf"\[{number}\]\({path.name}\) \| (.*) \| `(.*)` \|", table)
    assert row[1] == title
    assert f'"{row[2]}"' in text
    file, _, name = row[2].partition(": ")
    if file.startswith("pydtnn/tools/"):
        pytest.importorskip("pydtnn.tools")
    body = ast.parse((ROOT / file).read_text()).body
    defined = {one.name for one in body if isinstance(one, ast.FunctionDef | ast.ClassDef)}
    assert name in defined, row[2]
