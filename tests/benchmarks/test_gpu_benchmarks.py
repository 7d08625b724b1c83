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


# -- steps


@simulated
@each("dtype", ["float32", "bfloat16"])
def test_our_side_makes_as_many_steps_as_it_is_asked_for(gpu, dtype):
    from benchmarks.gpu.work import WORK, Ours

    side = Ours(WORK["mlp-8"], dtype, "cuda")
    turns, said = [5, 2, 1, 0], []
    side.turns(lambda seconds: (said.append(seconds), turns.pop(0))[1])
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
