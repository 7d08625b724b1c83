"""Accuracy over wall time: a recipe, carried out by pydtnn and by PyTorch, alternately by epochs.

    python -m benchmarks.time_to_accuracy --recipe mnist-99 --seeds 5 --results mnist.jsonl \
        --figure mnist.png --data-dir DATA
    python -m benchmarks.time_to_accuracy --recipe cifar10-90 --sides ours eager compiled \
        --results cifar.jsonl --data-dir DATA --steps-per-epoch 20 --epochs 2

Options that are not those of this program are options of training, which override the recipe. Each
seed has other initial weights and another order of the samples; all sides begin with the same
weights and see the same batches, augmented by the same loader. A side is a process of its own, and
trains an epoch while the others wait. Seconds are those of training, with the choice of algorithms
and compilation, without imports, reading of data and evaluations. PyTorch runs the same layers as
`torch.nn` modules in `channels_last`; its Muon is the one below.

A seed that is complete is appended to the file of --results. A further call with the same values of
all options, in any order, continues after the seeds in it, and prints all of them: accuracy after
the last epoch with its standard error, seconds of training, seconds until the target is reached,
and the ratio of seconds to ours of the same seed; medians, with the smallest and the largest in
brackets.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.common.report import WITH_TORCH, Report
from benchmarks.common.sides import Side, serve
from benchmarks.common.work import Ask
from pydtnn.callbacks import Callback
from pydtnn.callbacks.mirrored import MirroredEvaluation, views
from pydtnn.cli.build import Job, create_job
from pydtnn.cli.config import TrainConfig
from pydtnn.cli.parser import parse
from pydtnn.cli.run import run
from pydtnn.cli.workload import changes_of, create_data
from pydtnn.comm import create_communicator
from pydtnn.data import Loader
from pydtnn.optimizers import SGD, Muon
from pydtnn.optimizers.muon import COEFFICIENTS

SIDES = ("ours", "eager", "compiled")
EPOCH_TIMEOUT_S = 6 * 3600.0

UNKNOWN = ("ema", "clip_norm", "teacher", "plateau", "formats", "early_stopping", "stop_at")
"""Options that PyTorch's side does not carry out."""


class Ours(Callback):
    """The command line's training, whose epochs begin when they are asked for.

    Parameters
    ----------
    options : sequence of str
        Of the command line.
    seed : int
    """

    note = ""

    def __init__(self, options: Sequence[str], seed: int) -> None:
        quiet = {"quiet": True, "checkpoint_epochs": 0}
        self.config = dataclasses.replace(parse(options), seed=seed, **quiet)
        self.data, self.comm = create_data(self.config), create_communicator("serial")
        self.epochs: list[tuple[float, float]] = []
        self.start, self.evaluations = 0.0, 0.0

    def turns(self, ask: Ask) -> None:
        """Train as many epochs as the recipe has, each when it is asked for."""
        self.ask = ask
        self.ask(None)
        with TemporaryDirectory() as folder:
            self.config = dataclasses.replace(self.config, output_dir=folder)
            self.start = time.perf_counter()
            self.train()

    def told(self, evaluations: float, accuracy: float) -> None:
        """Keep the results of an epoch, and wait for the next.

        Parameters
        ----------
        evaluations : float
            Seconds of all evaluations so far.
        accuracy : float
        """
        seconds = time.perf_counter() - self.start - (evaluations - self.evaluations)
        self.evaluations = evaluations
        self.epochs.append((seconds, accuracy))
        self.ask(seconds)
        self.start = time.perf_counter()

    def memory(self) -> list[tuple[float, float]]:
        """Return seconds and test accuracy of each epoch."""
        return self.epochs

    def train(self) -> None:
        """Train and evaluate."""
        run(self.config, self.comm, [self], self.data)

    def on_epoch_end(self, trainer: Any) -> None:
        """Keep the results of an epoch."""
        self.told(trainer.seconds["evaluation"], trainer.logs["val_accuracy"])


