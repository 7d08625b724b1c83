"""Compare searches for hyper-parameters: pruned and random ones, ours and other ways to run a grid.

    PYDTNN_DATA=DIR python -m benchmarks.search --output benchmarks/results/search.txt

Trials train ResNet-8 on a part of CIFAR-10, one rank each, four at a time.

- `seeds`: 40 trials of TPE with ASHA, and a random search that trains as many epochs. An epoch of
  any trial has the same operations, so these are equal times, whatever else the machine does.
- `use`: share of the time of the ranks in which they trained, of each of these searches.
- `grid`: wall time of the same grid as a loop of a shell, one job of four ranks a trial; with
  Optuna and `multiprocessing`, four processes; and as one job of ours. In turns, medians.

About 20 minutes on 2 cores. Results of a seed remain in `--keep`, and are not computed again.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common.report import Report
from pydtnn.search import make_space
from pydtnn.search.lines import use_of
from pydtnn.search.study import SharedStudy
from tests.launch import run

RANKS = 4
FIXED = {
    "model": "resnet8",
    "dataset": "cifar10",
    "dataset_options": {"any_size": True},
    "batch_size": 16,
    "threads": 1,
    "tuning": "fixed",
}
SPACE = {
    "lr": {"low": 1e-4, "high": 1.0, "log": True},
    "momentum": {"low": 0.0, "high": 0.99},
    "weight_decay": {"low": 1e-6, "high": 1e-1, "log": True},
    "schedule": ["constant", "cosine"],
}
GRID = {"lr": [0.003, 0.01, 0.03, 0.1], "momentum": [0.0, 0.9]}
EPOCHS, GRID_EPOCHS = 9, 4
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


def search(folder: Path, name: str, space: dict[str, Any], ranks: int = RANKS) -> list[Any]:
    """Search with one rank for each trial; return the trials."""
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(space))
    command = ["-m", "pydtnn.search", str(file), "--study", str(folder / name)]
    done = run(ranks, command, timeout=3600)
    if done.returncode:
        raise RuntimeError(done.stderr)
    study = SharedStudy(folder / name, make_space(**space)).study
    return list(study.get_trials(deepcopy=False))


def epochs_of(trials: list[Any]) -> int:
    return sum(len(one.intermediate_values) for one in trials)


def best_of(trials: list[Any]) -> float:
    return max(one.values[0] for one in trials if one.state.name == "COMPLETE")


def curve_of(trials: list[Any]) -> list[tuple[int, float]]:
    """Return the best value of complete trials after so many epochs, in the order of their ends."""
    points, epochs, best = [], 0, 0.0
    for one in sorted(trials, key=lambda one: one.datetime_complete):
        epochs += len(one.intermediate_values)
        if one.state.name == "COMPLETE":
            best = max(best, one.values[0])
        points.append((epochs, best))
    return points


def compare(folder: Path, seed: int, trials: int, fixed: dict[str, Any]) -> dict[str, Any]:
    """Search with TPE and ASHA, and at random for as many epochs."""
    common = {"fixed": {**fixed, "epochs": EPOCHS}, "space": SPACE, "seed": seed}
    pruned = search(
        folder, f"asha-{seed}", {**common, "sampler": "tpe", "pruner": "asha", "trials": trials}
    )
    epochs = epochs_of(pruned)
    more = {"sampler": "random", "trials": math.ceil(epochs / EPOCHS), "seed": 1000 + seed}
    random = search(folder, f"random-{seed}", {**common, **more})
    return {
        "seed": seed,
        "epochs": [epochs, epochs_of(random)],
        "trials": [len(pruned), len(random)],
        "best": [best_of(pruned), best_of(random)],
        "use": [use_of(pruned), use_of(random)],
        "curves": [curve_of(pruned), curve_of(random)],
    }


# -- three ways to run a grid ---------------------------------------------------------------------


def shell_loop(folder: Path, fixed: dict[str, Any]) -> None:
    """Train the trials one after the other, each in a job of all ranks."""
    for number, values in enumerate(make_space(GRID, sampler="grid").grid()):
        options = arguments({**fixed, **values, "output_dir": str(folder / str(number))})
        options[options.index("--batch-size=16")] = "--global-batch-size=16"
        done = run(RANKS, ["-m", "pydtnn.train", *options], timeout=600)
        if done.returncode:
            raise RuntimeError(done.stderr)


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
    search(folder, "grid", {"fixed": fixed, "space": GRID, "sampler": "grid"})


WAYS = {"shell loop": shell_loop, "Optuna, multiprocessing": optuna_processes, "pydtnn": ours}


def time_grid(turns: int, fixed: dict[str, Any], report: Report) -> None:
    """Time the three ways in turns."""
    fixed = {**fixed, "epochs": GRID_EPOCHS}
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(turns):
        for name, way in WAYS.items():
            with tempfile.TemporaryDirectory() as folder:
                begin = time.monotonic()
                way(Path(folder), fixed)
                seconds[name].append(time.monotonic() - begin)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    best = min(value for name, value in medians.items() if name != "pydtnn")
    report.line(f"grid of 8 trials, {GRID_EPOCHS} epochs, {turns} turns: wall time in s")
    for name, times in seconds.items():
        shown = f"{min(times):8.2f} {medians[name]:8.2f} {max(times):8.2f}"
        report.line(f"  {name:26} {shown}   {medians[name] / best:5.2f} of the best other")


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Draw the best accuracy over the epochs that were trained, of all seeds."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 8, "axes.spines.top": False}):
        figure = Figure((6.4, 3.2), layout="constrained")
        axes = figure.subplots()
        for one in found:
            for curve, colour in zip(one["curves"], ("#0072B2", "#D55E00"), strict=True):
                x, y = zip(*curve, strict=True)
                axes.step(x, [100 * value for value in y], where="post", color=colour, lw=1.2)
        axes.plot([], [], color="#0072B2", label="TPE, ASHA: 40 trials")
        axes.plot([], [], color="#D55E00", label="random, no pruning")
        axes.set_xlabel("epochs trained by all trials")
        axes.set_ylabel("best validation accuracy (%)")
        axes.legend(frameon=False)
        figure.savefig(path, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", default=["seeds", "grid"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="folder of the searches")
    parser.add_argument("--output", type=Path, help="file of the table; the plot is beside it")
    options = parser.parse_args()
    report = Report(options.output)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        write_part(folder, options.images, options.images // 2)
        fixed = {**FIXED, "data_dir": str(folder)}
        report.line(
            f"ResNet-8, {options.images} images of CIFAR-10 to train, {options.images // 2} to "
            f"validate; {RANKS} ranks, one for each trial"
        )
        if "seeds" in options.parts:
            show_seeds(folder, options, fixed, report)
        if "grid" in options.parts:
            time_grid(options.turns, fixed, report)


def show_seeds(
    folder: Path, options: argparse.Namespace, fixed: dict[str, Any], report: Report
) -> None:
    """Print a line for each seed, and draw them."""
    report.line("seed  trials      epochs      best accuracy (%)   use of the ranks (%), time (s)")
    report.line("      ASHA random ASHA random ASHA  random       ASHA          random")
    found = []
    for seed in range(options.seeds):
        known = folder / f"seed-{seed}.json"
        if not known.exists():
            known.write_text(json.dumps(compare(folder, seed, options.trials, fixed)))
        one = json.loads(known.read_text())
        found.append(one)
        (a, b), (c, d), (e, f) = one["trials"], one["epochs"], one["best"]
        use = "  ".join(f"{100 * share:5.1f} {seconds:6.1f}" for share, seconds in one["use"])
        report.line(f"{seed:4}  {a:4} {b:6} {c:4} {d:6} {100 * e:5.1f} {100 * f:5.1f}     {use}")
    equal = sum(one["best"][0] >= one["best"][1] for one in found)
    report.line(f"TPE with ASHA is better or equal in {equal} of {len(found)} seeds")
    if options.output:
        draw(found, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
