"""Checkpoints of a mesh: whole arrays, resumed on any other."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pydtnn.callbacks import EMA, Checkpointer
from pydtnn.comm import Communicator, Serial
from pydtnn.optimizers import AdamW
from pydtnn.parallel.compression import power_sgd, top_k
from pydtnn.parallel.schemes import AllReduce, LocalSGD, ShardedOptimizer, StaleGradients
from pydtnn.training.checkpoint import (
    assembly,
    find_checkpoints,
    layout,
    load_checkpoint,
    loading,
    save_checkpoint,
)
from pydtnn.utils.errors import AgreedError
from tests.small_mesh import Axes, assert_equal_states, mesh_fit, mesh_trainer, on_ranks

CUT: Axes = {"data": 2, "filter": 2}

Run = dict[str, Any]


def train(
    axes: Axes | None,
    directory: Path,
    epochs: int,
    *,
    scheme: Any = AllReduce,
    sums: Any = None,
    load: bool = False,
    norm: bool = True,
) -> list[Run]:
    """Train in a folder; return the results of each rank."""

    def rank(comm: Communicator) -> Run:
        callbacks = EMA(0.5), Checkpointer(directory)
        used = callbacks if scheme is not LOCAL else callbacks[1:]  # no average between ranks
        trainer = mesh_trainer(
            comm,
            axes,
            *used,
            optimizer=AdamW(0.01, epsilon=1e-3, clip_norm=1.0),  # without amplified rounding
            scheme=scheme,
            sums=sums,
            norm=norm,
        )
        if load:
            assert load_checkpoint(directory, trainer) is not None
        history = mesh_fit(trainer, epochs)
        optimizer = trainer.model.whole.gather(trainer.optimizer.state())
        return {
            "model": trainer.model.state(),
            "optimizer": optimizer,
            "history": history,
            "position": trainer.setup.data.rank,
        }

    return on_ranks(axes, rank)


LOCAL = partial(LocalSGD, period=2)


def assert_same(run: Run, expected: Run) -> None:
    assert_equal_states([run["model"]], expected["model"])
    assert run["optimizer"].keys() == expected["optimizer"].keys()
    slots = {name: run["optimizer"][name] for name in expected["optimizer"]}
    assert_equal_states([slots], expected["optimizer"])
    for own, other in zip(run["history"], expected["history"], strict=True):
        assert own == pytest.approx(other, rel=1e-12)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("before", "after", "scheme"),
    [
        (CUT, CUT, ShardedOptimizer),
        (CUT, {"data": 4}, ShardedOptimizer),
        ({"spatial": 3}, {"channel": 2}, AllReduce),
        (None, CUT, ShardedOptimizer),
        ({"data": 2, "pipeline": 2}, {"filter": 2}, AllReduce),
        ({"pipeline": 2, "filter": 2}, None, AllReduce),
        (None, {"pipeline": 2}, AllReduce),
    ],
)
def test_a_run_continues_on_any_mesh(before, after, scheme, tmp_path):
    """Stages without batch norm, which normalises micro-batches."""
    norm = "pipeline" not in {**(before or {}), **(after or {})}
    expected = train(None, tmp_path / "serial", 2, norm=norm)[0]
    train(before, tmp_path / "run", 1, scheme=scheme, norm=norm)
    for run in train(after, tmp_path / "run", 2, load=True, scheme=scheme, norm=norm):
        assert_same(run, expected)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("axes", "scheme", "file_bytes"),
    [
        ({"data": 3}, AllReduce, 300),
        ({"data": 4}, AllReduce, 1 << 20),
        ({"data": 3}, ShardedOptimizer, 1 << 20),
        ({"filter": 3}, AllReduce, 300),
        ({"channel": 2}, AllReduce, 1 << 20),
        ({"spatial": 2}, AllReduce, 300),
        ({"pipeline": 2}, AllReduce, 1 << 20),
        (CUT, ShardedOptimizer, 300),
        ({"pipeline": 2, "filter": 2}, AllReduce, 300),
        ({"filter": 2, "channel": 2}, AllReduce, 1 << 20),
    ],
)
def test_every_plan_reads_and_writes_the_bytes_of_the_serial_network(
    axes, scheme, file_bytes, tmp_path, monkeypatch
):
    """Therefore each also reads what any other has written. Ranks with whole arrays send none."""
    monkeypatch.setattr(layout, "FILE_BYTES", file_bytes)
    monkeypatch.setattr(assembly, "BLOCK_BYTES", 64)
    options = {"norm": False, "optimizer": AdamW(0.01)}
    trainer = mesh_trainer(Serial(), None, EMA(0.5), Checkpointer(tmp_path / "one"), **options)
    mesh_fit(trainer)
    before = contents(find_checkpoints(tmp_path / "one")[-1])
    assert (len(before) > 3) == (file_bytes == 300)

    def rank(comm: Communicator) -> int:
        callbacks = EMA(0.5), Checkpointer(tmp_path / "all")
        options = {"norm": False, "optimizer": AdamW(0.01)}
        trainer = mesh_trainer(comm, axes, *callbacks, scheme=scheme, **options)
        assert load_checkpoint(tmp_path / "one", trainer) is not None
        before = comm.traffic.bytes
        save_checkpoint(tmp_path / "all", trainer)
        return comm.traffic.bytes - before

    sent = on_ranks(axes, rank)
    assert not any(sent) or file_bytes == 300 or {*axes} != {"data"} or scheme is not AllReduce
    assert contents(find_checkpoints(tmp_path / "all")[-1]) == before


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_ranks_without_the_folder_send_and_receive_their_parts(tmp_path, monkeypatch):
    """As on hosts without a shared file system."""
    train(CUT, tmp_path / "shared", 1, norm=False)
    before = contents(find_checkpoints(tmp_path / "shared")[-1])
    seeing = threading.local()
    is_dir = Path.is_dir

    def hidden(path: Path) -> bool:
        return is_dir(path) and (path.suffix != ".partial" or seeing.allowed)

    monkeypatch.setattr(Path, "is_dir", hidden)
    monkeypatch.setattr(loading, "is_visible", lambda found: seeing.allowed)

    def rank(comm: Communicator) -> None:
        seeing.allowed = comm.rank == 0
        callbacks = EMA(0.5), Checkpointer(tmp_path / "alone")
        rule = AdamW(0.01, epsilon=1e-3, clip_norm=1.0)
        trainer = mesh_trainer(comm, CUT, *callbacks, optimizer=rule, norm=False)
        assert load_checkpoint(tmp_path / "shared", trainer) is not None
        save_checkpoint(tmp_path / "alone", trainer)

    on_ranks(CUT, rank)
    assert contents(find_checkpoints(tmp_path / "alone")[-1]) == before


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("scheme", "sums"),
    [(LOCAL, None), (partial(StaleGradients, delay=2), None), (AllReduce, top_k(share=0.3))],
    ids=["local-sgd", "stale", "top-k"],
)
def test_states_of_schemes_are_those_of_the_ranks_along_data(scheme, sums, tmp_path):
    options = {"scheme": scheme, "sums": sums}
    same = CUT if sums else {"data": 2}  # values of a part are chosen alone
    expected = {run["position"]: run for run in train(same, tmp_path / "expected", 2, **options)}
    train(CUT, tmp_path, 1, **options)
    for run in train(CUT if sums else {"data": 2, "spatial": 2}, tmp_path, 2, load=True, **options):
        assert_same(run, expected[run["position"]])


def test_factors_of_parts_are_resumed_on_the_same_mesh_only(tmp_path):
    train(CUT, tmp_path, 1, sums=power_sgd(rank=1))
    for other in ({"data": 2, "channel": 2}, None):
        with pytest.raises(AgreedError, match="saved per rank of the mesh data=2, filter=2, got"):
            train(other, tmp_path, 2, load=True, sums=power_sgd(rank=1))
    runs = train(CUT, tmp_path, 2, load=True, sums=power_sgd(rank=1))
    expected = train(CUT, tmp_path / "expected", 2, sums=power_sgd(rank=1))
    for run in runs:
        assert_same(run, expected[0])