class Theirs(Ours):
    """The same in PyTorch.

    Parameters
    ----------
    options, seed
        See `Ours`.
    compiled : bool
        Whether the network is compiled.
    """

    def __init__(self, options: Sequence[str], seed: int, compiled: bool) -> None:
        import torch._dynamo  # noqa: F401 (an import that PyTorch's first optimizer would make)

        import benchmarks.common.torch_twin  # noqa: F401

        super().__init__(options, seed)
        usual, self.compiled = TrainConfig(), compiled
        if other := [n for n in UNKNOWN if getattr(self.config, n) != getattr(usual, n)]:
            raise ValueError(f"PyTorch's side does not carry out {', '.join(other)}")

    def train(self) -> None:
        import torch
        from torch.nn.functional import cross_entropy

        from benchmarks.common.torch_twin import Twin, to_ours, to_torch

        config = dataclasses.replace(self.config, fusion=False)
        job = create_job(config, self.comm, 1, Path(str(config.output_dir)), data=self.data)
        torch.set_num_threads(config.threads or torch.get_num_threads())
        twin, (train, test) = Twin(job.trainer.model), self.data
        net: Any = torch.compile(twin) if self.compiled else twin
        update, evaluations = Update(job, twin), 0.0
        mirrored = [c for c in job.trainer.callbacks if isinstance(c, MirroredEvaluation)]
        same = {"global_batch_size": job.work.batch, "seed": config.seed, "dtype": config.dtype}
        limits = {"steps_per_epoch": config.steps_per_epoch, "drop_last": config.drop_last}
        with (
            Loader(train, **same, **limits, **changes_of(config)) as loader,
            Loader(test, **same, shuffle=False) as tests,
        ):
            for epoch in range(config.epochs):
                twin.train()
                for x, y in tensors(loader, epoch):
                    scores = net(x).flatten(0, -2)
                    cross_entropy(scores, y, label_smoothing=config.label_smoothing).backward()
                    update.step()
                begin = time.perf_counter()
                twin.eval()
                mean = any(callback.means(epoch, config.epochs) for callback in mirrored)
                with torch.no_grad():
                    found = []
                    for x, y in tensors(tests, 0):
                        scores = twin(x)
                        for view in views(np, to_ours(x), config.moved) if mean else ():
                            scores += twin(to_torch(view))
                        found.append(scores.flatten(0, -2).argmax(1) == y)
                evaluations += time.perf_counter() - begin
                self.told(evaluations, float(torch.cat(found).double().mean()))


def tensors(loader: Loader, epoch: int) -> Iterator[tuple[Any, Any]]:
    """Yield the batches of an epoch as tensors; targets are flat."""
    import torch

    from benchmarks.common.torch_twin import to_torch

    for batch in loader.epoch(epoch):
        yield to_torch(batch.x), torch.from_numpy(batch.y).long().flatten()


class Update:
    """The update of a job's optimizer, SGD or Muon, in PyTorch.

    Parameters
    ----------
    job : Job
    twin : Twin
        With the parameters of its model.
    """

    def __init__(self, job: Job, twin: Any) -> None:
        import torch

        from benchmarks.common.torch_twin import pairs

        self.rule, self.steps = job.trainer.optimizer, 0
        entries = {e.name: e for bucket in job.trainer.model.buckets for e in bucket.parameters}
        self.matrices, rest = list[dict[str, Any]](), list[dict[str, Any]]()
        for layer, module in zip(twin.layers, twin.steps, strict=True):
            for p, tensor in pairs(layer, module):
                if (entry := entries.get(p.name)) is None:
                    tensor.requires_grad_(False)  # it is frozen
                    continue
                own = self.rule.groups.of(p.name, self.rule.weight_decay if entry.decay else 0.0)
                group = {"params": [tensor], "weight_decay": own.weight_decay}
                matrix = self.rule.terms_of(entry).get("matrices") is not None
                (self.matrices if matrix else rest).append(group | {"factor": own.lr_factor})
        self.velocities = [torch.zeros_like(group["params"][0]) for group in self.matrices]
        if type(self.rule) is Muon:
            betas = (self.rule.beta1, self.rule.beta2)
            self.other: Any = torch.optim.AdamW(rest, betas=betas, eps=self.rule.epsilon)
        elif type(self.rule) is SGD:
            momentum = {"momentum": self.rule.momentum, "nesterov": self.rule.nesterov}
            self.other = torch.optim.SGD(rest, **momentum)
        else:
            raise ValueError(f"PyTorch's side knows SGD and Muon, not {type(self.rule).__name__}")

    def step(self) -> None:
        """Update all parameters, and forget their gradients."""
        import torch

        lr, self.steps = self.rule.schedule(self.steps), self.steps + 1
        for group in self.other.param_groups:
            group["lr"] = lr * group["factor"] * getattr(self.rule, "adamw_lr_factor", 1.0)
        self.other.step()
        self.other.zero_grad()
        with torch.no_grad():
            for group, velocity in zip(self.matrices, self.velocities, strict=True):
                (p,), own = group["params"], lr * group["factor"]
                velocity.mul_(self.rule.momentum).add_(p.grad)
                ahead = p.grad.add(velocity, alpha=self.rule.momentum)
                u = orthogonal(ahead if self.rule.nesterov else velocity, self.rule.steps)
                p.mul_(1 - own * group["weight_decay"]).sub_(u, alpha=own)
                p.grad = None


def orthogonal(u: Any, steps: int) -> Any:
    """Orthogonalise a gradient as `pydtnn.optimizers.muon` does, with the factor of its step."""
    filters = u.movedim(1, -1)
    matrix = filters.reshape(len(u), -1)
    x = matrix.T if len(matrix) > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x.T if len(matrix) > matrix.shape[1] else x
    return (0.2 * max(matrix.shape) ** 0.5 * x).reshape(filters.shape).movedim(-1, 1)


def create_side(side: str, options: Sequence[str], seed: int) -> Ours:
    """Make a side."""
    return Ours(options, seed) if side == "ours" else Theirs(options, seed, side == "compiled")


