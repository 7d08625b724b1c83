"""Kill or stop ranks of runs with `--survive` at random moments; print how the others continue.

    .venv-openmpi/bin/python -m benchmarks.survival --modes exact mesh --kills 10
    .venv-openmpi/bin/python -m benchmarks.survival --kinds two recovery first host stop --kills 20
    .venv-openmpi/bin/python -m benchmarks.survival --modes exact --model resnet44 --kills 9
    .venv-openmpi/bin/python -m benchmarks.survival --cost --model resnet20

Requires Open MPI; `host`, and `--hosts`, emulated hosts (`benchmarks.comm.cluster`). A run trains,
evaluates and writes checkpoints for a few seconds. Ranks are killed at a random moment of its
duration, which begins when all processes of the ranks exist. A run is good if it ends with
status 0 without the ranks; in exact modes its weights must have the bytes of an undisturbed run,
and in the mode `recycle` its parameters must be equal to 1e-12.
MPI cannot start without all ranks: `pydtnn launch` starts a run again that has lost one before
("restarted"). A restart for any other reason makes a run bad.
With `--keep`, the output of the others remains; of a run that hangs it has the stacks of all ranks.

`--cost` compares runs without failures, with `--survive` and without, in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.comm.cluster_launch import Cluster, mpirun, why_not
from pydtnn.saving.weights import decode
from tests.launch import OPENMPI, ROOT, descendants, is_openmpi, mpiexec

MODES: dict[str, list[str]] = {
    "plain": [],
    "exact": ["--exact"],
    "sharded": ["--exact", "--scheme=sharded"],
    "accumulation": ["--accumulation=2"],
    "compression": ["--compress=top_k"],
    "mesh": ["--parallel=data=2,filter=2"],
    "pipeline": ["--parallel=data=2,pipeline=2"],
    "recycle": ["--parallel=data=2,pipeline=2", "--survive-stages=recycle", "--dtype=float64"],
    "local_sgd": ["--scheme=local_sgd"],
}
"""Options of each mode."""

PARTS = ("detection", "agreement", "rebuilding", "next_step")
"""Parts of the time of a recovery, as in run.json."""

RECOVERY_S = 0.3
"""Longest time between two failures, of which the second is to hit the recovery from the first."""

NOT_STARTED = ("before MPI had started", "not all ranks have started", "MPI_Init")
"""In the output of a run that has lost ranks before MPI had started, which none survives."""

HANGS_S = 300.0
"""Seconds after which a run of a few seconds hangs."""


@dataclass
class Case:
    """One run: which ranks fail, and when.

    Attributes
    ----------
    kind : str
    kills : list of (float, int)
        Seconds from the last kill (of the first: from the start of the ranks), and a rank.
    number : int
        The signal.
    """

    kind: str
    kills: list[tuple[float, int]]
    number: int = signal.SIGKILL

    def __str__(self) -> str:
        kills = ", ".join(f"rank {rank} after {delay:.2f} s" for delay, rank in self.kills)
        return f"{self.kind}: {kills}"


def one(rng: random.Random, ranks: int, latest: float) -> Case:
    return Case("one", [(rng.uniform(0, latest), rng.randrange(ranks))])


def first(rng: random.Random, ranks: int, latest: float) -> Case:
    return Case("first", [(rng.uniform(0, latest), 0)])


def two(rng: random.Random, ranks: int, latest: float) -> Case:
    a, b = rng.sample(range(ranks), 2)
    return Case("two", [(rng.uniform(0, latest), a), (0.0, b)])


def recovery(rng: random.Random, ranks: int, latest: float) -> Case:
    a, b = rng.sample(range(ranks), 2)
    return Case("recovery", [(rng.uniform(0, latest), a), (rng.uniform(0, RECOVERY_S), b)])


def host(rng: random.Random, ranks: int, latest: float) -> Case:
    """All ranks of the second of two hosts: the launcher is on the first."""
    return Case("host", [(rng.uniform(0, latest), ranks // 2)] + [(0.0, ranks // 2 + 1)])


def stop(rng: random.Random, ranks: int, latest: float) -> Case:
    return Case("stop", [(rng.uniform(0, latest), rng.randrange(ranks))], signal.SIGSTOP)


KINDS: dict[str, Callable[[random.Random, int, float], Case]] = {
    kind.__name__: kind for kind in (one, first, two, recovery, host, stop)
}


@dataclass
class Outcome:
    """How a run has ended; `same` is whether its weights are those of an undisturbed run."""

    case: Case
    status: int
    seconds: float
    left: int
    restarted: bool = False
    survived: bool = True
    trained: bool = True
    same: bool | None = None
    failures: list[dict[str, Any]] = field(default_factory=list)

    @property
    def good(self) -> bool:
        right = self.trained and self.survived and self.same is not False
        return self.status == 0 and right and not self.left

    def __str__(self) -> str:
        times = "; ".join(
            ", ".join(f"{part} {failure[part]:.3f}" for part in PARTS if failure[part] is not None)
            + f", {failure['lost_steps']} lost"
            for failure in self.failures
        )
        same = {True: ", same bytes", False: ", OTHER BYTES", None: ""}[self.same]
        left = f", {self.left} PROCESSES LEFT" if self.left else ""
        left += ", restarted" if self.restarted else ""
        left += "" if self.survived else ", NOT SURVIVED"
        left += "" if self.trained else ", NOT TRAINED"
        return f"{self.case}: status {self.status}{same}{left}, {self.seconds:.1f} s; {times}"


def ranks_below(launcher: int) -> dict[int, int]:
    """Return the processes of the ranks, by rank."""
    found, of_ranks = {}, set[int]()
    for process in descendants(launcher):
        with contextlib.suppress(OSError):  # it has ended
            environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            number = [e for e in environment if e.startswith(b"OMPI_COMM_WORLD_RANK=")]
            parent = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
            command = Path(f"/proc/{process}/cmdline").read_bytes()
            if number and b"pydtnn.train" in command:
                of_ranks.add(process)
                if parent not in of_ranks:  # not what a rank has started
                    found[int(number[0].partition(b"=")[2])] = process
    return found


def is_running(process: int) -> bool:
    """Return whether a process has not ended; one without a parent may remain as a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Launch:
    """Starts runs, on this machine or on emulated hosts."""

    def __init__(self, ranks: int, cluster: Cluster | None) -> None:
        self.ranks, self._cluster = ranks, cluster

    def run(
        self, folder: Path, arguments: Sequence[str], case: Case | None, survives: bool = True
    ) -> tuple[int, float, int]:
        """Run to the end; return status, duration of the ranks and processes that are left."""
        folder.mkdir()
        train = [sys.executable, "-m", "pydtnn.train", *arguments, "--progress=none"]
        train += [f"--output-dir={folder / 'run'}", f"--save={folder / 'end.safetensors'}"]
        options = ["--with-ft", "ulfm"] if survives else []
        train += ["--survive"] if survives else []
        again = [sys.executable, "-m", "pydtnn", "launch", "--restarts=1", "--"] if survives else []
        if self._cluster is None:
            command = [*again, str(mpiexec()), *options, "-n", str(self.ranks), *train]
            environment = {**OPENMPI, **os.environ}
        else:
            command = self._cluster.command([*options, *train])
            place = command.index(str(mpirun()))
            command[place:place] = again
            environment = self._cluster.environment()
        with (folder / "output.txt").open("wb") as output:
            program = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )
        try:
            return self._watch(program, case)
        finally:
            family = [*descendants(program.pid), program.pid]
            for process in family if program.poll() is None else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            program.wait()

    def _watch(self, program: subprocess.Popen[bytes], case: Case | None) -> tuple[int, float, int]:
        processes: dict[int, int] = {}
        while len(processes) < self.ranks and program.poll() is None:
            processes = ranks_below(program.pid)
            time.sleep(0.01)
        begin = time.monotonic()
        for delay, rank in case.kills if case is not None else ():
            time.sleep(delay)
            with contextlib.suppress(ProcessLookupError):
                os.kill(processes[rank], case.number if case is not None else 0)
        try:
            program.wait(HANGS_S)
        except subprocess.TimeoutExpired:
            for process in processes.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGUSR1)  # the table and the stacks
            time.sleep(5.0)
            return -1, HANGS_S, len(ranks_below(program.pid))
        seconds = time.monotonic() - begin
        left = [process for process in processes.values() if is_running(process)]
        for process in left:
            os.kill(process, signal.SIGKILL)
        return program.returncode, seconds, len(left)


