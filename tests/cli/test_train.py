"""The command line end to end: serial, on two ranks, resumed, reproduced, interrupted."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import numpy as np
import pytest

import pydtnn
from pydtnn.cli.config import TrainConfig
from pydtnn.cli.run_directory import run_directory
from pydtnn.comm import Serial, create_communicator
from pydtnn.data import AUGMENTATIONS
from pydtnn.losses import LOSSES
from pydtnn.metrics import METRICS
from pydtnn.optimizers import OPTIMIZERS
from pydtnn.schedules import SCHEDULES
from pydtnn.train import _terminated_in_order, main
from tests.each import each
from tests.launch import ROOT
from tests.small_run import TINY, TRAIN, only_line

NAMES = ("loss", "accuracy")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run_file(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


@pytest.mark.tools
def test_a_run_leaves_its_configuration_history_checkpoints_and_weights(tmp_path, capsys):
    out = tmp_path / "run"
    assert main([*TINY, f"--output-dir={out}", f"--save={tmp_path / 'w.safetensors'}"]) == 0
    printed, told = capsys.readouterr()
    run = run_file(out)
    assert run["configuration"]["model"] == "mlp"
    assert (run["ranks"], run["hosts"], run["threads"]) == (1, 1, 1)
    assert run["instruction_set"]
    assert run["environment"]["packages"]["numpy"]
    assert "commit" in run["environment"]
    assert run["measured"]["seconds"] > 0
    with open(out / "history.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2
    assert float(rows[1]["loss"]) < float(rows[0]["loss"])
    assert [path.name[-2:] for path in sorted(out.glob("checkpoint-*"))] == ["08", "16"]
    last = json.loads((out / "history.json").read_text())[-1]
    copy = tmp_path / "copy.safetensors"
    load = [f"--load={tmp_path / 'w.safetensors'}"]
    for chosen in (load, [f"--output-dir={out}", "--resume", f"--save={copy}"]):
        assert main([*TINY, *chosen, "--evaluate-only"]) == 0
        line = capsys.readouterr().out.splitlines()[-1]
        assert line == f"loss {last['val_loss']:.4f}  accuracy {last['val_accuracy']:.4f}"
    assert digest(copy) == digest(tmp_path / "w.safetensors")
    assert told == ""
    table = [line.partition("  ")[0] for line in printed.partition("\n---")[2].splitlines()[1:]]
    results = [f"{part} {name}" for part in ("validation", "training") for name in NAMES]
    assert table[:7] == ["epochs", "best validation accuracy", *results, "samples/s"]
    assert {"time in compute", "peak memory per rank", "ranks", "time per step"} <= {*table}
    assert "first step" not in printed  # with --verbose only
    assert printed.isascii()


def test_a_saved_model_predicts_what_training_ended_with(tmp_path, capsys):
    out, saved = tmp_path / "run", tmp_path / "m.pydtnn"
    for epochs in (1, 2):  # the second replaces the first
        shutil.rmtree(out, ignore_errors=True)
        options = ["--ema=0.9", f"--epochs={epochs}", f"--output-dir={out}", f"--save={saved}"]
        assert main([*TINY, *options]) == 0
    last = json.loads((out / "history.json").read_text())[-1]
    options = {"samples": 120, "test_samples": 40, "shape": (12, 12, 1), "classes": 4}
    x, y = pydtnn.load_dataset("synthetic", **options)[1].read(np.arange(40))
    assert (pydtnn.load(saved).predict_classes(x) == y).mean() == last["val_accuracy"]
    capsys.readouterr()
    assert main([*TINY, f"--load={saved}", "--evaluate-only"]) == 0
    assert f"accuracy {last['val_accuracy']:.4f}" in capsys.readouterr().out


def test_a_layer_that_cannot_be_saved_is_told_before_training(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    options = ["--model=own.py:net", "--save=m.pydtnn", "--output-dir=run"]
    assert main([*TINY, *options]) == 1
    assert capsys.readouterr().err.startswith("layer own1: option factor must be a number, text,")
    assert not {"m.pydtnn", "run"} & {*os.listdir()}
    Path("weights.safetensors").mkdir()
    assert main([*TINY, "--save=weights.safetensors"]) == 1
    assert "--save: expected a file, got the folder weights" in capsys.readouterr().err


OWN = """
from pydtnn.layers import Flatten, Identity, Linear, Sequential
class Own(Identity):
    def __init__(self, factor):
        super().__init__()
def net(classes, input_shape):
    return Sequential(Flatten(), Own(print), Linear(classes))
