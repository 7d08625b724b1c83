"""How fast JPEGs are decoded from a folder and from shards, beside PyTorch's DataLoader.

    python -m benchmarks.cpu.image_loading
    python -m benchmarks.cpu.image_loading --train resnet18 mobilenet_v2 --keep 1GiB
    python -m benchmarks.cpu.image_loading --images 2000 --side 1000 --workers 4
    python -m benchmarks.cpu.image_loading --cifar10 DATA --size 32 --batch 128 --turns 3

Images are random fields of a few frequencies with noise, which compress like photographs, or the
60,000 of CIFAR-10 as JPEG files. Workers are threads here and processes there; both decode, resize
and crop with the same function, and normalise to float32. An epoch of each variant, with the start
of its workers, takes its turn. Columns: images per second, median and greatest of the turns, and
the ratio of the medians to PyTorch with as many workers. The line above them is the comparison of
the shards with their checksums, once before training. Files are in the page cache: this measures
decoding, not a disk.

With ``--train``: whole training beside its steps alone, images per second; "processor" is the ratio
of the images per second of processor time of all threads, which other processes hardly disturb.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.common.report import WITH_TORCH, Report
from benchmarks.common.work import WORK, create_trainer
from pydtnn.data import Dataset, Loader, load_dataset, load_folder, load_shards, pack_shards
from pydtnn.data.loader import Batch
from pydtnn.kernels import create_backend
from pydtnn.training.trainer import Trainer

if WITH_TORCH:
    import torch

CLASSES = 4
MEAN, STD = [0.5] * 3, [0.25] * 3


def write_images(folder: Path, images: int, side: int) -> None:
    """Write training images, and one test image."""
    rng = np.random.default_rng(0)
    axis = np.linspace(0, 2 * np.pi, side)
    for number in range(images + 1):
        pixels = 128 + rng.normal(scale=6, size=(side, side, 3))
        for frequency in range(1, 9):
            rows, columns = (np.sin(frequency * axis + phase) for phase in rng.uniform(0, 7, 2))
            pixels += 50 / frequency * np.outer(rows, columns)[..., None] * rng.normal(size=3)
        part = "train" if number < images else "val"
        path = folder / part / str(number % CLASSES) / f"{number}.jpg"
        save(pixels.clip(0, 255).astype(np.uint8), path)


def write_cifar10(folder: Path, data_dir: str) -> None:
    """Write CIFAR-10, of which the test set is the part for validation."""
    for part, data in zip(
        ("train", "val"), load_dataset("cifar10", data_dir=data_dir), strict=True
    ):
        for number in range(len(data)):
            (pixels,), (y,) = data.read(np.array([number]))
            save(pixels, folder / part / str(y) / f"{number}.jpg")


def save(pixels: np.ndarray, path: Path) -> None:
    """Write one image, and its folder if it does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, quality=90)


def ours(data: Dataset, batch: int, workers: int) -> int:
    """Load an epoch; return the number of images."""
    options: dict[str, Any] = {"threads": workers, "prefetch": 2 * workers}
    with Loader(data, global_batch_size=batch, **options) as loader:
        return sum(len(batch.x) for batch in loader.epoch(0))


class Map:
    """A data set for PyTorch: one sample by its index."""

    def __init__(self, data: Dataset) -> None:
        self.data = data
        self.mean, self.std = (torch.tensor(values).reshape(3, 1, 1) for values in (MEAN, STD))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        x, y = self.data.read(np.array([index]))
        pixels = torch.from_numpy(x[0]).permute(2, 0, 1)
        return (pixels.float() / 255 - self.mean) / self.std, int(y[0])


def theirs(data: Dataset, batch: int, workers: int) -> int:
    """Load an epoch with PyTorch; return the number of images."""
    loader = torch.utils.data.DataLoader(
        Map(data), batch_size=batch, shuffle=True, num_workers=workers
    )
    return sum(len(x) for x, _ in loader)


def rate(load: Callable[[], int]) -> float:
    """Images per second of an epoch, the start of workers included."""
    return rates(load)[0]


def rates(load: Callable[[], int]) -> tuple[float, float]:
    """Images per second, and per second of processor time of all threads."""
    start, used = time.perf_counter(), time.process_time()
    images = load()
    return images / (time.perf_counter() - start), images / (time.process_time() - used)


