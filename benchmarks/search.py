"""Compare searches for hyper-parameters: pruned and random ones, ours and other ways to run a grid.

    PYDTNN_DATA=DIR python -m benchmarks.search --output benchmarks/results/search.txt

Trials train ResNet-8 on a part of CIFAR-10, one rank each, four at a time.

- `seeds`: 40 trials of TPE with ASHA, and a random search that runs at the same time, so that both
  have the same share of the machine. Random trials count that are complete when the other search
  ends.
- `use`: share of the time of the ranks in which they trained, in the search with ASHA.
- `grid`: wall time of the same grid as a loop of a shell, one job of four ranks a trial; as a shell
  that keeps four jobs of one process; with Optuna and `multiprocessing`, four processes; and as one
  job of ours. In turns, medians.

About 30 minutes on 2 cores. Results of seeds and turns remain in `--keep`, and are not measured
again.
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

import numpy as np

from benchmarks.common.report import Report
from pydtnn.tools.search import make_space
from pydtnn.tools.search.lines import spans_of, use_of
from pydtnn.tools.search.study import SharedStudy
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
SPACE = {
    "lr": {"low": 1e-6, "high": 10.0, "log": True},
    "momentum": {"low": 0.0, "high": 0.99},
    "weight_decay": {"low": 1e-6, "high": 1.0, "log": True},
}
"""Ranges of somebody who knows nothing of this network."""
GRID = {"lr": [0.003, 0.01, 0.03, 0.1], "momentum": [0.0, 0.9]}
EPOCHS, GRID_EPOCHS, RUNG = 21, 4, 3
"""Of a trial, of one of the grid, and of the first rung. Periods of the schedule end after 3, 9 and
21 epochs: at rungs, where networks with high and low rates can be compared, and at the end."""
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


def trials_of(folder: Path, name: str, space: dict[str, Any]) -> list[Any]:
    return list(SharedStudy(folder / name, make_space(**space)).study.get_trials(deepcopy=False))


def complete(trials: list[Any]) -> list[Any]:
    return [one for one in trials if one.state.name == "COMPLETE"]


def curve_of(trials: list[Any], start: float, seconds: float) -> list[tuple[float, float]]:
    """Return parts of a time, and the best value of the trials that were complete then."""
    points, best = [(0.0, 0.0)], 0.0
    for one in sorted(complete(trials), key=lambda one: one.datetime_complete):
        best = max(best, one.values[0])
        points.append(((one.datetime_complete.timestamp() - start) / seconds, best))
    return points


def compare(folder: Path, seed: int, trials: int, fixed: dict[str, Any]) -> dict[str, Any]:
    """Search with TPE and ASHA, and at random until the first search has ended."""
    common = {"fixed": {**fixed, "epochs": EPOCHS}, "space": SPACE}
    pruner = {"name": "asha", "min_resource": RUNG}
    pruned = {**common, "sampler": "tpe", "pruner": pruner, "trials": trials, "seed": seed}
    random = {**common, "sampler": "random", "trials": 100 * trials, "seed": 1000 + seed}
    names = f"asha-{seed}", f"random-{seed}"
    with begin(folder, names[0], pruned) as first, begin(folder, names[1], random):
        if not first.wait(7200) or first.finished().returncode:
            raise RuntimeError(first.finished().stderr)
    own = trials_of(folder, names[0], pruned)
    start = min(span["begin"] for _, span in spans_of(own))
    end = max(span["end"] for _, span in spans_of(own))
    others = [
        one
        for one in trials_of(folder, names[1], random)
        if one.datetime_complete and one.datetime_complete.timestamp() <= end
    ]
    both = own, others
    curves = [[*one.intermediate_values.values()] for one in complete(others)]
    return {
        "seed": seed,
        "seconds": end - start,
        "epochs": [sum(len(one.intermediate_values) for one in trials) for trials in both],
        "trials": [*map(len, both)],
        "complete": [len(complete(one)) for one in both],
        "best": [max(one.values[0] for one in complete(trials)) for trials in both],
        "use": use_of(own)[0],
        "curves": [curve_of(one, start, end - start) for one in both],
        "rungs": [[curve[RUNG - 1], curve[-1]] for curve in curves],
    }


def correlation(pairs: list[tuple[float, float]]) -> float:
    """Return the correlation of the ranks of values (Spearman); equal values have no order."""
    ranks = [np.argsort(np.argsort(values, kind="stable")) for values in zip(*pairs, strict=True)]
    return float(np.corrcoef(*ranks)[0, 1])


# -- four ways to run a grid ----------------------------------------------------------------------


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


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Draw the best accuracy over time, of all seeds."""
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
        axes.set_xlabel("time, in parts of that of the search with ASHA")
        axes.set_ylabel("best validation accuracy (%)")
        axes.set_ylim(bottom=10)
        axes.legend(frameon=False)
        figure.savefig(path, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", default=["seeds", "grid"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--validation", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="folder of the searches")
    parser.add_argument("--output", type=Path, help="file of the table; the plot is beside it")
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
        if "seeds" in options.parts:
            show_seeds(folder, options, fixed, report)
        if "grid" in options.parts:
            time_grid(folder, options.turns, fixed, report)


def show_seeds(
    folder: Path, options: argparse.Namespace, fixed: dict[str, Any], report: Report
) -> None:
    """Print a line for each seed, and draw them."""
    report.line(
        f"TPE with ASHA, {options.trials} trials of at most {EPOCHS} epochs, first rung {RUNG}; "
        "random trials in the same time"
    )
    report.line("seed  trials      complete    epochs      best accuracy (%)  use of the  time")
    report.line("      ASHA random ASHA random ASHA random ASHA  random       ranks (%)   (s)")
    found = []
    for seed in range(options.seeds):
        known = folder / f"seed-{seed}.json"
        if not known.exists():
            known.write_text(json.dumps(compare(folder, seed, options.trials, fixed)))
        one = json.loads(known.read_text())
        found.append(one)
        pairs = (one[name] for name in ("trials", "complete", "epochs"))
        counts = " ".join(f"{a:4} {b:6}" for a, b in pairs)
        best = "  ".join(f"{100 * value:5.1f}" for value in one["best"])
        use = f"{100 * one['use']:9.1f} {one['seconds']:11.1f}"
        report.line(f"{seed:4}  {counts} {best}    {use}")
    equal = sum(one["best"][0] >= one["best"][1] for one in found)
    report.line(f"TPE with ASHA is better or equal in {equal} of {len(found)} seeds")
    pairs = [tuple(pair) for one in found for pair in one["rungs"]]
    report.line(
        f"rank correlation of the accuracy after {RUNG} epochs and at the end: "
        f"{correlation(pairs):.2f} ({len(pairs)} random trials)"
    )
    if options.output:
        draw(found, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
