"""A few training steps on a GPU: does anything run, and as one CUDA graph?

The first thing to start on a GPU that nobody has tried, since it takes seconds, and says more than
the failures of a thousand tests. For each dtype it prints the loss of the first and the last step
on one random batch, whether the steps were captured, and which algorithms were refused.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
from work import CIFAR

from pydtnn.data import Batch
from pydtnn.kernels import create_backend
from pydtnn.kernels.cuda.graph import WARM_UP
from pydtnn.kernels.dtypes import DTYPES
from pydtnn.model import Model
from pydtnn.models import create_net
from pydtnn.optimizers import SGD
from pydtnn.trainer import Trainer


def first_steps(model: str, dtype: str, size: int) -> tuple[list[float], str, list[str]]:
    """Train on one batch until steps have been replayed twice.

    Returns
    -------
    losses : list of float
        Of each step.
    graph : str
        See `Trainer.steps`.
    refused : list of str
        What cuDNN was asked for and could not do.
    """
    backend = create_backend("cuda", tuning="fixed")  # to see whether it runs, not how fast
    net = create_net(model, 10, CIFAR)
    trainer = Trainer(Model(net, CIFAR, backend=backend, dtype=dtype), SGD(0.02, momentum=0.9))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((size, *CIFAR)).astype(dtype if dtype == "float64" else "float32")
    batch = Batch(x, rng.integers(10, size=size), np.arange(size), 0, size)
    losses = [trainer.train_step(batch).means()["loss"] for _ in range(WARM_UP + 3)]
    chosen = backend.choices.report().items()
    return losses, trainer.steps.graph, [f"{k}: {v}" for k, v in chosen if "refused" in v]


def arguments() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--size", type=int, default=32, help="of the batch")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    return parser


def main() -> None:
    """Print a line per dtype."""
    given, failed = arguments().parse_args(), False
    for dtype in given.dtypes:
        try:
            losses, graph, refused = first_steps(given.model, dtype, given.size)
        except Exception as error:  # the other types may well run
            failed = True
            print(f"{dtype:<9} FAILED: {type(error).__name__}: {error}", flush=True)
            continue
        failed |= losses[-1] >= losses[0]
        print(f"{dtype:<9} loss {losses[0]:.4f} -> {losses[-1]:.4f}, {graph}", *refused, sep="\n  ")
    sys.exit(failed)


if __name__ == "__main__":
    main()
