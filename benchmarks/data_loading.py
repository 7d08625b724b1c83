"""How fast batches are made, beside what a model eats: one thread, one rank, no prefetching.

    python benchmarks/data_loading.py                  # synthetic data
    python benchmarks/data_loading.py --cifar10        # and CIFAR-10 from $PYDTNN_DATA

Each row is a stage added to the one before: reading, normalising, crop and flip, cutout. Columns:
microseconds per image and images per second, least and median of the batches of 64 images.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time

from pydtnn.data import Cutout, Dataset, HorizontalFlip, Loader, RandomCrop, load_dataset

BATCH = 64
STAGES = {
    "read and normalise": (),
    "and crop and flip": (RandomCrop(4), HorizontalFlip()),
    "and cutout": (RandomCrop(4), HorizontalFlip(), Cutout(8)),
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


def measure(name: str, data: Dataset) -> None:
    """Print the table of one data set."""
    start = time.perf_counter()
    assert data.mean is not None
    print(f"{name}: mean and deviation of the training set in {time.perf_counter() - start:.3f} s")
    for stage, augment in STAGES.items():
        loader = Loader(data, global_batch_size=BATCH, augment=augment, prefetch=0)
        times = [t / BATCH for t in seconds_per_batch(loader)]
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
    args = parser.parse_args()
    print(f"{platform.machine()}, Python {platform.python_version()}, batches of {BATCH}, 1 thread")
    measure("synthetic", load_dataset("synthetic")[0])
    if args.cifar10:
        measure("cifar10", load_dataset("cifar10", data_dir=args.data_dir)[0])


if __name__ == "__main__":
    main()
