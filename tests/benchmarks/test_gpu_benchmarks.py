"""The benchmarks of a GPU on a simulated one, and on the CPU: what they call is there, and works.

What they print means nothing then. PyTorch's side is in `tests/parity`.
"""

import json
import math
import time

import pytest

from tests.each import each
from tests.gpu import needed
from tests.simulated.backend import installed, why_not
from tests.simulated.cupy import SimulatedCupy

SMALL = (1, 32, 32, 16)

simulated = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


@pytest.fixture
def gpu(monkeypatch):
    """Let ``create_cuda_backend`` find a simulated GPU, on which everything takes a millisecond."""
    device = SimulatedCupy(eager=True)
    monkeypatch.setattr(type(device.cuda), "get_elapsed_time", lambda *_: 1.0, raising=False)
    with installed(device):
        yield device


def asked(turns):
    """Ask a side for turns; remember what it says."""
    said = []

    def ask(seconds):
        said.append(seconds)
        return turns.pop(0)

    return ask, said


# -- steps


@simulated
@each("dtype", ["float32", "bfloat16"])
def test_our_side_makes_as_many_steps_as_it_is_asked_for(gpu, dtype):
    from benchmarks.gpu.work import WORK, Ours

    side = Ours(WORK["mlp-8"], dtype, "cuda")
    ask, said = asked([5, 2, 1, 0])
    side.turns(ask)
    assert said[0] is None
    assert all(seconds > 0 for seconds in said[1:])
    assert len(said) == 4
    assert side.trainer.step == 8
    assert side.note == "one CUDA graph"
    assert side.memory() > 0


@pytest.fixture
def side():
    """Start a side as a process."""
    from benchmarks.gpu.step_time import start

    started = start("ours", "cpu")
    yield started
    started.close()
    assert not started.alive()


def test_a_process_serves_one_work_after_the_other_and_survives_mistakes(side):
    from benchmarks.common.sides import SideError

    for _ in range(2):
        side.begin("mlp-8", "float32")
        assert side.turn(2, 60) > 0
        assert side.end() == {"memory": 0.0, "note": ""}
    with pytest.raises(SideError, match="KeyError: 'nothing'"):
        side.begin("nothing", "float32")
    side.begin("mlp-8", "float32")
    assert side.turn(1, 60) > 0


def test_a_silent_side_is_ended(side):
    from benchmarks.common.sides import SideError

    side.begin("mlp-8", "float32")
    with pytest.raises(SideError, match="gave no answer in 0 s"):
        side.turn(10**6, 0.2)
    assert not side.alive()
    with pytest.raises(SideError, match="has ended"):
        side.ask({"steps": 1})


class StandIn:
    """A side that takes some seconds per step, or fails."""

    def __init__(self, seconds, fails=""):
        self.seconds, self.fails = seconds, fails

    def begin(self, name, dtype):
        from benchmarks.common.sides import SideError

        if self.fails:
            raise SideError(self.fails)

    def turn(self, steps, patience):
        return self.seconds

    def end(self):
        return {"memory": 10.0, "note": "one CUDA graph"}

    def alive(self):
        return True

    def close(self):
        pass


@pytest.fixture
def table(monkeypatch, tmp_path):
    """Measure rows with sides that are none."""
    from benchmarks.common.report import Report
    from benchmarks.gpu import step_time as gpu_step_time

    def measure(sides, rows, seconds=60.0, runs=1, done=None):
        monkeypatch.setattr(gpu_step_time, "start", lambda name, device: sides[name])
        path = tmp_path / "steps.json"
        with gpu_step_time.Table(tuple(sides), "cpu", Report(), path, done or {}) as table:
            complete = table.measure(rows, runs, 3, seconds)
        return complete, json.loads(path.read_text())

    return measure


def test_rows_are_ratios_of_images_per_second_without_peers_that_fail(table, capsys):
    sides = {"ours": StandIn(0.01), "eager": StandIn(0.03), "compiled": StandIn(1, "no compiler")}
    complete, rows = table(sides, ["resnet44-128:float32"], runs=2)
    assert complete
    row = rows["resnet44-128 float32"]
    assert row["images/s"]["ours"] == pytest.approx(12800)
    assert row["ratio"] == pytest.approx({"eager": 3.0})
    assert row["failed"] == {"compiled": "no compiler"}
    assert row["note"] == "one CUDA graph"
    printed = capsys.readouterr().out
    assert "3.00 (3.00 to 3.00)" in printed
    assert "compiled: no compiler" in printed


# -- kernels


@pytest.fixture
def kernels(monkeypatch, tmp_path):
    """Measure kernels on small tensors, without PyTorch."""
    from benchmarks.common.report import Report
    from benchmarks.gpu import compute as gpu_compute
    from benchmarks.gpu import kernels as gpu_kernels

    monkeypatch.setitem(gpu_kernels.SHAPES, "warm", SMALL)
    monkeypatch.setattr(gpu_compute, "WITH_TORCH", False)

    def make(backend, seconds=math.inf):
        deadline, path = time.monotonic() + seconds, tmp_path / "kernels.json"
        made = gpu_kernels.Kernels(backend, Report(), 2, deadline, path)
        return made, lambda: json.loads(path.read_text())

    return make