"""


def test_weights_of_a_run_with_other_classes_are_loaded_below_the_new_head(tmp_path, capsys):
    weights = tmp_path / "w.safetensors"
    assert main([*TINY, "--epochs=1", f"--output-dir={tmp_path / 'a'}", f"--save={weights}"]) == 0
    capsys.readouterr()
    new = [*TINY, "--dataset-options.classes=3", f"--load={weights}", "--evaluate-only"]
    assert main(new) == 1
    assert "load_weights: " in only_line(capsys.readouterr().err)
    assert main([*new, "--load-options.strict=false"]) == 0
    lines = capsys.readouterr().out.partition("loaded 4 of 6 arrays\n")[2].splitlines()
    assert lines[0].startswith("  other shape, not changed: ")
    assert main([*new, "--load-options.strickt=false"]) == 1
    assert "unknown option of --load 'strickt'; did you mean" in only_line(capsys.readouterr().err)


CHOICES = [
    *(f"--optimizer={name}" for name in OPTIMIZERS),
    *(f"--schedule={name}" for name in SCHEDULES),
    *(f"--loss={name}" for name in LOSSES),
    *(f"--metrics={name}" for name in METRICS if name != "top_k_accuracy"),
    *(f"--augment={name}" for name in AUGMENTATIONS),
    *("--metrics=", "--metrics=top3_accuracy, accuracy", "--augment=crop:2,flip,cutout:3"),
    *("--lr-scaling=linear", "--lr-scaling=sqrt", "--warmup-epochs=0.5", "--label-smoothing=0.1"),
    *("--validation-split=0.25", "--accumulation=3", "--loader-threads=0", "--no-overlap"),
    *("--dtype=float64", "--device=numpy", "--clip-norm=1", "--steps-per-epoch=1"),
    *("--plateau=1", "--early-stopping=1", "--stop-at=0.1", "--monitor=loss", "--model=cnn"),
    *("--checkpoint-epochs=0", "--checkpoint-steps=3", "--bucket-bytes=1", "--lr=0.01"),
    *("--restore-best", "--metrics=micro_f1,per_label_recall"),
    *("--ema=0.9", "--mixup=0.2", "--cutmix=1", "--augment=resized_crop:0.3,randaugment:3:20"),
]


@pytest.mark.few(6)
@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_trains(choice, tmp_path, capsys):
    # Squared errors of logits, which no softmax tames, want small steps.
    assert main([*TINY, "--epochs=1", "--lr=0.001", choice, f"--output-dir={tmp_path}"]) == 0
    assert capsys.readouterr().err == ""
    (epoch,) = json.loads((tmp_path / "history.json").read_text())
    assert all(value is not None for value in epoch.values())


def test_tables_of_metrics_are_printed_with_the_names_of_the_classes(tmp_path, capsys):
    options = ["--epochs=1", "--metrics=accuracy,confusion_matrix", f"--output-dir={tmp_path}"]
    assert main([*TINY, *options]) == 0
    table = capsys.readouterr().out.partition("val_confusion_matrix\n")[2].splitlines()
    matrix = np.array([[int(x) for x in line.split()[1:]] for line in table[1:]])
    assert matrix.shape == (4, 4)
    (epoch,) = json.loads((tmp_path / "history.json").read_text())
    assert np.trace(matrix) == round(epoch["val_accuracy"] * matrix.sum())
    assert "val_confusion_matrix" not in epoch


# -- the folder of a run


def test_the_default_folder_of_a_run_is_a_new_one_each_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with (
        run_directory(TrainConfig(), create_communicator("serial")) as path,
        run_directory(TrainConfig(), create_communicator("serial")) as other,
    ):
        assert path == Path("runs") / "resnet44-synthetic-1"
        assert other == Path("runs") / "resnet44-synthetic-2"
    (tmp_path / "out").mkdir()
    assert main([*TINY, "--output-dir=out", "--model=none"]) != 0
    assert (tmp_path / "out").exists()


# -- the same bytes


def test_two_threads_give_the_same_bytes_as_one(tmp_path):
    digests = set()
    for i, threads in enumerate([2, 1]):
        path = tmp_path / f"{i}.safetensors"
        options = [f"--threads={threads}", f"--save={path}", f"--output-dir={tmp_path / str(i)}"]
        options += ["--model=cnn", "--epochs=1", "--steps-per-epoch=3", "--augment=crop:1,flip"]
        assert main([*TINY, *options]) == 0
        digests.add(digest(path))
    assert len(digests) == 1


# -- ranks and processes


def test_two_ranks_train_and_report_once(tmp_path, mpiexec):
    """Also where the last batch, of one sample, leaves a rank without work."""
    options = ["--verbose", f"--output-dir={tmp_path / 'run'}", "--global-batch-size=17"]
    done = mpiexec(2, [*TRAIN, *TINY, "--model=cnn", *options])
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("pydtnn.train: imports: ") == 1
    assert done.stdout.count("time in communication") == done.stdout.count("pydtnn ") == 1
    assert done.stdout.splitlines()[0].endswith("training of cnn on synthetic, 2 ranks")
    assert "\nranks       2 x 1 thread on 1 host\n" in done.stdout
    assert "2, with 1 thread each" in done.stdout
    assert run_file(tmp_path / "run")["ranks"] == 2


def test_a_rank_that_leaves_before_training_ends_all(mpiexec):
    code = (
        "import os, sys; from pydtnn.train import main; "
        "rank = os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK')); "
        "sys.exit(main(['--help'] if rank == '0' else []))"
    )
    done = mpiexec(2, ["-c", code])
    assert done.returncode != 0
    assert only_line(done.stderr).startswith("rank 1: waits in gather_object for rank 0, whose pro")


def start(arguments: list[str], folder: Path, **options: object) -> subprocess.Popen[str]:
    """Start a process that sees signals as in a terminal, however the tests were started."""
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "signal.signal(signal.SIGHUP, signal.SIG_DFL); "  # nohup ignores it
        "from pydtnn.train import main; sys.exit(main())"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        **options,
    )


def skip_header(output: IO[str]) -> str:
    """The line after the header."""
    for line in output:
        if line.startswith("run folder "):
            break
    return output.readline()


LONG = [*TINY, "--epochs=100000", "--checkpoint-epochs=0"]


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_in_one_line(number, tmp_path):
    after_step = f"rank 0 received {signal.Signals(number).name}: training has ended after step "
    line = "terminated (SIGHUP)" if number == signal.SIGHUP else after_step
    with start(LONG, tmp_path) as process:
        assert process.stdout is not None
        assert skip_header(process.stdout).startswith("epoch 1/100000  loss ")
        process.send_signal(number)
        told = process.communicate(timeout=300)[1]
    assert process.returncode == 128 + number
    assert only_line(told).startswith(line)


@each(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGHUP, SystemExit)])
def test_a_signal_before_training_is_an_error(number, error):
    before = signal.signal(number, signal.SIG_DFL)  # under nohup, SIGHUP is ignored
    try:
        for _ in range(2):  # the handlers before are there again
            with pytest.raises(error), _terminated_in_order(Serial()):
                signal.raise_signal(number)
    finally:
        signal.signal(number, before)


def test_a_signal_prints_the_stacks_and_training_goes_on(tmp_path):
    with start(LONG, tmp_path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert skip_header(process.stdout).startswith("epoch 1/100000  loss ")
        process.send_signal(signal.SIGUSR1)
        assert process.stderr.readline() == "stack of rank 0:\n"
        # Of the threads that do not wait: the first one may be that of the loader.
        assert re.match(r"  [\w-]+: \w+\.py:\d+ \w+", process.stderr.readline())
        before = process.stdout.readline()
        assert process.stdout.readline() != before
        process.kill()


SLOW = """
import time
from pydtnn.layers import Flatten, Linear, ReLU, Sequential
class Slow(ReLU):
    def forward(self, x, context):
        while True:
            try:
                print("forward", flush=True)  # a signal that follows it is caught
                time.sleep(1000)
            except BaseException:
                pass
