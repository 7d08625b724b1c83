"""The command line with ``--device cuda``, end to end on simulated GPUs."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pydtnn.cli.parser import parse
from pydtnn.comm import Communicator, run_threads
from pydtnn.kernels.cuda import backend, libraries
from pydtnn.train import _run, main
from tests.simulated import Fabric, SimulatedCupy, installed, why_not
from tests.small_run import TINY

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")

RUN = [*TINY, "--device=cuda", "--epochs=1"]


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fabric]:
    """Let every rank, which is a thread, find simulated GPUs of its own."""
    fabric = Fabric()
    devices: dict[int, SimulatedCupy] = {}

    def usable_cupy(device: int | None = None, *, local_rank: int | None = None) -> SimulatedCupy:
        thread = threading.get_ident()
        if thread not in devices:
            devices[thread] = SimulatedCupy(fabric, seed=len(devices), eager=True)
        if local_rank is not None:
            devices[thread].gpu = local_rank % fabric.gpus
        return devices[thread]

    with installed(SimulatedCupy(fabric)):
        for module in (libraries, backend.libraries):
            monkeypatch.setattr(module, "usable_cupy", usable_cupy)
        yield fabric


def run_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text())


def on_ranks(ranks: int, *options: str) -> None:
    def rank(comm: Communicator) -> None:
        _run(parse([*RUN, *options]), comm, ())

    run_threads(ranks, rank)


def test_a_run_says_what_it_ran_on(fabric, tmp_path, capsys):
    assert main([*RUN, f"--output-dir={tmp_path / 'gpu'}", "--no-tf32"]) == 0
    printed = capsys.readouterr().out
    told = " ".join(printed.split())
    for words in ("1, each on a GPU", "simulated device, simulated cudnn", "float32, no TF32"):
        assert words in told
    assert "steps one CUDA graph images prepared on the GPU" in told
    assert "between GPUs" not in told
    assert "time in compute" not in told  # and communication: the host does not know
    gpu = run_of(tmp_path / "gpu")["gpu"]
    assert (gpu["name"], gpu["tf32"], gpu["graph"]) == ("simulated device", False, "one CUDA graph")


OPTIONS = {
    "no graph": (["--no-graph"], "NCCL 2.28.0", "not asked for"),
    "compressed": (["--compress=sign"], "NCCL 2.28.0", "CompressedSums works on the host"),
    "gossip": (["--scheme=gossip"], "NCCL 2.28.0", "the steps of Gossip are not all alike"),
    "ring": (["--comm=mpi", "--allreduce=ring"], "MPI, through pinned", "by way of MPI"),
    "sharded": (["--scheme=sharded"], "NCCL 2.28.0", "one CUDA graph"),
    "joint": (["--model=cnn", "--sync-batch-norm"], "NCCL 2.28.0", "one CUDA graph"),
    "bfloat16": (["--dtype=bfloat16"], "NCCL 2.28.0", "one CUDA graph"),
    "clipped": (["--clip-norm=1", "--scheme=sharded"], "NCCL 2.28.0", "one CUDA graph"),
}


@pytest.mark.parametrize(("options", "transport", "graph"), OPTIONS.values(), ids=OPTIONS)
def test_two_ranks_say_how_they_talked(options, transport, graph, fabric, tmp_path, capsys):
    on_ranks(2, *options, f"--output-dir={tmp_path}")
    printed = capsys.readouterr().out
    assert printed.count(f"between GPUs              {transport}") == 1
    assert graph in run_of(tmp_path)["gpu"]["graph"]
    assert graph in printed
    assert "share GPU" not in printed


def test_exact_training_gives_the_same_bytes_for_any_number_of_ranks(fabric, tmp_path, capsys):
    digests = set()
    for ranks, options in ((1, []), (3, []), (2, ["--comm=mpi"])):
        name = "-".join([str(ranks), *options])
        save = tmp_path / f"{name}.safetensors"
        options = [*options, f"--output-dir={tmp_path / name}", f"--save={save}"]
        on_ranks(ranks, "--exact", "--shards=4", "--scheme=sharded", *options)
        digests.add(hashlib.sha256(save.read_bytes()).hexdigest())
    assert len(digests) == 1
    printed = capsys.readouterr().out
    assert printed.count("steps                     one CUDA graph") == 2  # not of MPI


@pytest.mark.parametrize(("first", "then"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_run_is_continued_on_another_device(first, then, fabric, tmp_path):
    common = [*TINY, "--optimizer=adam", f"--output-dir={tmp_path}"]
    assert main([*common, f"--device={first}"]) == 0
    history = json.loads((tmp_path / "history.json").read_text())
    shutil.rmtree(tmp_path / "checkpoint-00000016")
    assert main([*common, f"--device={then}", "--resume"]) == 0
    again = json.loads((tmp_path / "history.json").read_text())
    assert again[0] == history[0]
    assert again[1] == pytest.approx(history[1], rel=1e-3)  # float32, in other orders
