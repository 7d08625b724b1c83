"""Every benchmark runs, on little work and without PyTorch, and prints the rows it is asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import import_module
from itertools import product
from pathlib import Path

import pytest

from tests.each import each

WITHOUT_TORCH = (
    "import runpy, sys\n"
    "sys.modules['torch'] = None\n"  # cannot be imported, nor found
    "sys.argv = sys.argv[1:]\n"
    "runpy.run_module(sys.argv[0], run_name='__main__')\n"
)


def lines(name: str, *options: str) -> list[str]:
    """What a benchmark prints."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, f"benchmarks.{name}", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def row(table: list[str], *start: str) -> list[str]:
    """The words after those with which a line starts."""
    (found,) = (line.split() for line in table if line.split()[: len(start)] == [*start])
    return found[len(start) :]


@each("name", ["parallel", "comm.default"])
def test_a_benchmark_of_several_ranks_refuses_one(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"benchmarks.{name}"])
    with pytest.raises(SystemExit):
        import_module(f"benchmarks.{name}").main()
    printed, told = capsys.readouterr()
    assert printed == ""
    assert "expected several ranks, got 1; start it with mpirun -np 2 python -m " in told


ROWS = [
    ("cpu.step_time --models mlp --turns 1 --variants full no-fusion", "mlp 64 1 no-fusion", 3),
    ("cpu.sequences --layers lstm conv1d-depthwise --turns 2", "conv1d-depthwise", 3),
    ("cpu.recomputation --models cnn --steps 1 --recompute 2", "cnn 2", 4),
    ("cpu.freezing --models mlp --steps 2 --train fc3", "mlp", 5),
    ("cpu.check_equal --models mlp --steps 4", "mlp", 2),
    ("cpu.silent_errors --flips 2 --steps 2 --every 1 --turns 1", "images 2 1", 1),
    ("cpu.analytic --platform laptop --models cnn --steps 1", "cnn 64", 1),
    ("cpu.tracing --models mlp --turns 1 --seconds 0.1", "mlp", 4),
    ("cpu.overhead --models mlp --steps 3 --layers", "Linear.backward", 1),
    ("checkpoints.beside --models mlp --every 1 --turns 1 --folder {}", "mlp", 3),
    ("checkpoints.beside --models mlp --every 1 --turns 1 --folder {} --memory", "mlp", 4),
]
"""Commands, a row that each prints, and so many numbers above 0 at the begin or end of it."""


@each("command, start, numbers", ROWS)
def test_a_benchmark_prints_what_it_has_measured(command, start, numbers, tmp_path):
    table = lines(*command.format(tmp_path).split())
    words = [word for word in row(table, *start.split()) if word.replace(".", "").isdecimal()]
    assert len(words) >= numbers
    assert all(float(word) > 0 for word in words[:numbers])
    assert [*tmp_path.iterdir()] == []


@each(
    ("options", "layer", "directions"),
    [
        ("conv fused --only 5x5 --sizes warm", ["5x5"], ("forward", "data", "filter")),
        ("attention --only window", ["window", "of", "512"], ("forward", "backward")),
    ],
)
def test_kernels_prints_every_direction_warm_and_cold(options, layer, directions):
    table = lines("cpu.kernels", "--repeats", "1", "--families", *options.split())
    for direction, state in product(directions, ("warm", "cold")):
        peak, roof, direct, *_ = row(table, *layer, direction, state)
        assert 0 <= float(roof) <= float(peak)  # 0 if other work makes them slow: Gflop/s
        assert float(direct) >= 0
    assert ("fused" in options) == any(line.startswith("fused gate") for line in table)


def test_roofline_prints_every_layer_and_draws_a_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: the extra `plot`")
    picture, options = tmp_path / "roofline.png", ("--model", "mlp", "--steps", "1", "--nodes")
    table = lines("cpu.roofline", *options, "--picture", str(picture))
    assert sum("forward" in line.split() for line in table) == 6
    (step,) = row(table, "step")
    (_, layers) = row(table, "all", "layers")
    assert 0 < float(layers) < float(step)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_ddp_trains_with_the_command_line():
    if not (Path(sys.executable).with_name("mpirun").exists() or shutil.which("mpirun")):
        pytest.skip("there is no mpirun here")
    table = lines("comm.ddp", "--models", "mlp", "--ranks", "1", "--epochs", "2", "--runs", "1")
    rate, memory = map(float, row(table, "mlp", "1", "1", "64"))
    assert rate > 0
    assert memory > 0


def test_allreduce_prints_each_schedule_beside_the_vendor_and_its_prediction(mpiexec):
    options = ("--bytes", "4e3", "--algorithms", "ring", "--turns", "2")
    done = mpiexec(2, ["-m", "benchmarks.comm.allreduce", *options])
    assert done.returncode == 0, done.stderr
    table = done.stdout.splitlines()
    assert row(table, "4000", "vendor")[-1] == "1.00"
    assert len(row(table, "4000", "vendor-iallreduce")) == 3
    median, least, ratio, predicted, _ = map(float, row(table, "4000", "ring"))
    assert 0 < least <= median
    assert ratio >= 0  # rounded: the vendor's may have waited for a core
    assert predicted > 0


def test_default_times_the_default_beside_every_choice(mpiexec):
    options = ("--seconds", "0", "--batch", "1", "--allreduce", "vendor", "direct")
    done = mpiexec(
        2, ["-m", "benchmarks.comm.default", *options, "--bucket-bytes", "65536", "1048576"]
    )
    assert done.returncode == 0, done.stderr
    table = done.stdout.splitlines()
    # Once among all, and again: there are no more than go on beside the default.
    for choice in (("vendor", "64"), ("vendor", "1024"), ("direct", "64"), ("direct", "1024")):
        found = [line.split()[3:] for line in table if line.split()[:2] == [*choice]]
        assert [(float(ms) > 0, turns) for ms, turns in found] == [(True, "1")] * 2
    assert "2 buckets" in table[-1]  # on one host, where ResNet-20 has no more
    assert " of the speed of " in table[-1]


def test_compression_trains_with_and_without(mpiexec):
    table = lines(
        *("comm.compression", "--model", "mlp", "--dataset", "synthetic", "--epochs", "1"),
        *("--steps", "10", "--only", "top_k-1%"),
    )
    plain, compressed = (list(map(float, row(table, name))) for name in ("none", "top_k-1%"))
    assert len(plain) == len(compressed) == 6
    assert compressed[2] < plain[2] / 10  # MB per step


def test_loading_and_reading_print_a_rate_for_each_source_and_leave_nothing(tmp_path):
    pytest.importorskip("PIL", reason="Pillow is not installed: the extra `data`")
    options = ["--images", "9", "--side", "40", "--size", "16", "--batch", "4"]
    table = lines("cpu.image_loading", *options, "--turns", "1", "--workers", "2")
    for source, workers in product(("folder", "shards"), ("1", "2")):
        median, greatest = map(float, row(table, source, workers))
        assert 0 < median == greatest
    table = lines("comm.reading", *options, "--folder", str(tmp_path))
    for source, cache in product(("folder", "shards", "the copy"), ("cold", "warm")):
        rate, _, _ = map(float, row(table, *source.split(), cache))
        assert rate > 0
    assert [*tmp_path.iterdir()] == []
