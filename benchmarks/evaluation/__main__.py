"""Frameworks compared on one protocol.

    python -m benchmarks.evaluation run plan.yaml --output results
    python -m benchmarks.evaluation report results

`run --install` installs each framework into an environment of its own, checks that the losses of
the first steps agree, and runs the plan: each run in processes of its own, in random order within
each repetition. `--dry-run` shows what it would do. Interrupted, the same command continues.
`report` writes tables and figures.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.comm.cluster import end_as_after_errors
from benchmarks.comm.cluster_launch import why_not
from benchmarks.common.report import describe
from benchmarks.evaluation import observations, traces
from benchmarks.evaluation.frameworks import COSTS, missing, python_of
from benchmarks.evaluation.plan import FROZEN, Cell, Plan
from benchmarks.evaluation.report import create
from benchmarks.evaluation.running import (
    MAX_REPEATED,
    RunError,
    disturbance,
    machine,
    run_cell,
)
from pydtnn.utils.command import run_command
from pydtnn.utils.files import write_file

PLANS = Path(__file__).parent / "plans"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="run a plan, or the rest of it")
    run.add_argument("plan", type=Path, nargs="?", default=PLANS / "default.yaml")
    run.add_argument("--output", type=Path, required=True, help="folder of the results")
    run.add_argument(
        "--environments",
        type=Path,
        default=Path("build/evaluation"),
        help="folder of the frameworks' environments (default: build/evaluation)",
    )
    run.add_argument(
        "--install",
        action="store_true",
        help="download the packages of frameworks that have no environment yet, without asking",
    )
    run.add_argument(
        "--dry-run", action="store_true", help="print the runs and the packages, do nothing"
    )
    run.set_defaults(call=_run)
    report = commands.add_parser("report", help="write tables and figures of results")
    report.add_argument("output", type=Path, metavar="RESULTS")
    report.set_defaults(call=_report)
    for one in (run, report):
        one.add_argument("--tables", type=Path, help="also write the tables to this Markdown file")
    given = parser.parse_args(arguments)
    return run_command("evaluation", lambda: given.call(given))


def _run(given: argparse.Namespace) -> None:
    plan, folder = Plan.load(given.plan), given.output
    if plan.link and (reason := why_not()):
        raise ValueError(f"{given.plan}: link: no emulated hosts here: {reason}")
    root = given.environments.absolute()
    absent = missing(plan.frameworks, root)
    packages = "; ".join(
        f"{', '.join(of)} in {where} (about {COSTS[where.name][0]} MB, {COSTS[where.name][1]} min)"
        for where, of in absent.items()
    )
    if given.dry_run:
        print(f"{sum(1 for _ in plan.cells())} runs of {', '.join(plan.frameworks)} in {folder}")
        print(f"packages that --install downloads: {packages or 'none'}")
        return
    if absent and not (given.install or _agreed(packages)):
        raise ValueError(
            f"{given.plan}: expected environments of all frameworks, got none for {packages}; add "
            "--install to download them"
        )
    pythons = {name: python_of(name, root) for name in plan.frameworks}
    plan.freeze(folder)
    end_as_after_errors()
    about = folder / "machine.txt"
    if not about.exists():
        about.write_text("\n".join(describe()) + "\n")
    done = set()
    if (folder / observations.RUNS).exists():
        done = {tuple(one[name] for name in Cell._fields) for one in observations.read(folder)}
    cells = [*plan.cells()]
    for number, cell in enumerate(cells, start=1):
        if cell not in done:
            found = _undisturbed(cell, plan, folder, pythons[cell.framework])
            observations.append(folder, cell, found)
            text = found.get("error") or f"{1e3 * found['step']:.4g} ms"
            print(f"{number:4} of {len(cells)}  {cell.name:32} {text}", flush=True)
    _report(given)


def _agreed(packages: str) -> bool:
    """Ask a user at a terminal whether packages may be installed."""
    return sys.stdin.isatty() and input(f"install {packages}? [y/N] ").strip().lower() == "y"


def _undisturbed(cell: Cell, plan: Plan, folder: Path, python: str) -> dict[str, object]:
    """Run a cell, and again while other programs disturb it."""
    for repeated in range(MAX_REPEATED + 1):  # noqa: B007
        before, used = machine(), _used()
        try:
            found = run_cell(cell, plan, folder, python)
        except RunError as error:
            return {"error": str(error)}
        after = machine()
        own = max(_used() - used, found["cpu"])  # daemons of MPI are not waited for
        other = disturbance(before, after, own)
        if not (disturbed := any(other[name] > most for name, most in plan.disturbed.items())):
            break
    times = sorted(found["times"][plan.warm_up :])
    found |= {"step": times[len(times) // 2], "repeated": repeated, "disturbed": disturbed}
    return found | {"before": before, "after": after, **other}


def _used() -> float:
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime


def _report(given: argparse.Namespace) -> None:
    folder = given.output
    path = folder / FROZEN
    if not path.exists():
        raise ValueError(f"{folder}: expected {FROZEN}, got none; run a plan first")
    plan = Plan(**json.loads(path.read_text())["plan"])
    runs = observations.read(folder)
    table = observations.write(folder, runs, plan)
    about = (folder / "machine.txt").read_text().splitlines()
    paths = [table, *create(folder, plan, runs, about), *traces.create(folder, plan, runs)]
    if given.tables:
        text = (folder / "report.md").read_text().split("\n![")[0]  # figures are the last
        write_file("evaluation", given.tables, text.encode())
        paths.append(given.tables)
    print(*paths, sep="\n")


if __name__ == "__main__":
    raise SystemExit(main())
