"""The command line end to end: serial, on two ranks, resumed, reproduced, interrupted."""

from __future__ import annotations

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
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np
import pytest

import pydtnn
from pydtnn.cli.config import TrainConfig
from pydtnn.cli.run_directory import run_directory
from pydtnn.comm import create_communicator
from pydtnn.data import AUGMENTATIONS
from pydtnn.interchange import state_dict
from pydtnn.losses import LOSSES
from pydtnn.metrics import METRICS
from pydtnn.model import Model
from pydtnn.models import create_net
from pydtnn.optimizers import OPTIMIZERS
from pydtnn.saving.weights import encode
from pydtnn.schedules import SCHEDULES
from pydtnn.train import main
from tests.digits import needs_digits
from tests.launch import ROOT, Finished
from tests.small_run import TINY, TRAIN, only_line

NAMES = ("loss", "accuracy")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run_file(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


def test_a_run_leaves_its_configuration_history_checkpoints_and_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main([*TINY, f"--output-dir={out}", f"--save={tmp_path / 'w.safetensors'}"]) == 0
    run = run_file(out)
    assert run["configuration"]["model"] == "mlp"
    assert (run["ranks"], run["hosts"], run["threads"]) == (1, 1, 1)
    assert run["instruction_set"]
    assert run["environment"]["packages"]["numpy"]
    assert "commit" in run["environment"]
    assert json.loads((out / "history.json").read_text())
    with open(out / "history.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2
    assert float(rows[1]["loss"]) < float(rows[0]["loss"])
    assert (out / "best.safetensors").exists()
    assert sorted(p.name for p in out.glob("checkpoint-*")) == [
        "checkpoint-00000008",
        "checkpoint-00000016",
    ]
    assert (tmp_path / "w.safetensors").exists()
    printed, told = capsys.readouterr()
    assert told == ""
    table = [line.partition("  ")[0] for line in printed.partition("\n---")[2].splitlines()[1:]]
    results = [f"{part} {name}" for part in ("validation", "training") for name in NAMES]
    assert table[:7] == ["epochs", "best validation accuracy", *results, "samples/s"]
    for word in ("time in compute", "time in communication", "peak memory per rank", "ranks"):
        assert word in table
    assert "time per step" in table
    assert "first step" not in printed  # with --verbose only
    assert printed.isascii()


@pytest.mark.few(1)
@pytest.mark.parametrize("further", [[], ["--ema=0.9"]], ids=["weights", "averages"])
def test_a_saved_model_predicts_what_training_ended_with(
    further: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, saved = tmp_path / "run", tmp_path / "m.pydtnn"
    for _ in range(2):  # the second replaces the first
        shutil.rmtree(out, ignore_errors=True)
        assert main([*TINY, *further, f"--output-dir={out}", f"--save={saved}"]) == 0
    last = json.loads((out / "history.json").read_text())[-1]
    options = {"samples": 120, "test_samples": 40, "shape": (12, 12, 1), "classes": 4}
    x, y = pydtnn.load_dataset("synthetic", **options)[1].read(np.arange(40))
    assert (pydtnn.load(saved).predict_classes(x) == y).mean() == last["val_accuracy"]
    capsys.readouterr()
    assert main([*TINY, f"--load={saved}", "--evaluate-only"]) == 0
    assert f"accuracy {last['val_accuracy']:.4f}" in capsys.readouterr().out


def test_a_layer_that_cannot_be_saved_is_told_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    options = ["--model=own.py:net", "--save=m.pydtnn", "--output-dir=run"]
    assert main([*TINY, *options]) == 1
    assert capsys.readouterr().err.startswith("layer own1: option factor must be a number, text,")
    assert not Path("m.pydtnn").exists()
    assert not Path("run").exists()
    Path("weights.safetensors").mkdir()
    assert main([*TINY, "--save=weights.safetensors"]) == 1
    assert "--save: expected a file, got the folder weights" in capsys.readouterr().err


OWN = """
import numpy as np
from pydtnn.layers import Flatten, Identity, Linear, Sequential

class Own(Identity):
    def __init__(self, factor):
        super().__init__()

def net(classes, input_shape):
    return Sequential(Flatten(), Own(np.ones(3)), Linear(classes))
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("further", [[], ["--ema=0.9"]], ids=["weights", "averages"])
def test_saved_weights_are_evaluated_to_what_training_ended_with(
    further: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, weights = tmp_path / "run", tmp_path / "w.safetensors"
    assert main([*TINY, *further, f"--output-dir={out}", f"--save={weights}"]) == 0
    last = json.loads((out / "history.json").read_text())[-1]
    copy = tmp_path / "copy.safetensors"
    for options in ([f"--load={weights}"], [f"--output-dir={out}", "--resume", f"--save={copy}"]):
        capsys.readouterr()
        assert main([*TINY, *further, *options, "--evaluate-only"]) == 0
        line = capsys.readouterr().out.splitlines()[-1]
        assert line == f"loss {last['val_loss']:.4f}  accuracy {last['val_accuracy']:.4f}"
    assert digest(copy) == digest(weights)


def test_weights_of_a_run_with_other_classes_are_loaded_below_the_new_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_state_dict_of_pytorch_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = (12, 12, 1)
    trained = Model(create_net("resnet8", 4, shape), shape, seed=5)
    path, lines = tmp_path / "net.safetensors", []
    for arrays in (trained.state(), state_dict(trained)):
        path.write_bytes(encode(arrays))
        capsys.readouterr()
        assert main([*TINY, "--model=resnet8", "--evaluate-only", f"--load={path}"]) == 0
        lines.append(capsys.readouterr().out.splitlines()[-1])
    assert lines[0] == lines[1]


def test_a_model_and_a_scheme_of_ones_own_are_taken_from_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from pydtnn.parallel.exchange import AllReduce\n"
        "from pydtnn.layers import Flatten, Linear, Sequential\n"
        "def net(classes, input_shape, hidden=8):\n"
        "    return Sequential(Flatten(), Linear(hidden), Linear(classes))\n"
        "class Mine(AllReduce):\n"
        "    def __init__(self, comm, overlap=True):\n"
        "        super().__init__(comm, overlap=overlap)\n"
        "        print('overlap', overlap)\n"
    )
    options = [
        f"--model={own}:net",
        '--model-options={"hidden": 5}',
        f"--scheme={own}:Mine",
        "--no-overlap",
    ]
    assert main([*TINY, *options, f"--output-dir={tmp_path / 'run'}"]) == 0
    assert run_file(tmp_path / "run")["parameters"] == (144 + 1) * 5 + (5 + 1) * 4
    assert "overlap False" in capsys.readouterr().out


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
    *("--class-balanced", "--restore-best", "--metrics=micro_f1,per_label_recall"),
    *("--ema=0.9", "--mixup=0.2", "--cutmix=1", "--augment=resized_crop:0.3,randaugment:3:20"),
]


@pytest.mark.few(6)
@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_trains(
    choice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Squared errors of logits, which no softmax tames, want small steps.
    assert main([*TINY, "--epochs=1", "--lr=0.001", choice, f"--output-dir={tmp_path}"]) == 0
    assert capsys.readouterr().err == ""
    (epoch,) = json.loads((tmp_path / "history.json").read_text())
    assert all(value is not None for value in epoch.values())


def test_a_run_ends_with_its_best_weights_if_they_are_to_be_restored(tmp_path: Path) -> None:
    """The rate is so high that later epochs are hardly better than the first."""
    options = ["--epochs=4", "--lr=0.3", "--monitor=val_accuracy", "--restore-best"]
    saved = tmp_path / "last.safetensors"
    out = f"--output-dir={tmp_path / 'run'}"
    assert main([*TINY, *options, f"--save={saved}", out]) == 0
    assert "checkpoint-00000032" in os.listdir(tmp_path / "run")
    assert saved.read_bytes() == (tmp_path / "run" / "best.safetensors").read_bytes()


def test_tables_of_metrics_are_printed_with_the_names_of_the_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--epochs=1", "--metrics=accuracy,confusion_matrix", f"--output-dir={tmp_path}"]
    assert main([*TINY, *options]) == 0
    table = capsys.readouterr().out.partition("val_confusion_matrix\n")[2].splitlines()
    matrix = np.array([[int(x) for x in line.split()[1:]] for line in table[1:]])
    assert matrix.shape == (4, 4)
    (epoch,) = json.loads((tmp_path / "history.json").read_text())
    assert np.trace(matrix) == round(epoch["val_accuracy"] * matrix.sum())
    assert "val_confusion_matrix" not in epoch


@needs_digits
def test_digits_are_learnt(tmp_path: Path) -> None:
    options = ["--dataset=digits", "--model=mlp", "--epochs=3", "--threads=1"]
    assert main([*options, f"--output-dir={tmp_path}"]) == 0
    assert json.loads((tmp_path / "history.json").read_text())[-1]["val_accuracy"] > 0.8


def test_the_learning_rate_follows_the_global_batch(tmp_path: Path) -> None:
    """16 instead of 64 samples: a quarter of the learning rate, or half of it."""
    for how, lr in (("none", 0.1), ("linear", 0.025), ("sqrt", 0.05)):
        out = tmp_path / how
        options = [f"--lr-scaling={how}", "--lr=0.1", "--schedule=constant", "--epochs=1"]
        assert main([*TINY, *options, f"--output-dir={out}"]) == 0
        assert run_file(out)["schedule"] == f"Constant(lr={lr})"


def test_a_rules_own_numbers_hold_where_the_user_gives_none(tmp_path: Path) -> None:
    for rule, decay in (("sgd", 1e-4), ("adamw", 0.01)):
        out = tmp_path / rule
        assert main([*TINY, f"--optimizer={rule}", "--epochs=1", f"--output-dir={out}"]) == 0
        assert run_file(out)["weight_decay"] == decay


# -- the folder of a run


def test_the_default_folder_of_a_run_is_a_new_one_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert main([*TINY, "--epochs=1"]) == 0
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == [
        "mlp-synthetic-1",
        "mlp-synthetic-2",
    ]


def test_two_runs_that_start_together_get_two_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "resnet44-synthetic-1").mkdir(parents=True)
    monkeypatch.setattr(Path, "exists", lambda path: False)  # it comes between look and leap
    with run_directory(TrainConfig(), create_communicator("serial")) as path:
        assert path == Path("runs") / "resnet44-synthetic-2"


def test_a_folder_that_was_there_stays_when_a_run_fails(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    assert main([*TINY, f"--output-dir={out}", "--model=none"]) != 0
    assert out.exists()


# -- the same bytes


def test_two_threads_give_the_same_bytes_twice_and_as_one(tmp_path: Path) -> None:
    digests = set()
    for i, threads in enumerate([2, 2, 1]):
        path = tmp_path / f"{i}.safetensors"
        options = [f"--threads={threads}", f"--save={path}", f"--output-dir={tmp_path / str(i)}"]
        options += ["--model=cnn", "--epochs=1", "--steps-per-epoch=3", "--augment=crop:1,flip"]
        assert main([*TINY, *options]) == 0
        digests.add(digest(path))
    assert len(digests) == 1


def test_a_stopped_run_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    common = [*TINY, "--model=cnn", "--augment=flip", "--checkpoint-steps=3", "--keep=20"]
    assert main([*common, f"--output-dir={whole}", f"--save={tmp_path / 'a.safetensors'}"]) == 0
    checkpoints = sorted(whole.glob("checkpoint-*"))
    part.mkdir()
    checkpoints[2].rename(part / checkpoints[2].name)
    resume = [f"--output-dir={part}", "--resume", f"--save={tmp_path / 'b.safetensors'}"]
    assert main([*common, *resume]) == 0
    assert digest(tmp_path / "a.safetensors") == digest(tmp_path / "b.safetensors")
    histories = [json.loads((d / "history.json").read_text()) for d in (whole, part)]
    assert histories[0] == histories[1]


# -- ranks and processes


def test_two_ranks_train_and_report_once(tmp_path: Path, mpiexec: Callable[..., Finished]) -> None:
    """Also where the last batch, of one sample, leaves a rank without work."""
    digests = set()
    for i in range(2):
        save = tmp_path / f"{i}.safetensors"
        options = [f"--save={save}", f"--output-dir={tmp_path / str(i)}", "--global-batch-size=17"]
        done = mpiexec(2, [*TRAIN, *TINY, "--model=cnn", *options])
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert done.stdout.count("time in communication") == 1
        assert "2, with 1 thread each" in done.stdout
        digests.add(digest(save))
        assert run_file(tmp_path / str(i))["ranks"] == 2
    assert len(digests) == 1


def test_the_help_page_is_printed_once(mpiexec: Callable[..., Finished]) -> None:
    done = mpiexec(2, [*TRAIN, "--help"])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("usage:") == 1


def test_a_rank_that_leaves_before_training_ends_all(mpiexec: Callable[..., Finished]) -> None:
    code = (
        "import os, sys; from pydtnn.train import main; "
        "rank = os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK')); "
        "sys.exit(main(['--help'] if rank == '0' else []))"
    )
    done = mpiexec(2, ["-c", code], timeout=60)
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
@pytest.mark.parametrize(
    ("number", "line"),
    [
        (signal.SIGINT, "rank 0 received SIGINT: training has ended after step "),
        (signal.SIGTERM, "rank 0 received SIGTERM: training has ended after step "),
        (signal.SIGHUP, "terminated (SIGHUP)"),
    ],
)
def test_a_signal_ends_a_run_in_one_line(number: int, line: str, tmp_path: Path) -> None:
    with start(LONG, tmp_path) as process:
        assert process.stdout is not None
        assert skip_header(process.stdout).startswith("epoch 1/100000  loss ")
        process.send_signal(number)
        told = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + number
    assert only_line(told).startswith(line)


def test_a_signal_prints_the_stacks_and_training_goes_on(tmp_path: Path) -> None:
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
from pydtnn.layers import Flatten, Linear, Sequential
from pydtnn.layers import ReLU
class Slow(ReLU):
    def forward(self, x, context):
        print("forward", flush=True)
        while True:
            try:
                time.sleep(1000)
            except BaseException:
                pass
def net(classes, input_shape):
    return Sequential(Flatten(), Slow(), Linear(classes))
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_whose_code_does_not_end(number: int, tmp_path: Path) -> None:
    """As in a long call of C, or where exceptions are swallowed; the second signal is at once."""
    (tmp_path / "slow.py").write_text(SLOW)
    with start([*TINY, "--model=slow.py:net"], tmp_path) as process:
        assert process.stdout is not None
        assert skip_header(process.stdout) == "forward\n"
        process.send_signal(number)
        time.sleep(0.8)
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == 128 + number


def test_a_reader_that_leaves_ends_the_run_in_silence(tmp_path: Path) -> None:
    with start(LONG, tmp_path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        process.wait(60)
    assert process.returncode == 128 + signal.SIGPIPE


def test_a_reader_that_leaves_ends_all_ranks(
    mpiexec: Callable[..., Finished], tmp_path: Path
) -> None:
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


def test_the_module_runs_from_elsewhere_whatever_the_encoding(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *TRAIN, *TINY, "--epochs=1"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "mlp-synthetic-1" / "run.json").exists()
