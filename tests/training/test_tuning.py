"""Ranks choose algorithms together: a layer that chooses, and machines whose clocks differ."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pydtnn import Mesh, Model, Trainer
from pydtnn.callbacks import Checkpointer
from pydtnn.comm import Communicator, Serial
from pydtnn.kernels import ConvGeometry, create_backend
from pydtnn.kernels.autotuner import Autotuner, AutotunerFile
from pydtnn.layers import BatchNorm, Flatten, Layer, Linear, Sequential
from pydtnn.layers.base import Saved, Shape, StepContext
from pydtnn.models import create_net
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce
from pydtnn.train import main
from pydtnn.training import preparation
from pydtnn.training.checkpoint import load_checkpoint
from pydtnn.training.preparation import autotune
from tests.each import each
from tests.small_run import TINY
from tests.small_training import small_data, small_fit

GEOMETRY = ConvGeometry((5, 5), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 2, 2)
CANDIDATES = ("direct", "winograd4")


class Chooser(Layer):
    """Passes its input on, and chooses an algorithm for that in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.fast = "direct"
        self.measured: set[tuple[str, int]] = set()
        self.chosen: dict[tuple[str, int], str] = {}

    def build(self, *shapes: Shape) -> Shape:
        return self.single(shapes)

    def forward(self, *xs: Any, context: StepContext) -> tuple[Any, Saved]:
        return self.choose("forward", xs[0]).copy(), None

    def backward(self, dy: Any, saved: Saved) -> Any:
        return self.choose("backward_data", dy).copy()

    def choose(self, operation: str, x: Any) -> Any:
        def run(name: str) -> None:
            self.now += 1 if name == self.fast else 2
            self.measured.add((operation, len(x)))

        pick, batch = self.backend.autotuner.pick, len(x)
        chosen = pick(operation, GEOMETRY, batch, x.dtype, CANDIDATES, run)
        if batch:  # without samples there is nothing to choose
            self.chosen[operation, batch] = chosen
        return x


def build(
    comm: Communicator,
    fast: str,
    *callbacks: Any,
    mode: str = "measure",
    setting: str = "1 thread",
    accumulation: int = 1,
) -> tuple[Trainer, Chooser]:
    """A trainer whose machine is fastest with the algorithm `fast`."""
    layer = Chooser()
    layer.fast = fast
    clocks: Any = {"clock": lambda: layer.now, "disturbances": lambda: 0}
    autotuner = Autotuner(mode, setting, file=AutotunerFile("some CPU"), **clocks)
    backend = replace(create_backend("numpy"), autotuner=autotuner)
    net = Sequential(BatchNorm(), layer, Flatten(), Linear(3))
    model = Model(net, (5, 5, 2), backend=backend, dtype="float64")
    options: Any = {"callbacks": callbacks, "accumulation": accumulation}
    return Trainer(model, SGD(0.1), exchange=AllReduce(comm), **options), layer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYDTNN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.threads(3)
@pytest.mark.mpi(2)
@pytest.mark.parametrize("kinds", [1, 2])
def test_the_first_rank_of_each_kind_of_machine_measures_and_others_take_what_it_chose(comm, kinds):
    fastest, other = CANDIDATES if comm.rank % kinds else CANDIDATES[::-1]
    first = comm.rank < kinds
    setting = f"{1 + comm.rank % kinds} threads"
    trainer, layer = build(comm, fastest if first else other, setting=setting)
    small_fit(trainer)
    assert {operation for operation, _ in layer.chosen} == {"forward", "backward_data"}
    assert {*layer.chosen.values()} == {fastest}
    assert bool(layer.measured) == first
    states = comm.gather_object(trainer.model.backend.autotuner.state())
    assert states == [states[0]] * comm.size
    assert len(states[0]["measured"]) == kinds


