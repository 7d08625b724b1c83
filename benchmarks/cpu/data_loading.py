"""How fast batches are made, beside what a model eats: one thread, one rank, no prefetching.

    python -m benchmarks.cpu.data_loading                  # synthetic data
    python -m benchmarks.cpu.data_loading --cifar10        # and CIFAR-10 from $PYDTNN_DATA
    python -m benchmarks.cpu.data_loading --batch 2048

Each row is a stage added to the one before: reading, normalising, crop and flip; the rows below add
one stage each to these. The raw row is what is left of all of them where a device augments and
normalises: reading, and drawing random words. Columns: microseconds per image and images per
second, least and median of batches.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from typing import Any

from pydtnn.data import (
    ColorJitter,
    Cutout,
    Dataset,
    HorizontalFlip,
    Loader,
    Mixup,
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomResizedCrop,
    load_dataset,
)

CROP_FLIP = (RandomCrop(4), HorizontalFlip())
STAGES: dict[str, dict[str, Any]] = {
    "raw": {"raw": True, "augment": CROP_FLIP},
    "read and normalise": {},
    "and crop and flip": {"augment": CROP_FLIP},
    "  cutout": {"augment": (*CROP_FLIP, Cutout(8))},
    "  erasing": {"augment": (*CROP_FLIP, RandomErasing())},
    "  resized crop": {"augment": (*CROP_FLIP, RandomResizedCrop())},
    "  jitter": {"augment": (*CROP_FLIP, ColorJitter())},
    "  RandAugment": {"augment": (*CROP_FLIP, RandAugment())},
    "  mixup": {"augment": CROP_FLIP, "mix": [Mixup()]},
}


def seconds_per_batch(loader: Loader) -> list[float]:
    """Time each batch of an epoch but the last, which is smaller."""
    times = []
    batches = loader.epoch(0)
    for _ in range(len(loader) - 1):
        start = time.perf_counter()
        next(batches)
        times.append(time.perf_counter() - start)
    return times


def measure(name: str, data: Dataset, batch: int) -> None:
    """Print the table of one data set."""
    start = time.perf_counter()
    assert data.mean is not None
    print(f"{name}: mean and deviation of the training set in {time.perf_counter() - start:.3f} s")
    for stage, options in STAGES.items():
        loader = Loader(data, global_batch_size=batch, prefetch=0, **options)
        times = [t / batch for t in seconds_per_batch(loader)]
        least, median = min(times), statistics.median(times)
        print(
            f"  {stage:20} {1e6 * least:7.1f} {1e6 * median:7.1f} us/image"
            f" {1 / least:10,.0f} {1 / median:10,.0f} images/s"
        )


def main() -> None:
    """Measure the synthetic data and, if asked for, CIFAR-10."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cifar10", action="store_true", help="from --data-dir or $PYDTNN_DATA")
    parser.add_argument("--data-dir")
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    print(f"{machine}, batches of {args.batch}, 1 thread")
    measure("synthetic", load_dataset("synthetic")[0], args.batch)
    if args.cifar10:
        measure("cifar10", load_dataset("cifar10", data_dir=args.data_dir)[0], args.batch)


if __name__ == "__main__":
    main()
