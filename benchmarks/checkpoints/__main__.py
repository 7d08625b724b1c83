"""Study of checkpoints: formats, networks, ranks and file systems.

    python -m benchmarks.checkpoints --output checkpoints.html
    python -m benchmarks.checkpoints --networks resnet50 --ranks 1 --places tmpfs=/dev/shm disk=.

A slow file system that several hosts share is emulated by a disk in a file, as root:

    truncate --size 4G slow.img; losetup /dev/loop7 slow.img; mkfs.ext4 /dev/loop7
    mount /dev/loop7 /mnt/slow
    echo "7:7 104857600" > /sys/fs/cgroup/blkio/blkio.throttle.write_bps_device   # cgroup 1
    echo "7:7 104857600" > /sys/fs/cgroup/blkio/blkio.throttle.read_bps_device

and measured with `--places ... shared=/mnt/slow`. All files are flushed to disk (fsync) in the time
of writing, and the cache of the system is dropped for them before they are read. Formats alternate;
a format whose library is missing is left out. Training beside checkpoints is measured by
`python -m benchmarks.checkpoints.beside`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import page
from benchmarks.checkpoints.formats import FORMATS
from benchmarks.checkpoints.measure import NETWORKS
from benchmarks.checkpoints.resuming import flips
from benchmarks.common.report import describe

STUDIED = ["resnet44", "resnet50", "vgg16_bn", "gpt"]
"""Networks, by default."""


def measure(network: str, ranks: int, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the records of a network on some ranks."""
    command = [sys.executable, "-m", "benchmarks.checkpoints.measure", network]
    command += ["--turns", str(given.turns), "--seconds", str(given.seconds)]
    command += ["--places", *given.places, "--formats", *given.formats]
    if ranks == 1 and network == given.examine:
        command += ["--bytes"]
    if ranks > 1:
        beside = Path(sys.executable).with_name("mpirun")
        launcher = str(beside) if beside.exists() else shutil.which("mpirun")
        command = [launcher or "mpirun", "-np", str(ranks), *command]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(f"{network} on {ranks} ranks: status {done.returncode}", file=sys.stderr)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return [{"network": network, "ranks": ranks, **json.loads(line)} for line in lines]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("checkpoints.html"))
    parser.add_argument("--records", type=Path, help="file of records: added to, and shown")
    parser.add_argument("--networks", nargs="*", default=STUDIED, choices=[*NETWORKS])
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2, 4])
    parser.add_argument("--places", nargs="+", default=["tmpfs=/dev/shm", "disk=."])
    parser.add_argument("--formats", nargs="+", default=[*FORMATS], choices=[*FORMATS])
    parser.add_argument("--examine", default="resnet44", help="network whose files are damaged")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=15.0, help="longest time of a format")
    parser.add_argument("--flips", type=int, default=20, help="flipped bits of each kind; 0: none")
    given = parser.parse_args(arguments)
    records: list[dict[str, Any]] = []
    if given.records and given.records.exists():
        records = [json.loads(line) for line in given.records.read_text().splitlines()]
    left = [name for name, kind in FORMATS.items() if not kind.is_there()]
    for name in left:
        print(f"{name}: left out, as {FORMATS[name].library} is not installed")

    def add(new: list[dict[str, Any]]) -> None:
        records.extend(new)
        if given.records:
            with given.records.open("a") as file:
                file.writelines(f"{json.dumps(record)}\n" for record in new)

    for network in given.networks:
        for ranks in given.ranks:
            new = measure(network, ranks, given)
            print(page.summary(new), flush=True)
            add(new)
    for row in flips(given.flips) if given.flips else ():
        add([{"what": "flip", **row}])
    given.output.write_text(
        page.create(records, [*describe(), f"left out: {', '.join(left) or 'nothing'}"])
    )
    print(f"wrote {given.output}")


if __name__ == "__main__":
    main()