@each("accumulation", [1, 3])
def test_only_the_largest_batch_is_measured(accumulation):
    """Not the last one of an epoch, micro-batches of another size, or an evaluation's."""
    trainer, layer = build(Serial(), "winograd4", accumulation=accumulation)
    small_fit(trainer)
    largest = -(-8 // accumulation)
    assert layer.measured == {("forward", largest), ("backward_data", largest)}
    assert trainer.evaluate(small_data()[1], batch_size=1)
    assert {batch for _, batch in layer.measured} == {largest}
    assert {1, 8 // accumulation, largest} < {batch for _, batch in layer.chosen}
    assert {*layer.chosen.values()} == {"winograd4"}


def test_a_second_training_or_an_evaluation_measures_what_is_new_to_it(monkeypatch):
    rehearsed: list[int] = []
    rehearse = preparation._rehearse

    def counting(model: Model, batch: int, training: bool) -> None:
        rehearsed.append(batch)
        rehearse(model, batch, training)

    monkeypatch.setattr(preparation, "_rehearse", counting)
    trainer, layer = build(Serial(), "winograd4")
    data = small_data()[0]
    trainer.fit(data, batch_size=2)
    trainer.fit(data, batch_size=2, epochs=2)
    assert {batch for _, batch in layer.measured} == {2}
    trainer.fit(data, batch_size=5, epochs=3)
    assert rehearsed == [2, 5]  # not again for the same samples
    fresh, layer = build(Serial(), "direct")
    fresh.fit(data, batch_size=16)
    assert {batch for _, batch in layer.measured} == {16}
    other, layer = build(Serial(), "direct")
    other.evaluate(data, global_batch_size=7)
    assert layer.measured == {("forward", 7)}


@pytest.mark.threads(1, 2)
def test_a_resumed_run_goes_on_with_the_choices_of_its_checkpoint(comm, shared_path, cache):
    first, _ = build(comm, "winograd4", Checkpointer(shared_path / "run"))
    small_fit(first, epochs=1)
    comm.barrier()
    if comm.rank == 0:
        for path in cache.iterdir():
            path.unlink()
    comm.barrier()
    resumed, layer = build(comm, "direct")
    assert load_checkpoint(shared_path / "run", resumed)
    small_fit(resumed)
    assert layer.measured == set()
    assert {*layer.chosen.values()} == {"winograd4"}


# -- the command line, with convolutions that have a choice


COMMAND = [*TINY, "--model=cnn", "--epochs=1", "--steps-per-epoch=2"]


def measured(run: Path) -> dict[str, dict[str, dict[str, str]]]:
    """What a run's checkpoint holds of choices: by kind of machine, operation and batch."""
    (path,) = run.glob("checkpoint-*")
    parts = json.loads((path / "state.json").read_text())["parts"]
    return parts["choices"][0]["values"]["measured"] if "choices" in parts else {}


def test_the_same_command_twice_measures_once_and_leaves_the_same_bytes(tmp_path, cache):
    files, kept = [], []
    for name in ("a", "b"):
        options = ["--tuning=measure", f"--output-dir={tmp_path / name}"]
        assert main([*COMMAND, *options, f"--save={tmp_path / name}.safetensors"]) == 0
        files.append((tmp_path / f"{name}.safetensors").read_bytes())
        kept.append([path.read_bytes() for path in cache.glob("choices-*.jsonl")])
    assert files[0] == files[1]
    assert kept[0] == kept[1]
    assert len(kept[0]) == 1
    ((kind, table),) = measured(tmp_path / "a").items()
    assert "1 thread" in kind
    assert table == measured(tmp_path / "b")[kind]
    assert {what.split()[0] for what in table} == {"forward", "backward_data", "backward_filter"}
    assert {batch for batches in table.values() for batch in batches} == {"16"}


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["fixed", "direct"])
def test_what_is_not_measured_leaves_no_trace_and_does_not_depend_on_threads(mode, tmp_path, cache):
    files = set()
    for threads in (1, 2):
        out = tmp_path / str(threads)
        options = [f"--tuning={mode}", f"--threads={threads}", f"--output-dir={out}"]
        assert main([*COMMAND, *options, f"--save={out}.safetensors"]) == 0
        files.add(out.with_suffix(".safetensors").read_bytes())
        assert measured(out) == {}
    assert len(files) == 1
    assert not cache.exists()


def test_ranks_that_choose_in_different_ways_are_refused(tmp_path, mpiexec):
    code = (
        "import os, sys; from pydtnn.comm import create_communicator; "
        "os.environ['PYDTNN_TUNING'] = 'fixed' if create_communicator().rank else 'direct'; "
        "from pydtnn.train import main; sys.exit(main(sys.argv[1:]))"
    )
    done = mpiexec(2, ["-c", code, *COMMAND, f"--output-dir={tmp_path}"])
    assert done.returncode == 1
    assert "same tuning, got 'direct' on rank 0 and 'fixed' on rank 1" in done.stderr


@pytest.mark.threads(2)
def test_stages_that_receive_several_values_are_tuned(comm):
    shape, mesh = (8, 8, 3), Mesh(comm, pipeline=2)
    backend = create_backend("cpu", threads=1, tuning="measure")
    plan = {"pipeline": ["stage2.0.conv2"]}
    model = Model(create_net("resnet8", 3, shape), shape, backend=backend, plan=plan, mesh=mesh)
    assert model.pipeline is not None
    (stage,) = model.pipeline.stages
    assert len(stage.receives or stage.sends) == 2
    autotune(model, comm, 4, training=True)
    operations = {what.split()[0] for what in backend.autotuner.report()}
    assert operations >= {"conv.forward", "conv.backward_data", "conv.backward_filter"}