@simulated
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_kernel_that_moves_data_is_captured_and_timed(gpu, kernels, dtype, capsys):
    from benchmarks.common.memory_bound import FAMILIES
    from benchmarks.gpu.work import create_backend

    measured, numbers = kernels(create_backend("cuda"))
    assert measured.move(list(FAMILIES), "warm", dtype)
    table = numbers()["memory"][dtype]
    assert table["complete"]
    assert table["failed"] == {}
    families = {name.split()[0] for name in table["warm"]}
    assert families == set(FAMILIES) - ({"update"} if dtype == "bfloat16" else set())
    assert " !" not in capsys.readouterr().out


@needed()
class TestGpu:
    """On a GPU that is there; compute-sanitizer watches this (`gpu_check.py`)."""

    @pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
    def test_every_kernel_that_moves_data_runs(self, kernels, dtype):
        from benchmarks.common.memory_bound import FAMILIES
        from benchmarks.gpu.work import create_backend

        measured, numbers = kernels(create_backend("cuda"))
        assert measured.move(list(FAMILIES), "warm", dtype)
        assert numbers()["memory"][dtype]["failed"] == {}


@simulated
def test_convolutions_and_products_are_captured_and_timed(gpu, kernels, monkeypatch, capsys):
    from benchmarks.gpu.compute import CONVOLUTIONS, PRODUCTS, convolution, product
    from benchmarks.gpu.work import create_backend

    backend = create_backend("cuda")
    measured, numbers = kernels(backend)
    _, shape = CONVOLUTIONS["resnet44 64"]
    monkeypatch.setattr("benchmarks.gpu.kernels.LARGE", 16)
    peak = measured.matrix_rate("float32")
    assert measured.compute(convolution(backend, "conv", 1, shape, "float32"), peak, "float32", 2)
    assert measured.compute(product(backend, "product", (8, 4, 2), "bfloat16"), 1, "bfloat16", 2)
    found = numbers()["compute"]
    assert set(found["float32"]) == {f"conv {way}" for way in ("forward", "data", "filter")}
    assert all(rate > 0 for [rate] in found["bfloat16"].values())
    assert len(found["bfloat16"]) == 3
    assert "failed" not in capsys.readouterr().out
    assert PRODUCTS


def test_a_kernel_that_fails_is_told_and_leaves_the_others(kernels, monkeypatch):
    from benchmarks.gpu import kernels as gpu_kernels
    from benchmarks.gpu.work import create_backend

    def broken(backend, a):
        yield "good", a.size, lambda: None
        yield "bad", a.size, lambda: 1 / 0

    def unmade(backend, a):
        raise MemoryError("too much")
        yield

    monkeypatch.setitem(gpu_kernels.FAMILIES, "broken", broken)
    monkeypatch.setitem(gpu_kernels.FAMILIES, "unmade", unmade)
    measured, numbers = kernels(create_backend("cpu"))
    assert measured.move(["broken", "unmade"], "warm", "float32")
    table = numbers()["memory"]["float32"]
    assert set(table["warm"]) == {"broken good"}
    assert table["failed"] == {
        "broken bad": "ZeroDivisionError: division by zero",
        "unmade": "MemoryError: too much",
    }


# -- accuracy


@simulated
def test_our_side_of_the_recipe_trains_and_is_evaluated(gpu):
    from benchmarks.gpu.recipe import Recipe, ours

    told = []
    found = ours(Recipe("synthetic", "mlp", "", 300, 2, "float32", "cuda"), told.append)
    assert [line["epoch"] for line in told] == [1, 2]
    assert all(math.isfinite(line["loss"]) for line in told)
    assert 0 <= found["accuracy"] <= 1
    assert found["seconds"] > 0


def test_a_side_that_fails_or_is_late_leaves_what_the_others_found(tmp_path, capsys):
    import sys

    from benchmarks.common.report import Report
    from benchmarks.gpu.cifar import Table

    code = (
        "import json, sys, time\n"
        "side = sys.argv[-1]\n"
        "print(json.dumps({'epoch': 1, 'loss': 2.0, 'seconds': 1.0}), flush=True)\n"
        "if side == 'eager': raise SystemExit(4)\n"
        "if side == 'compiled': time.sleep(600)\n"
        "print(json.dumps({'accuracy': 0.9, 'seconds': 2, 'first': 1, 'evaluation': 1}))\n"
    )
    table = Table(Report(), tmp_path / "cifar.json", 1, "float32")
    for side in ("ours", "eager"):
        table.run(side, [sys.executable, "-c", code], math.inf)
    table.run("compiled", [sys.executable, "-c", code], time.monotonic() + 3)
    table.summary()
    found = json.loads((tmp_path / "cifar.json").read_text())
    assert list(found["sides"]) == ["ours"]
    assert found["failed"] == {
        "eager": "status 4; the log has its last words",
        "compiled": "not done in its time",
    }
    assert capsys.readouterr().out.count("loss 2.0000") == 3