def train_seed(options: Sequence[str], sides: Sequence[str], seed: int, epochs: int) -> Any:
    """Train all sides alternately; return seconds and accuracy of each epoch, by side."""
    running = {side: Side(["benchmarks.time_to_accuracy", "--serve"]) for side in sides}
    for side, process in running.items():
        process.begin(side, options, seed)
    for _ in range(epochs):
        for process in running.values():
            process.turn(1, EPOCH_TIMEOUT_S)
    found = {side: process.end()["memory"] for side, process in running.items()}
    for process in running.values():
        process.close()
    return found


def until(epochs: Iterable[tuple[float, float]], target: float) -> float:
    """Return the seconds until an accuracy is reached; infinity if it is not.

    >>> until([(1.0, 0.5), (2.0, 0.9)], 0.9)
    3.0
    """
    passed = 0.0
    for seconds, accuracy in epochs:
        passed += seconds
        if accuracy >= target:
            return passed
    return math.inf


def between(values: Sequence[float]) -> str:
    """Format the median of numbers to three digits, with the least and the largest.

    >>> between([885.2, 2079.6, 900.0])
    '900 [885, 2080]'
    """
    three = statistics.median(values), min(values), max(values)
    digits = [f"{float(f'{value:.3g}'):g}" for value in three]
    return f"{digits[0]} [{digits[1]}, {digits[2]}]" if len(values) > 1 else digits[0]


def table(report: Report, seeds: Sequence[Any], target: float) -> None:
    """Print the accuracies and times of all seeds."""
    title = ("accuracy %", "seconds", f"seconds to {target:.2%}", "times ours")
    report.line(f"{'side':9} {'seeds':>5}" + "".join(f"{name:>26}" for name in title))
    for side in [side for side in SIDES if side in seeds[0]]:
        last = [100 * seed[side][-1][1] for seed in seeds]
        error = f" +- {statistics.stdev(last) / len(last) ** 0.5:.2f}" if len(last) > 1 else ""
        seconds = [sum(s for s, _ in seed[side]) for seed in seeds]
        cells = [f"{statistics.mean(last):.2f}{error}", between(seconds)]
        cells.append(between([until(seed[side], target) for seed in seeds]))
        if "ours" in seeds[0]:
            both = zip(seconds, seeds, strict=True)
            cells.append(
                between([theirs / sum(s for s, _ in seed["ours"]) for theirs, seed in both])
            )
        report.line(f"{side:9} {len(seeds):5}" + "".join(f"{cell:>26}" for cell in cells))


def draw(path: Path, recipe: str, seeds: Sequence[Any], target: float) -> None:
    """Draw the accuracy over the seconds: the median of the seeds, and each of them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4))
    for number, side in enumerate(side for side in SIDES if side in seeds[0]):
        curves = np.array([seed[side] for seed in seeds])  # (seed, epoch, 2)
        times, color = curves[..., 0].cumsum(axis=1), f"C{number}"
        for x, y in zip(times, curves[..., 1], strict=True):
            axis.plot(x, 100 * y, color=color, alpha=0.3, linewidth=1)
        middle = np.median(times, axis=0), 100 * np.median(curves[..., 1], axis=0)
        label = "pydtnn" if side == "ours" else f"PyTorch {side}"
        axis.plot(*middle, "o-", color=color, label=label)
    axis.axhline(100 * target, color="k", linestyle=":")
    axis.set(title=recipe, xlabel="seconds of training", ylabel="test accuracy, %")
    axis.legend()
    axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train the seeds that are missing, print and draw all."""
    if sys.argv[1:] == ["--serve"]:
        serve(create_side)
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES[: 1 + WITH_TORCH])
    parser.add_argument("--target", type=float, help="accuracy in %%; by default that of the name")
    parser.add_argument("--results", type=Path, help="file that keeps complete seeds, JSON lines")
    parser.add_argument("--output", type=Path, help="file that receives the table, too")
    parser.add_argument("--figure", type=Path, help="PNG to draw; needs matplotlib")
    given, others = parser.parse_known_args()
    options, sides = ["--recipe", given.recipe, *others], [*given.sides]
    values, usual = dataclasses.asdict(parse(options)), dataclasses.asdict(TrainConfig())
    chosen = {name: v for name, v in values.items() if v != usual[name] and name != "seed"}
    key = json.dumps([chosen, sorted(sides)], sort_keys=True, default=str)
    target = (given.target or float(given.recipe.rpartition("-")[2])) / 100
    report, found = Report(given.output), {}
    if given.results and given.results.exists():
        rows = map(json.loads, given.results.read_text().splitlines())
        found = {row["seed"]: row for row in rows if row["key"] == key}
    for seed in [seed for seed in range(given.seeds) if seed not in found]:
        found[seed] = {"key": key, "seed": seed}
        found[seed] |= train_seed(options, sides, seed, values["epochs"])
        if given.results:
            with given.results.open("a") as file:
                file.write(json.dumps(found[seed]) + "\n")
    table(report, [*found.values()], target)
    if given.figure:
        draw(given.figure, given.recipe, [*found.values()], target)


if __name__ == "__main__":
    main()
