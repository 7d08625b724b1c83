"""Peaks of compute and memory, Python's time per step, the loader and the disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pydtnn.comm import Serial
from pydtnn.data.array import ArrayDataset
from pydtnn.data.loader import Loader
from pydtnn.kernels import Backend
from pydtnn.kernels.limits import COPIED, SIDE
from pydtnn.perfmodel.calibration.sample import Sample, processor_clock, sample
from pydtnn.perfmodel.workload import Rank, Workload
from pydtnn.utils.files import unwritable, write_through

WRITTEN = 32 << 20
"""Bytes of the file that measures the disk."""

IMAGES = ((32, 512), (160, 48))
"""Sizes of square colour images, and samples in a batch, that measure the loader."""


def product(backend: Backend, dtype: str, together: Callable[[], object]) -> Sample:
    """Time a product of matrices of `SIDE` rows and columns."""
    a, b, c = (np.ones((SIDE, SIDE), dtype) for _ in range(3))
    return sample(
        f"matrix product ({dtype})",
        lambda: backend.linear.forward(a, b, None, out=c),
        together=together,
        clock=processor_clock(backend.threads),
    )


def copy(backend: Backend, together: Callable[[], object] = lambda: None) -> Sample:
    """Time a copy of `COPIED` bytes, which reads and writes as many."""
    x = np.ones(COPIED // 4, "float32")
    y = np.empty_like(x)
    return sample(
        "copy in memory",
        lambda: backend.elementwise.forward("relu", x, out=y),
        together=together,
        clock=processor_clock(backend.threads),
    )


def step(threads: int) -> Sample:
    """Time steps of a network so small that only Python takes time."""
    rank = Rank(Workload("mlp", (2, 2, 1), batch=4, threads=threads), Serial())
    return sample(
        "step in Python",
        lambda: rank.trainer.train_step(rank.batch),
        repeats=60,
        clock=processor_clock(threads),
    )


def nodes(threads: int) -> int:
    """Return the number of layers of the network of `step`."""
    rank = Rank(Workload("mlp", (2, 2, 1), batch=4, threads=threads), Serial())
    return len(rank.trainer.model.graph.nodes) - 1


def loader() -> tuple[Sample, ...]:
    """Time the preparation of batches of images of two sizes, without augmentation."""
    return tuple(_load(size, samples) for size, samples in IMAGES)


def _load(size: int, samples: int) -> Sample:
    images = np.zeros((samples, size, size, 3), "uint8")
    data = ArrayDataset(images, np.zeros(samples, "int64"))
    batches = Loader(data, global_batch_size=samples, prefetch=0)
    return sample(f"loader ({size} x {size})", lambda: list(batches.epoch(0)), repeats=5)


def loader_rates(samples: tuple[Sample, ...]) -> tuple[float, float]:
    """Return the time per sample, in s, and the rate of its values as float32, in B/s."""
    (small, few), (large, many) = (
        (4 * 3 * size * size, own.shortest / n)
        for (size, n), own in zip(IMAGES, samples, strict=True)
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