def measure(report: Report, folder: Path, args: argparse.Namespace) -> None:
    """Print a row for each number of workers and each source."""
    images, shards = folder / "images", folder / "shards"
    if args.cifar10:
        write_cifar10(images, args.cifar10)
    else:
        write_images(images, args.images, args.side)
    begin = time.perf_counter()
    pack_shards(images, shards)
    seconds = time.perf_counter() - begin
    options: dict[str, Any] = {"image_size": args.size, "mean": MEAN, "std": STD}
    sources = {
        "folder": load_folder(data_dir=images, **options)[0],
        "shards": load_shards(data_dir=shards, **options)[0],
    }
    sizes = [path.stat().st_size for path in images.glob("*/*/*")]
    report.line(
        f"{len(sizes)} JPEGs, {statistics.mean(sizes) / 1e3:.1f} kB each, packed in {seconds:.1f} s"
    )
    checks = []
    for _ in range(args.turns):
        begin = time.perf_counter()
        for _ in sources["shards"].verify(0, 1):
            pass
        checks.append(time.perf_counter() - begin)
    sources["shards"].verified = True
    report.line(
        f"shards compared with their checksums: {len(sizes) / statistics.median(checks):.0f} "
        f"images/s, {sum(sizes) / statistics.median(checks) / 1e6:.0f} MB/s, by one thread"
    )
    report.line(f"{'source':12}{'workers':>8}{'images/s':>10}{'greatest':>10}{'ratio':>8}")
    for workers in range(1, args.workers + 1):
        sides: dict[str, Callable[[], int]] = {
            name: partial(ours, data, args.batch, workers) for name, data in sources.items()
        }
        if WITH_TORCH:
            sides["PyTorch"] = partial(theirs, sources["folder"], args.batch, workers)
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(args.turns):
            for name, load in sides.items():
                rates[name].append(rate(load))
        medians = {name: statistics.median(found) for name, found in rates.items()}
        for name, median in medians.items():
            ratio = f"{median / medians['PyTorch']:8.2f}" if WITH_TORCH else ""
            report.line(f"{name:12}{workers:8}{median:10.0f}{max(rates[name]):10.0f}{ratio}")


def whole_epoch(trainer: Trainer, data: Dataset, batch: int) -> int:
    """Train an epoch of whole batches; return the number of images."""
    trainer.fit(data, more_epochs=1, global_batch_size=batch, drop_last=True)
    return len(data) // batch * batch


def steps_on(trainer: Trainer, batch: Batch, steps: int) -> int:
    """Make steps on one batch; return the number of images."""
    for _ in range(steps):
        trainer.train_step(batch)
    return steps * len(batch.x)


def train(report: Report, folder: Path, args: argparse.Namespace) -> None:
    """Print a row for each network."""
    write_images(folder / "images", args.images, args.side)
    pack_shards(folder / "images", folder / "shards")
    header = f"{'network':14}{'batch':>6}{'training':>10}{'steps':>8}{'ratio':>8}"
    report.line(f"{args.images} JPEGs of {args.side} x {args.side}, images/s")
    report.line(f"{header}  {'quartiles':14}  processor")
    for name in args.train:
        work = WORK[name]
        options: dict[str, Any] = {"image_size": work.shape[0], "mean": MEAN, "std": STD}
        data = load_shards(data_dir=folder / "shards", keep=args.keep, **options)[0]
        trainer = create_trainer(work, create_backend("cpu", threads=args.threads))
        steps = args.images // work.batch
        with Loader(data, global_batch_size=work.batch) as loader:
            batch = next(iter(loader.epoch(0)))

        fit = partial(whole_epoch, trainer, data, work.batch)
        fit()  # chooses algorithms
        alone = partial(steps_on, trainer, batch, steps)
        turns = np.array([(rates(fit), rates(alone)) for _ in range(args.turns)])
        whole, step = np.median(turns, axis=0)[:, 0]
        quartiles = np.quantile(turns[:, 0] / turns[:, 1], (0.25, 0.5, 0.75), axis=0)
        (low, ratio, high), (_, processor, _) = quartiles.T
        report.line(
            f"{name:14}{work.batch:6}{whole:10.1f}{step:8.1f}{ratio:8.3f}  {low:.3f} to {high:.3f}"
            f"{processor:11.3f}"
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--side", type=int, default=400, help="height and width of the files")
    parser.add_argument("--cifar10", metavar="DATA", help="folder of CIFAR-10, instead of fields")
    parser.add_argument("--size", type=int, default=224, help="height and width of the samples")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--workers", type=int, default=4, help="largest number of workers")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--train", nargs="+", choices=[n for n in WORK if len(WORK[n].shape) == 3])
    parser.add_argument("--keep", default="0 B", help="decoded images in memory, with --train")
    parser.add_argument("--threads", type=int, default=1, help="threads of the kernels in training")
    parser.add_argument("--output", type=Path, help="file that receives the table, too")
    args = parser.parse_args()
    report = Report(args.output)
    with tempfile.TemporaryDirectory() as folder:
        (train if args.train else measure)(report, Path(folder), args)


if __name__ == "__main__":
    main()
