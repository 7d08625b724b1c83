"""Compare ways to train the trials of a grid: loops of a shell, Optuna, and a search.

    PYDTNN_DATA=DIR python -m benchmarks.search --output benchmarks/results/search.txt

Trials train ResNet-8 on a part of CIFAR-10, one rank each, four at a time. Wall time of the same
grid as a loop of a shell, one job of four ranks a trial; as a shell that keeps four jobs of one
process; with Optuna and `multiprocessing`, four processes; and as one job of ours. In turns,
medians. Results of turns remain in `--keep`, and are not measured again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common.report import Report
from pydtnn.tools.search import make_space
from tests.launch import Program, run

RANKS = 4
FIXED = {
    "model": "resnet8",
    "dataset": "cifar10",
    "dataset_options": {"any_size": True},
    "batch_size": 64,
    "schedule": "cosine_restarts",
    "schedule_options": {"epochs": 3, "factor": 2},
    "threads": 1,
    "tuning": "fixed",
}
GRID = {"lr": [0.003, 0.01, 0.03, 0.1], "momentum": [0.0, 0.9]}
GRID_EPOCHS = 4
RECORD = 1 + 3 * 32 * 32
"""Bytes of an image and its label in the binary files of CIFAR-10."""


def write_part(folder: Path, images: int, validation: int) -> None:
    """Write the first images of CIFAR-10 in its own format."""
    source = Path(os.environ["PYDTNN_DATA"]) / "cifar-10-batches-bin"
    target = folder / "cifar-10-batches-bin"
    target.mkdir(parents=True, exist_ok=True)
    for number in range(1, 6):
        name = f"data_batch_{number}.bin"
        (target / name).write_bytes((source / name).read_bytes()[: images // 5 * RECORD])
    name = "test_batch.bin"
    (target / name).write_bytes((source / name).read_bytes()[: validation * RECORD])


def begin(folder: Path, name: str, space: dict[str, Any]) -> Program:
    """Begin a search with one rank for each trial."""
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(space))
    command = ["-m", "pydtnn", "search", str(file), "--study", str(folder / name)]
    return Program(RANKS, command)


def shell_loop(folder: Path, fixed: dict[str, Any]) -> None:
    """Train the trials one after the other, each in a job of all ranks."""
    for number, values in enumerate(make_space(GRID, sampler="grid").grid()):
        options = arguments({**fixed, **values, "output_dir": str(folder / str(number))})
        options[options.index("--batch-size=64")] = "--global-batch-size=64"
        done = run(RANKS, ["-m", "pydtnn.train", *options], timeout=600)
        if done.returncode:
            raise RuntimeError(done.stderr)


def shell_jobs(folder: Path, fixed: dict[str, Any]) -> None:
    """Train the trials as jobs of one process, four at a time, as `xargs -P 4` does."""
    lines = [
        shlex.join([*arguments({**fixed, **values, "output_dir": str(folder / str(number))})])
        for number, values in enumerate(make_space(GRID, sampler="grid").grid())
    ]
    script = (
        f"xargs -P {RANKS} -d '\\n' -I ARGUMENTS sh -c '{sys.executable} -m pydtnn.train ARGUMENTS'"
    )
    subprocess.run(
        ["sh", "-c", script],
        input="\n".join(lines),
        text=True,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def arguments(options: dict[str, Any]) -> list[str]:
    return [
        f"--{name.replace('_', '-')}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in options.items()
    ]


def optuna_worker(folder: str, fixed: dict[str, Any], count: int) -> None:
    """Train some of the trials of a study, as the user of Optuna writes it."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    from pydtnn.train import main

    def objective(trial: Any) -> float:
        values = {name: trial.suggest_categorical(name, choices) for name, choices in GRID.items()}
        own = Path(folder) / str(trial.number)
        if main([*arguments({**fixed, **values, "output_dir": str(own)}), "--quiet"]):
            raise RuntimeError("training has failed")
        return float(json.loads((own / "history.json").read_text())[-1]["val_accuracy"])

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.JournalStorage(JournalFileBackend(f"{folder}/journal"))
    study = optuna.load_study(study_name="grid", storage=storage)
    study.optimize(objective, n_trials=count)


def optuna_processes(folder: Path, fixed: dict[str, Any]) -> None:
    """Train the trials with Optuna in as many processes as there are ranks."""
    script = f"from benchmarks.search import start_optuna as s; s({str(folder)!r}, {fixed!r})"
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def start_optuna(folder: str, fixed: dict[str, Any]) -> None:
    """Create the study and train its trials; in a process of its own, as a user's program."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.JournalStorage(JournalFileBackend(f"{folder}/journal"))
    study = optuna.create_study(study_name="grid", storage=storage, direction="maximize")
    points = make_space(GRID, sampler="grid").grid()
    for values in points:
        study.enqueue_trial(values)
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=optuna_worker, args=(folder, fixed, len(points) // RANKS))
        for _ in range(RANKS)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise RuntimeError("a process of Optuna has failed")


def ours(folder: Path, fixed: dict[str, Any]) -> None:
    """Train the trials as one job."""
    with begin(folder, "grid", {"fixed": fixed, "space": GRID, "sampler": "grid"}) as program:
        if not program.wait(600) or program.finished().returncode:
            raise RuntimeError(program.finished().stderr)


WAYS = {
    "shell, jobs of 4 ranks": shell_loop,
    "shell, 4 jobs at a time": shell_jobs,
    "Optuna, multiprocessing": optuna_processes,
    "pydtnn": ours,
}


def time_grid(folder: Path, turns: int, fixed: dict[str, Any], report: Report) -> None:
    """Time the ways in turns, as far as that has not been done."""
    fixed = {**fixed, "epochs": GRID_EPOCHS}
    known = folder / "grid.json"
    seconds = json.loads(known.read_text()) if known.exists() else {name: [] for name in WAYS}
    for _ in range(len(seconds["pydtnn"]), turns):
        for name, way in WAYS.items():
            with tempfile.TemporaryDirectory() as temporary:
                begin = time.monotonic()
                way(Path(temporary), fixed)
                seconds[name].append(time.monotonic() - begin)
        known.write_text(json.dumps(seconds))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    best = min(value for name, value in medians.items() if name != "pydtnn")
    report.line(f"grid of 8 trials, {GRID_EPOCHS} epochs, {turns} turns: wall time in s")
    report.line(f"  {'':26} {'minimum':>8} {'median':>8} {'maximum':>8}   of the best other")
    for name, times in seconds.items():
        shown = f"{min(times):8.2f} {medians[name]:8.2f} {max(times):8.2f}"
        report.line(f"  {name:26} {shown}   {medians[name] / best:5.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--validation", type=int, default=150)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="folder of the results")
    parser.add_argument("--output", type=Path, help="file of the table")
    options = parser.parse_args()
    report = Report(options.output)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        write_part(folder, options.images, options.validation)
        fixed = {**FIXED, "data_dir": str(folder)}
        report.line(
            f"ResNet-8, {options.images} images of CIFAR-10 to train, {options.validation} to "
            f"validate; {RANKS} ranks, one for each trial"
        )
        time_grid(folder, options.turns, fixed, report)


if __name__ == "__main__":
    main()