def disturb(
    launch: Launch, place: Path, mode: str, kind: str, options: argparse.Namespace
) -> Iterator[Outcome]:
    """Yield the outcomes of runs of a mode whose ranks fail."""
    arguments = [*training(options), *MODES[mode], "--checkpoint-every=4 steps"]
    arguments += ["--buddy-interval=5 steps"]
    arguments += [f"--timeout={options.timeout}"] if kind in ("host", "stop") else []
    undisturbed = place / f"{mode}-{kind}"
    status, latest, _ = launch.run(undisturbed, arguments, None)
    if status:
        raise SystemExit(f"survival: {mode}: {(undisturbed / 'output.txt').read_text()}")
    rng = random.Random(f"{options.seed} {mode} {kind}")
    for number in range(options.kills):
        folder = place / f"{mode}-{kind}-{number}"
        case = KINDS[kind](rng, options.ranks, latest)
        outcome = Outcome(case, *launch.run(folder, arguments, case))
        text = (folder / "output.txt").read_text(errors="replace")
        before, restart, _ = text.partition("pydtnn.launch: restart")
        outcome.restarted = bool(restart)
        outcome.survived = not restart or any(text in before for text in NOT_STARTED)
        outcome.trained = (folder / "run" / "run.json").exists()
        if outcome.status == 0 and outcome.trained:
            outcome.failures = json.loads((folder / "run" / "run.json").read_text())["failures"]
            ends = [(one / "end.safetensors").read_bytes() for one in (folder, undisturbed)]
            if "--exact" in arguments:
                outcome.same = ends[0] == ends[1]
            elif mode == "recycle":
                outcome.same = nearly_equal(*map(decode, ends))
        if options.keep and not outcome.good:
            options.keep.mkdir(exist_ok=True, parents=True)
            shutil.copy(folder / "output.txt", options.keep / f"{folder.name}-{options.seed}.txt")
        shutil.rmtree(folder)
        yield outcome


