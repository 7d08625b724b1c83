"""How fast ranks read images from one disk: files of a folder, shards, and a copy of the shards.

    mpirun -np 4 python -m benchmarks.comm.reading
    mpirun -np 2 python -m benchmarks.comm.reading --cifar10 DATA --size 32 --folder /scratch/x

Rank 0 writes the images and packs them. Then all ranks load an epoch of their parts at the same
time, from files that are not in the page cache ("cold") and again ("warm"). "copy" is what
is done once for a disk of each host: one process copies the shards. Columns: images per second of
all ranks together, MB per second of the disk, and bytes that were read from it relative to the size
of the files. Files on a file system without a disk, such as tmpfs, always are in memory: the last
column is 0.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.report import Report
from benchmarks.cpu.image_loading import MEAN, STD, write_cifar10, write_images
from pydtnn.comm import Communicator, create_communicator
from pydtnn.comm.agree import on_rank_0
from pydtnn.data import Dataset, Loader, load_folder, load_shards, pack_shards


class Timed(NamedTuple):
    """Time in s, and bytes that all ranks read from disks."""

    seconds: float
    nbytes: int


def bytes_from_disk() -> int:
    """Return the bytes that this process has caused to be read from disks."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def forget(folders: Iterable[Path]) -> None:
    """Write the files below some folders to the disk, and remove them from the page cache."""
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def timed(comm: Communicator, work: Callable[[], object]) -> Timed:
    """Let all ranks do some work at the same time. Collective."""
    comm.barrier()
    before, begin = bytes_from_disk(), time.perf_counter()
    work()
    took = time.perf_counter() - begin, bytes_from_disk() - before
    seconds, nbytes = zip(*comm.gather_object(took), strict=True)
    return Timed(max(seconds), sum(nbytes))


def epoch(comm: Communicator, data: Dataset, args: argparse.Namespace) -> None:
    """Load the rank's part of an epoch."""
    batch = args.batch * comm.size
    options = {"rank": comm.rank, "size": comm.size, "threads": args.workers}
    with Loader(data, global_batch_size=batch, prefetch=2 * args.workers, **options) as loader:
        for _ in loader.epoch(0):
            pass


def measure(
    comm: Communicator, folder: Path, args: argparse.Namespace, report: Report | None
) -> None:
    """Print a row for each source, cold and warm, on rank 0, which has a report. Collective."""
    images, shards, stage = folder / "images", folder / "shards", folder / "stage"

    def write() -> None:
        if args.cifar10:
            write_cifar10(images, args.cifar10)
        else:
            write_images(images, args.images, args.side)
        pack_shards(images, shards)

    on_rank_0(comm, write)
    options = {"image_size": args.size, "mean": MEAN, "std": STD}
    files = load_folder(data_dir=images, **options)[0]
    packed = load_shards(data_dir=shards, **options)[0]
    size = sum(path.stat().st_size for path in (shards / "train").iterdir())
    if report:
        mega = size / 1e6
        report.line(f"{comm.size} ranks, {len(files)} images, {mega:.0f} MB of training shards")
        report.line(f"{'source':10}{'cache':>6}{'images/s':>11}{'MB/s':>8}{'read':>7}")

    def show(name: str, cache: str, found: Timed) -> None:
        if report:
            rate, speed = len(files) / found.seconds, found.nbytes / 1e6 / found.seconds
            report.line(f"{name:10}{cache:>6}{rate:11.0f}{speed:8.1f}{found.nbytes / size:7.2f}")

    def rows(name: str, data: Dataset) -> None:
        on_rank_0(comm, lambda: forget([folder]))
        for cache in ("cold", "warm"):
            show(name, cache, timed(comm, lambda: epoch(comm, data, args)))

    rows("folder", files)
    rows("shards", packed)
    on_rank_0(comm, lambda: forget([folder]))
    show("copy", "cold", timed(comm, lambda: on_rank_0(comm, shutil.copytree, shards, stage)))
    rows("the copy", load_shards(data_dir=stage, **options)[0])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--side", type=int, default=400, help="height and width of the files")
    parser.add_argument("--size", type=int, default=224, help="height and width of the samples")
    parser.add_argument("--cifar10", metavar="DATA", help="folder of CIFAR-10, instead of fields")
    parser.add_argument("--batch", type=int, default=32, help="samples of a rank")
    parser.add_argument("--workers", type=int, default=1, help="threads of a rank that load")
    parser.add_argument("--folder", type=Path, help="for temporary files, on the disk to measure")
    parser.add_argument("--output", type=Path, help="file that receives the table, too")
    args = parser.parse_args()
    comm = create_communicator()
    report = Report(args.output) if comm.rank == 0 else None
    with tempfile.TemporaryDirectory(dir=args.folder) as own:
        measure(comm, Path(comm.gather_object(own)[0]), args, report)
        comm.barrier()


if __name__ == "__main__":
    main()
