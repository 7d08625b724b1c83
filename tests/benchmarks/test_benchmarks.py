"""Every benchmark runs, on little work and without PyTorch, and prints the rows it is asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import import_module
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
def test_a_benchmark_of_several_ranks_refuses_one(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [f"benchmarks.{name}"])
    with pytest.raises(SystemExit):
        import_module(f"benchmarks.{name}").main()
    printed, told = capsys.readouterr()
    assert printed == ""
    assert "expected several ranks, got 1; start it with mpirun -np 2 python -m " in told


def test_step_time_prints_images_per_second_and_memory_of_each_variant(tmp_path):
    output = tmp_path / "table.txt"
    options = ("--models", "mlp", "--turns", "1", "--variants", "full", "no-winograd", "no-fusion")
    table = lines("cpu.step_time", *options, "--output", str(output))
    for variant in ("full", "no-winograd", "no-fusion"):
        rate, growth, arrays = map(float, row(table, "mlp", "64", "1", variant))
        assert rate > 0
        assert 0 < arrays < growth
    assert output.read_text().splitlines() == table


def test_checkpoints_prints_times_and_memory(tmp_path):
    options = ("--models", "mlp", "--every", "1", "--turns", "1", "--folder", str(tmp_path))
    size, step, blocked, *_ = map(float, row(lines("checkpoints.beside", *options), "mlp")[:3])
    assert min(size, step, blocked) > 0
    size, step, saving, times, *_ = map(
        float, row(lines("checkpoints.beside", *options, "--memory"), "mlp")
    )
    assert 0 < size < step
    assert times == pytest.approx(saving / step, abs=0.01)
    assert [*tmp_path.iterdir()] == []


def test_kernels_prints_every_direction_warm_and_cold():
    options = ("--families", "conv", "fused", "--only", "5x5", "--sizes", "warm", "--repeats", "1")
    table = lines("cpu.kernels", *options)
    for direction in ("forward", "data", "filter"):
        for state in ("warm", "cold"):
            peak, roof, direct, *_ = row(table, "5x5", direction, state)
            assert 0 < float(roof) <= float(peak)
            assert float(direct) > 0
    assert any(line.startswith("fused gate") for line in table)


def test_kernels_prints_both_directions_of_attention():
    table = lines("cpu.kernels", "--families", "attention", "--only", "cifar10", "--repeats", "1")
    for direction in ("forward", "backward"):
        for state in ("warm", "cold"):
            peak, roof, direct, *_ = row(table, "vit_tiny", "cifar10", direction, state)
            assert 0 < float(roof) <= float(peak)
            assert float(direct) > 0


def test_sequences_prints_the_rate_of_each_layer():
    table = lines("cpu.sequences", "--layers", "lstm", "conv1d-depthwise", "--turns", "2")
    for layer in ("lstm", "conv1d-depthwise"):
        *_, threads, rate, ms = row(table, layer)
        assert threads == "1"
        assert float(rate) > 0
        assert float(ms) > 0


def test_roofline_prints_every_layer_and_draws_a_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: the extra `plot`")
    picture = tmp_path / "roofline.png"
    table = lines(
        "cpu.roofline", "--model", "mlp", "--steps", "1", "--nodes", "--picture", str(picture)
    )
    assert sum("forward" in line.split() for line in table) == 6
    (step,) = row(table, "step")
    (_, layers) = row(table, "all", "layers")
    assert 0 < float(layers) < float(step)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_analytic_prints_predicted_beside_measured_times():
    options = ("--platform", "laptop", "--models", "cnn", "--steps", "1", "--classes")
    table = lines("cpu.analytic", *options)
    for batch in ("16", "64"):
        measured, peaks, rates, *_ = map(float, (w.rstrip("%") for w in row(table, "cnn", batch)))
        assert 0 < peaks == rates  # the platform has no achieved rates
        assert measured > 0
    assert any(line.startswith("peaks: mean accuracy") for line in table)
    assert sum(line.split()[:2] == ["pool,", "forward"] for line in table) == 2


def test_recomputation_prints_the_arrays_and_the_time_of_each_way():
    ways = ["--recompute", "2", "auto"]
    table = lines("cpu.recomputation", "--models", "cnn", "--steps", "1", *ways)
    whole, two, auto = (row(table, "cnn", way) for way in ("nothing", "2", "auto"))
    assert whole[:2] == ["0", "0.00"]
    assert two[0] == "1"
    assert float(two[1]) > 0
    assert all(float(found[3]) <= 1 for found in (two, auto))


def test_freezing_prints_the_ratio_and_the_bytes_of_the_part_that_is_trained():
    table = lines("cpu.freezing", "--models", "mlp", "--steps", "2", "--train", "fc3")
    whole, part, ratio, sent, rest, layer = row(table, "mlp")
    assert float(ratio) == pytest.approx(float(part) / float(whole), rel=0.1)
    assert 0 < int(rest) < int(sent)
    assert layer == "fc3"


def test_overhead_prints_a_share_of_the_step():
    table = lines("cpu.overhead", "--models", "mlp", "--steps", "3", "--layers")
    share = row(table, "mlp")[-1]
    assert float(share.removesuffix("%")) > 0
    assert row(table, "Linear.backward")[0] == "3"


def test_tracing_prints_records_and_what_they_add_to_a_step():
    table = lines("cpu.tracing", "--models", "mlp", "--turns", "1", "--seconds", "0.1")
    ranks, step, records, steps, *shares = row(table, "mlp")
    assert (ranks, float(step) > 0, int(records) > 20, int(steps) >= 4) == ("1", True, True, True)
    assert len(shares) == 8  # median (least to greatest) of wall and CPU time
    (record, _) = row(table, "one", "record:")
    assert 0 < float(record) < 10


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
    assert ratio > 0
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


def test_check_equal_prints_what_hashes_and_comparisons_cost():
    table = lines("cpu.check_equal", "--models", "mlp", "--steps", "4")
    arrays, step, turns, hashed, compared, cost = row(table, "mlp")
    assert float(arrays) > 1
    assert int(turns) >= 0
    expected = (float(hashed) + float(compared) / 100) / float(step)
    assert float(cost.removesuffix("%")) / 100 == pytest.approx(expected, abs=1e-3)


def test_image_loading_prints_a_rate_for_each_source_and_number_of_workers():
    pytest.importorskip("PIL", reason="Pillow is not installed: the extra `data`")
    options = ("--images", "9", "--side", "40", "--size", "16", "--batch", "4", "--turns", "1")
    table = lines("cpu.image_loading", *options, "--workers", "2")
    for source in ("folder", "shards"):
        for workers in ("1", "2"):
            median, greatest = map(float, row(table, source, workers))
            assert 0 < median == greatest


def test_reading_prints_a_rate_for_each_source_and_reads_no_byte_twice(tmp_path):
    pytest.importorskip("PIL", reason="Pillow is not installed: the extra `data`")
    options = (
        "--images",
        "9",
        "--side",
        "40",
        "--size",
        "16",
        "--batch",
        "4",
        "--folder",
        str(tmp_path),
    )
    table = lines("comm.reading", *options)
    for source in (("folder",), ("shards",), ("the", "copy")):
        for cache in ("cold", "warm"):
            rate, _, _ = map(float, row(table, *source, cache))
            assert rate > 0
    assert [*tmp_path.iterdir()] == []