def nearly_equal(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> bool:
    """Return whether parameters are equal but for rounding; running statistics are not compared."""
    names = [name for name in first if ".running_" not in name]
    return all(np.allclose(first[name], second[name], 1e-12, 1e-13) for name in names)


def training(options: argparse.Namespace) -> list[str]:
    samples = options.steps * options.batch
    return [
        f"--model={options.model}",
        f"--epochs={options.epochs}",
        f"--steps-per-epoch={options.steps}",
        f"--global-batch-size={options.batch}",
        f'--dataset-options={{"samples": {samples}, "test_samples": 64}}',
        "--threads=1",
    ]


def line(name: str, outcomes: Sequence[Outcome]) -> str:
    """Return a line of the table."""
    exact = [outcome.same for outcome in outcomes if outcome.same is not None]
    good = sum(outcome.good for outcome in outcomes)
    restarted = sum(outcome.restarted for outcome in outcomes)
    text = f"{name:24}{len(outcomes):6}{good:6}{restarted:11}"
    text += f"{sum(exact):3} of {len(exact):2}" if exact else f"{'':9}"
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    for part in PARTS:
        known = [failure[part] for failure in failures if failure[part] is not None]
        text += f"{statistics.median(known):12.3f}" if known else f"{'':12}"
    return text


def print_costs(launch: Launch, place: Path, options: argparse.Namespace) -> None:
    """Print times of a step with `--survive` and without, from runs in turns."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(options.kills):
        for survives in times:
            folder = place / f"{turn}-{survives}"
            launch.run(folder, training(options), None, survives)
            output = (folder / "output.txt").read_text()
            found = re.search(r"time per step +measured ([0-9.]+) ([mu]?s)", output)
            if found is None:
                raise SystemExit(f"survival: {output}")
            times[survives].append(float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]])
    before, after = (statistics.median(times[survives]) for survives in (False, True))
    ratios = sorted(b / a for a, b in zip(times[False], times[True], strict=True))
    print(
        f"{options.model}, {options.ranks} ranks: a step takes {1e3 * before:.2f} ms, with "
        f"--survive {1e3 * after:.2f} ms: {100 * (after / before - 1):+.2f} % (medians of "
        f"{options.kills} runs; ratios of turns {ratios[0]:.3f} to {ratios[-1]:.3f}, median "
        f"{statistics.median(ratios):.3f})"
    )


def main() -> None:
    """Print a line for every run, and a table; the status is 1 if a run was not good."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["one"])
    parser.add_argument("--kills", type=int, default=13, help="runs of each mode and kind")
    parser.add_argument("--model", default="resnet8")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hosts", type=int, default=1, help="emulated hosts")
    parser.add_argument("--rate", default="1gbit", help="of the links of emulated hosts")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="of an epoch")
    parser.add_argument("--batch", type=int, default=64, help="of all ranks")
    parser.add_argument("--timeout", type=int, default=10, help="of `host` and `stop`, in s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for the output of runs that are not good")
    parser.add_argument("--cost", action="store_true", help="of runs without failures")
    options = parser.parse_args()
    if not is_openmpi():
        raise SystemExit("survival: expected the mpiexec of Open MPI; use .venv-openmpi")
    hosts = max(options.hosts, 2 if "host" in options.kinds else 1)
    if hosts > 1 and why_not():
        raise SystemExit(f"survival: {why_not()}")
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        cluster = None
        if hosts > 1:
            cluster = stack.enter_context(Cluster(hosts, options.ranks // hosts, options.rate))
        launch = Launch(options.ranks, cluster)
        if options.cost:
            print_costs(launch, Path(place), options)
            return
        heads = f"{'mode':24}{'cases':>6}{'good':>6}{'restarted':>11}{'same':>9}"
        bad, lines = 0, [heads + "".join(f"{part:>12}" for part in PARTS)]
        for mode in options.modes:
            for kind in options.kinds:
                outcomes = []
                for outcome in disturb(launch, Path(place), mode, kind, options):
                    print(f"{mode}, {outcome}", flush=True)
                    outcomes.append(outcome)
                    bad += not outcome.good
                lines.append(line(mode if kind == "one" else f"{mode}, {kind}", outcomes))
        print("\n".join(lines))
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
