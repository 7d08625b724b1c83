"""Peaks of compute and memory, Python's time per step, the loader and the disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from pydtnn.comm import Serial
from pydtnn.data.array import ArrayDataset
from pydtnn.data.loader import Loader
from pydtnn.kernels import Backend
from pydtnn.layers import BatchNorm, Conv2d, GlobalAvgPool2d, Linear, ReLU, Sequential
from pydtnn.tools.perfmodel.calibration.sample import Sample, sample
from pydtnn.tools.perfmodel.workload_rank import WorkloadRank
from pydtnn.tools.tracing.kernels import COPIED, SIDE
from pydtnn.training.workload import Workload
from pydtnn.utils.files import unwritable, write_through

WRITTEN = 32 << 20
"""Bytes of the file that measures the disk."""

DEPTHS = (2, 22)
"""Blocks of the networks that measure Python."""

IMAGES = ((32, 512), (160, 48))
"""Sizes of square colour images, and samples in a batch, that measure the loader."""


def product(
    backend: Backend, dtype: str, together: Callable[[], object], now: Callable[[], float]
) -> Sample:
    """Time a product of matrices of `SIDE` rows and columns."""
    a, b, c = (np.ones((SIDE, SIDE), dtype) for _ in range(3))
    return sample(
        f"matrix product ({dtype})",
        lambda: backend.linear.forward(a, b, None, out=c),
        together=together,
        clock=now,
    )


def copy(
    backend: Backend, now: Callable[[], float], together: Callable[[], object] = lambda: None
) -> Sample:
    """Time a copy of `COPIED` bytes, which reads and writes as many."""
    x = np.ones(COPIED // 4, "float32")
    y = np.empty_like(x)
    return sample(
        "copy in memory",
        lambda: backend.elementwise.forward("relu", x, out=y),
        together=together,
        clock=now,
    )


def python(threads: int, now: Callable[[], float]) -> tuple[Sample, ...]:
    """Time steps of two networks of few elements, for which Python takes the time.

    Returns
    -------
    tuple of Sample
        For the networks of `DEPTHS`.
    """
    found = []
    for depth in DEPTHS:
        rank = WorkloadRank(
            Workload(partial(_tiny, depth), (2, 2, 4), batch=1, threads=threads), Serial()
        )
        step = partial(rank.trainer.train_step, rank.batch)
        found.append(sample(f"Python in {depth} blocks", step, 40, clock=now, limit=0.5))
    return tuple(found)


def python_times(samples: tuple[Sample, ...]) -> tuple[float, float]:
    """Return the time of Python per pass of a layer and that per step besides, in s."""
    short, long = (sorted(own.times)[len(own.times) // 4] for own in samples)
    passes = [2 * (2 * depth + 2) for depth in DEPTHS]
    call = max(long - short, 0.0) / (passes[1] - passes[0])
    return call, max(short - passes[0] * call, 0.0)


def _tiny(depth: int, classes: int, shape: tuple[int, ...]) -> Sequential:
    """Return a network of two layers for each block, after fusion, and two more."""
    blocks = [
        part for _ in range(depth) for part in (Conv2d(4, 1, bias=False), BatchNorm(), ReLU())
    ]
    return Sequential(*blocks, GlobalAvgPool2d(), Linear(classes))


def _load(size: int, samples: int) -> float:
    """Return the time to prepare a sample of images of a size, without augmentation, in s."""
    images = np.zeros((samples, size, size, 3), "uint8")
    data = ArrayDataset(images, np.zeros(samples, "int64"))
    batches = Loader(data, global_batch_size=samples, prefetch=0)
    return sample("loader", lambda: list(batches.epoch(0)), repeats=5).shortest / samples


def loader_rates() -> tuple[float, float]:
    """Return the time per sample, in s, and the rate of its values as float32, in B/s."""
    (small, few), (large, many) = (
        (4 * 3 * size * size, _load(size, samples)) for size, samples in IMAGES
    )
    rate = (large - small) / max(many - few, 1e-9)
    return max(few - small / rate, 0.0), rate


def disk(folder: Path) -> Sample:
    """Time the writing of a file of `WRITTEN` bytes, flushed to disk, in a folder.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    data = os.urandom(WRITTEN)

    def write() -> None:
        path.unlink(missing_ok=True)
        write_through(path, data)

    try:
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            path = Path(temporary) / "calibration"
            return sample("disk", write, repeats=3)
    except OSError as error:
        raise unwritable("calibrate", folder, error) from error


def memory() -> float:
    """Return the physical memory of the host, in B."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