def net(classes, input_shape):
    return Sequential(Flatten(), Slow(), Linear(classes))
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_whose_code_does_not_end(number, tmp_path):
    """As in a long call of C, or where exceptions are swallowed."""
    (tmp_path / "slow.py").write_text(SLOW)
    with start([*TINY, "--model=slow.py:net"], tmp_path) as process:
        assert process.stdout is not None
        assert skip_header(process.stdout) == "forward\n"
        end = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < end:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
        process.kill()
    assert process.returncode == 128 + number


def test_a_reader_that_leaves_ends_the_run_in_silence(tmp_path):
    with start(LONG, tmp_path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        process.wait(300)
    assert process.returncode == 128 + signal.SIGPIPE


def test_a_reader_that_leaves_ends_all_ranks(mpiexec, tmp_path):
    """Each rank writes into a pipe of its own, whose reader leaves after the first line."""
    code = (
        "import os, subprocess, sys; from pydtnn.train import main; "
        "head = subprocess.Popen(['head', '-n', '10'], stdin=subprocess.PIPE, stdout=2); "
        "os.dup2(head.stdin.fileno(), 1); head.stdin.close(); "
        "sys.exit(main(sys.argv[1:]))"
    )
    done = mpiexec(2, ["-c", code, *LONG], directory=tmp_path)
    assert done.returncode == 1
    *header, last = done.stderr.splitlines()
    assert any(line.startswith("epoch 1/100000  loss ") for line in header)
    assert last == "rank 0: the pipe of the standard output is closed"
