"""Share of flipped bits that verified steps find, false alarms, and cost (`Verification`).

    python -m benchmarks.cpu.silent_errors --flips 200 --steps 10000

Ranks are threads of this process. In each of the runs with a flip, of 20 steps, one bit flips in
the result of a product, the output of a layer, a parameter, or the samples that a rank receives, at
a random step; messages are sent in verified steps only. A flip *counts* if the hashes of gradients
in a verified step are not those of the run without it; after a step that is not verified
(`outside`), which changes the parameters of all ranks, if hashes of ranks for the same samples
differ. It is *found* if the check says so in the first such step, and *named* if it names this rank
and no other; flipped parameters are *undecided* on two ranks, of which both are named.

`steps` are verified in runs without flips, by networks, ranks and threads, with `alarms`. The cost
is the time of the processor in the threads of two ranks, compared with that of runs without the
check: the least of 25 each, in turns.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.report import Report
from pydtnn import ArrayDataset, Model, Trainer
from pydtnn.callbacks import Callback
from pydtnn.comm import Communicator, run_threads
from pydtnn.kernels import create_backend
from pydtnn.layers import (
    BatchNorm,
    Conv2d,
    Dropout,
    Flatten,
    LayerNorm,
    Linear,
    MultiHeadAttention,
    ReLU,
    Residual,
    Sequential,
)
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce
from pydtnn.tools import verification
from pydtnn.tools.testing.flips import Flip, Flips
from pydtnn.tools.verification import Verification
from pydtnn.training.nonfinite import NotFiniteError
from pydtnn.utils.errors import AgreedError

STEPS, CLASSES = 20, 4
KINDS = ("product", "output", "parameter", "message")


def images() -> Sequential:
    """Return a network with batch norm and dropout."""
    block = Residual(Sequential(Conv2d(8, 3, padding="same"), BatchNorm(), ReLU()))
    layers = Conv2d(8, 3), BatchNorm(), ReLU(), block, Dropout(0.2), Flatten(), Linear(CLASSES)
    return Sequential(*layers)


def matrices() -> Sequential:
    """Return a network of matrices."""
    return Sequential(Flatten(), Linear(32), ReLU(), Dropout(0.5), Linear(CLASSES))


def sequences() -> Sequential:
    """Return a network with attention."""
    attention = Residual(Sequential(LayerNorm(), MultiHeadAttention(2)))
    return Sequential(Linear(16), attention, LayerNorm(), Flatten(), Linear(CLASSES))


NETWORKS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "images": (images, (8, 8, 3)),
    "matrices": (matrices, (6, 6, 1)),
    "sequences": (sequences, (12, 8)),
}

LARGE = {"large": (images, (32, 32, 16))}
"""What is computed while the cost is measured: other times of a step are small beside it."""


@cache
def data(shape: tuple[int, ...], samples: int) -> ArrayDataset:
    """Return random samples."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(samples, *shape)).astype("f4")
    return ArrayDataset(x, rng.integers(0, CLASSES, samples), classes=CLASSES)


class Noted(Verification):
    """The check, with the hashes of each verified step as they were computed first."""

    def __init__(self, every: int) -> None:
        super().__init__(every)
        self.hashes: dict[int, Any] = {}


def note(compare: Any) -> Any:
    """Return the comparison of a step, whose hashes are kept."""

    def noted(self: Any, distances: Any, *, repeated: bool) -> Any:
        own = compare(self, distances, repeated=repeated)
        if not repeated and isinstance(self._check, Noted):
            step = self.setup.optimizer.iterations
            self._check.hashes[step] = [[vote[:2] for vote in votes] for votes in self._votes]
        return own

    return noted


verification.VerifiedPasses._compare = note(verification.VerifiedPasses._compare)  # type: ignore[method-assign]


def train(
    comm: Communicator, name: str, threads: int, steps: int, seed: int, *callbacks: Callback
) -> None:
    """Train a network."""
    net, shape = (NETWORKS | LARGE)[name]
    backend = create_backend(threads=threads, tuning="fixed")
    model = Model(net(), shape, backend=backend, seed=seed)
    exchange = AllReduce(comm)
    optimizer = SGD(0.05, momentum=0.9)
    options: dict[str, Any] = {"callbacks": callbacks, "progress": False, "check_equal": 0}
    trainer = Trainer(model, optimizer, exchange=exchange, **options)
    trainer.fit(data(shape, 8 * steps * comm.size), batch_size=8, seed=seed)


def disturbed(comm: Communicator, name: str, every: int, flips: list[Flip]) -> tuple[Any, ...]:
    """Train with flips; return hashes, what has been found, flips and calls of each step."""
    check, injected = Noted(every), Flips(flips)
    calls: list[Counter[str]] = []

    class Calls(Callback):
        reads_gradients = False

        def on_step_end(self, trainer: Any) -> None:
            calls.append(Counter(injected.calls))

    try:
        train(comm, name, 1, STEPS, 0, check, injected, Calls())
    except AgreedError as error:  # a loss may not be finite after a step that is not verified
        if not (check.found or isinstance(error, NotFiniteError)):
            raise
    return check.hashes, check.found, injected.applied, calls


