"""Measurements of one network on these ranks, as lines of JSON: started by the study."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checkpoints.formats import FORMATS, Format, Ours
from benchmarks.common.work import WORK, Work, create_trainer, resident
from pydtnn.comm import Communicator, create_communicator
from pydtnn.data import Batch
from pydtnn.kernels import create_backend
from pydtnn.utils.machine import restart_peak

NETWORKS = WORK | {"resnet50": Work("resnet50", (64, 64, 3), 1000, 8)}

FLIPS = 10
"""Bits that are flipped in each format."""

SAMPLE_B = 32 << 20
"""Bytes that are compressed to estimate the ratio."""


class Ranks:
    """The ranks of a measurement, with folders that all of them use."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def say(self, **record: Any) -> None:
        """Print a record."""
        if self.comm.rank == 0:
            print(json.dumps(record), flush=True)

    def folder(self, place: str) -> Path:
        """Return a new folder."""
        own = tempfile.mkdtemp(dir=place) if self.comm.rank == 0 else ""
        return Path(self.comm.gather_object(own)[0])

    def remove(self, folder: Path) -> None:
        """Remove a folder."""
        self.comm.barrier()
        if self.comm.rank == 0:
            shutil.rmtree(folder)

    def time(self, form: Format, work: Callable[[], object]) -> tuple[float, float]:
        """Return the time until all ranks have done their work, and its memory in MB."""
        self.comm.barrier()
        restart_peak()
        before, start = resident(), time.perf_counter()
        if form.together or self.comm.rank == 0:
            work()
        own = time.perf_counter() - start, resident(peak=True) - before
        times, memory = zip(*self.comm.gather_object(own), strict=True)
        return max(times), max(memory)


def files_in(folder: Path) -> list[Path]:
    """Return the files of a folder, with those of folders in it."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def forget(folder: Path) -> None:
    """Drop the files from the cache of the system, so that they are read from the disk."""
    for path in files_in(folder):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_times(ranks: Ranks, forms: dict[str, Format], given: argparse.Namespace) -> None:
    """Time all formats in turns, which begin with another one each time."""
    names = [*forms]
    for place in given.places:
        spent = dict.fromkeys(names, 0.0)
        kind, _, root = place.partition("=")
        for turn in range(given.turns + 1):  # the first warms up
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                form = forms[name]
                if turn > 3 and ranks.comm.gather_object(spent[name])[0] > given.seconds:
                    continue
                folder = ranks.folder(root)
                write, memory = ranks.time(form, lambda f=form, p=folder: f.write(p))
                size = sum(path.stat().st_size for path in files_in(folder))
                if ranks.comm.rank == 0:
                    forget(folder)
                read, reading = ranks.time(form, lambda f=form, p=folder: f.read(p))
                spent[name] += write + read
                ranks.remove(folder)
                blocked = write
                if isinstance(form, Ours):
                    folder = ranks.folder(root)
                    ranks.comm.barrier()
                    blocked = max(ranks.comm.gather_object(form.save(folder, background=True)))
                    ranks.remove(folder)
                if turn:
                    ranks.say(
                        what="time", place=kind, format=name, write=write, read=read, bytes=size,
                        blocked=blocked, memory=memory, reading=reading,
                    )  # fmt: skip


def contents(folder: Path) -> dict[Path, bytes]:
    """Return the bytes of all files."""
    return {path.relative_to(folder): path.read_bytes() for path in files_in(folder)}


def largest(folder: Path) -> Path:
    """Return the largest file."""
    return max(files_in(folder), key=lambda path: path.stat().st_size)


def compressed(data: bytes) -> float:
    """Return the length after compression by deflate, of that before."""
    middle = data[max(0, len(data) // 2 - SAMPLE_B // 2) :][:SAMPLE_B]
    return len(zlib.compress(middle, 6)) / len(middle)


def read_damaged(form: Format, folder: Path) -> tuple[str, str]:
    """Read a damaged state; return what happens, in a word, and the error."""
    before = {name: values.copy() for name, values in form.arrays.items()}
    try:
        form.read(folder)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # that of PyTorch's DCP is no Exception
        return "error", f"{type(error).__name__}: {error}".partition("\n")[0][:64]
    finally:
        now = {name: values.copy() for name, values in form.arrays.items()}
        for name, values in form.arrays.items():
            values[...] = before[name]
    if form.weights_only:
        return "no error", ""  # the values that were read are not those of the trainer
    same = all(now[name].tobytes() == before[name].tobytes() for name in now)
    return ("no change" if same else "other values"), ""


def flips(form: Format, folder: Path) -> dict[str, int]:
    """Flip bits in the largest file, one at a time; return how often what happens."""
    path, found = largest(folder), Counter()
    data = path.read_bytes()
    for number in range(FLIPS):
        damaged = bytearray(data)
        damaged[len(data) * (2 * number + 1) // (2 * FLIPS)] ^= 64
        path.write_bytes(damaged)
        found[read_damaged(form, folder)[0]] += 1
    path.write_bytes(data)
    return dict(found)


def examine(ranks: Ranks, forms: dict[str, Format], root: str) -> None:
    """Examine the bytes of each format, and what happens to damaged ones."""
    for name, form in forms.items():
        folders = [Path(tempfile.mkdtemp(dir=root)) for _ in range(2)]
        for folder in folders:
            form.write(folder)
            time.sleep(1.1)  # so that a time in a file differs
        equal = (data := contents(folders[0])) == contents(folders[1])
        ratio, found = compressed(b"".join(data.values())), flips(form, folders[0])
        os.truncate(path := largest(folders[1]), path.stat().st_size * 9 // 10)
        kind, error = read_damaged(form, folders[1])
        ranks.say(
            what="bytes", format=name, same=equal, ratio=ratio, flips=found, cut=kind, error=error
        )  # fmt: skip
        for folder in folders:
            shutil.rmtree(folder)


def start_torch(comm: Communicator, folder: Path) -> None:
    """Connect the ranks of PyTorch, which finds them by a file."""
    from torch import distributed, set_num_threads

    set_num_threads(1)
    if comm.size > 1:
        where = f"file://{folder}/ranks"
        distributed.init_process_group("gloo", where, rank=comm.rank, world_size=comm.size)


def main() -> None:
    """Print the records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=[*NETWORKS])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--places", nargs="+", default=["disk=."])
    parser.add_argument("--formats", nargs="+", default=[*FORMATS], choices=[*FORMATS])
    parser.add_argument("--bytes", action="store_true", help="examine bytes and damage, too")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    ranks = Ranks(create_communicator())
    comm = ranks.comm
    with tempfile.TemporaryDirectory() as cache:
        os.environ["PYDTNN_CACHE"] = cache
        work = NETWORKS[given.network]
        trainer = create_trainer(work, create_backend("cpu", threads=1), comm)
        trainer.exchange.start(trainer.model.buckets)
        x, target = work.data()
        mine = slice(comm.rank, None, comm.size)
        samples = np.arange(work.batch)[mine]
        trainer.train_step(Batch(x[mine], target[mine], samples, 0, work.batch))
        kinds = {name: FORMATS[name] for name in given.formats if FORMATS[name].is_there()}
        forms = {name: kind(trainer) for name, kind in kinds.items()}
        if "DCP" in forms:
            start_torch(comm, ranks.folder(tempfile.gettempdir()))
        measure_times(ranks, forms, given)
        if given.bytes:
            examine(ranks, forms, given.places[0].partition("=")[2])


if __name__ == "__main__":
    main()