def study(every: int, flips: int, report: Report) -> None:
    """Print a row for each kind of flips."""
    rng, clean = random.Random(every), {}
    rows = {kind: Counter[str]() for kind in KINDS}
    for number in range(flips):
        kind, name, ranks = (
            KINDS[number % len(KINDS)],
            rng.choice([*NETWORKS]),
            rng.choice([2, 3, 4]),
        )
        if (name, ranks) not in clean:
            never = [Flip(kind, 0, -1, 0, 0, 0) for kind in KINDS]
            clean[name, ranks] = run_threads(ranks, disturbed, name, every, never)
        rank, step = rng.randrange(ranks), rng.randrange(STEPS)
        if kind == "message":  # which are sent in verified steps only
            step -= (step + 1) % every
            step += every * (step < 0)
        calls = clean[name, ranks][rank][3][step][kind]
        place = rng.randrange(max(calls, 1)), rng.randrange(1 << 20), rng.randrange(64)
        flip = Flip(kind, rank, step, *place)
        results = run_threads(ranks, disturbed, name, every, [flip])
        hashes, found, _, _ = results[0]
        expected, row = clean[name, ranks][0][0], rows[kind]
        applied = results[rank][2] == [flip]
        row["flips"] += applied
        differ = [s for s in sorted(hashes) if hashes[s] != expected[s]]
        own = [s for s in differ if any(len({v for _, v in votes}) > 1 for votes in hashes[s])]
        if (step + 1) % every != 0:
            row["outside"] += applied
            differ = own
        if not applied or not differ:
            assert not found, (flip, found)
            continue
        row["count"] += 1
        row["found"] += bool(found) and bool(own) and found[0].step == differ[0]
        row["named"] += bool(found) and found[0].ranks == (rank,)
        row["undecided"] += bool(found) and found[0].kind == "undecided" and ranks == 2
    for kind, row in rows.items():
        words = "".join(f"{row[key]:11}" for key in ("flips", "outside", "count", "found", "named"))
        report.line(f"{every:5} {kind:10}{words}{row['undecided']:11}")


def alarms(steps: int, report: Report) -> None:
    """Print a row for each network, number of ranks and threads."""
    cases = [(n, r, t) for n in NETWORKS for r, t in ((2, 1), (2, 2), (3, 1), (4, 2))]
    own = -(-steps // len(cases))
    for name, ranks, threads in cases:
        verified, found = run_threads(ranks, undisturbed, name, threads, own)[0]
        report.line(f"{name:10}{ranks:6}{threads:8}{verified:8}{found:8}")


def undisturbed(comm: Communicator, name: str, threads: int, steps: int) -> tuple[int, int]:
    """Train without flips; return how many steps were verified, and differed."""
    check = Verification(every=1)
    train(comm, name, threads, steps, 1, check)
    return check.steps, len(check.found)


def cost(every: list[int], report: Report, turns: int) -> None:
    """Print the time of the processor for each interval, in turns."""

    def rank(comm: Communicator, interval: int) -> float:
        checks = [Verification(interval)] if interval else []
        begin = time.thread_time()
        train(comm, "large", 1, 20, 0, *checks)
        return time.thread_time() - begin

    def run(interval: int) -> float:
        return sum(run_threads(2, rank, interval))

    times: dict[int, list[float]] = {interval: [] for interval in (0, *every)}
    for _ in range(turns):
        for interval, measured in times.items():
            measured.append(run(interval))
    for interval in every:
        share = 100 * (min(times[interval]) / min(times[0]) - 1)
        report.line(f"{interval:5}{share:8.1f} %{100 / interval:12.1f} %")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--flips", type=int, default=200, help="for each interval")
    parser.add_argument("--steps", type=int, default=10_000, help="without flips")
    parser.add_argument("--every", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--turns", type=int, default=25, help="runs that the cost is the least of")
    parser.add_argument("--output", type=Path, help="file that receives the tables, too")
    args = parser.parse_args()
    report = Report(args.output)
    heading = ("flips", "outside", "count", "found", "named", "undecided")
    report.line(f"every kind      {''.join(f'{word:>11}' for word in heading)}")
    for every in args.every:
        study(every, args.flips, report)
    report.line(f"\n{'network':10}{'ranks':>6}{'threads':>8}{'steps':>8}{'alarms':>8}")
    alarms(args.steps, report)
    report.line(f"\nevery{'cost':>10}{'1 / every':>14}")
    cost(args.every, report, args.turns)


if __name__ == "__main__":
    main()
