"""Every promise for one GPU, checked in one call of under ten minutes; a report says what came out.

    python benchmarks/gpu_check.py --out FOLDER --data FOLDER_OF_CIFAR10 --wheels FOLDER
    python benchmarks/gpu_check.py --out FOLDER --only first              # begin with it
    python benchmarks/gpu_check.py --out FOLDER --only steps kernels      # parts of it
    python benchmarks/gpu_check.py --list                                 # which parts there are

It needs Linux, an NVIDIA GPU, its driver, nvcc, and a Python with PyTorch, CuPy and cuDNN; no
network. What else it needs is brought as wheels: `tests/gpu_check/wheels.txt` says which, and how
they are fetched. pydtnn is built in an environment of its own, `--environment`.

Parts are processes of their own (`parts.py`). Tests run side by side, and with them PyTorch
compiles what it is timed with later on, into its cache; then each part that measures time has the
machine to itself, the promised figures first. A part has a limit, the whole a budget, and what
does not fit is left out and called NOT RUN. `report.md` is written anew after each part, from the
numbers that parts leave in `FOLDER`; so a call with `--only` adds to what an earlier one found
there. The tables are in `FOLDER/gpu_*.txt`: to keep them, copy them to `benchmarks/results/`.
Where only a few files can be brought home, `--copy` names a folder that gets the report and the
tables after each part, and numbers and logs as one archive: five files.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.gpu_check.parts import ROOT, Part, run
from tests.gpu_check.promises import NOT_RUN, PASS, PROMISES
from tests.gpu_check.setup import CUBINS, python_of
from tests.gpu_check.suite import TOOLS

TAIL = 60  # lines of each part's output in the report
SANITIZED = (
    *("-k", "TestGpu or pooling or bins or step_of_a_model"),
    *("tests/benchmarks/test_gpu_benchmarks.py::TestGpu", "tests/kernels/cuda/test_on_gpu.py"),
)
"""Tests in which all kernels of our own run, on small arrays: a sanitizer makes them slow."""

PROBE = """
import sys
from pydtnn.kernels.cuda import create_cuda_backend
try:
    create_cuda_backend()
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""
"""Says why there can be no backend; only the part that looks into that is started then."""

ARCHIVE = "numbers_and_logs"


def parts(python: Path, out: Path, data: Path | None, budget: float) -> list[Part]:
    """Return all checks in the order of their importance.

    Expected seconds are guesses for one H200 with 16 cores until they have been measured there.
    """

    def script(name: str, *options: str) -> tuple[str, ...]:
        return (str(python), "-m", name, *options)

    def test(name: str, *options: str) -> tuple[str, ...]:
        return script("tests.gpu_check.suite", "--json", str(out / f"{name}.json"), *options)

    def steps(*options: str) -> tuple[str, ...]:
        files = ("--output", str(out / "gpu_step_time.txt"), "--json", str(out / "steps.json"))
        return script("benchmarks.gpu.step_time", *options, *files, "--turns", "7")

    one_thread = {"OMP_NUM_THREADS": "1"}
    several = {**one_thread, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    nccl, staged = "tests/comm/test_nccl.py", "tests/comm/test_staged.py"
    on_gpu = "tests/kernels/cuda/test_on_gpu.py"  # what everything needs
    sanitizers = [
        Part(
            tool,
            test(tool, "--tool", tool, "--workers", "2", "--limit", "90", *SANITIZED),
            *(90, 180),
            environment=one_thread,
        )
        for tool in TOOLS
    ]
    cifar = ("--data", str(data)) if data else ()
    return [
        Part("first", test("first", on_gpu), 60, 240, environment=one_thread),
        Part(
            "tests", test("tests", "--on-gpu", "--workers", "9"), 150, 260, environment=one_thread
        ),
        Part("nccl", test("nccl", f"{nccl}::TestOneGpu"), 20, 60, environment=one_thread),
        Part("nccl2", test("nccl2", f"{nccl}::TestGpus"), 30, 90, environment=several),
        Part("staged2", test("staged2", f"{staged}::TestStagedGpuMpi"), 30, 90),
        *sanitizers,
        Part("compile", script("benchmarks.gpu.step_time", "promised", "--compile"), 90, 200),
        Part("steps", steps("promised"), 75, 300, alone=True),
        Part(
            "kernels",
            script(
                *("benchmarks.gpu.kernels", "--sizes", "cold", "--dtypes", "float32", "bfloat16"),
                *("--output", str(out / "gpu_kernels.txt"), "--json", str(out / "kernels.json")),
            ),
            *(60, 120),
            alone=True,
        ),
        Part(
            "cifar",
            script(
                *("benchmarks.gpu.cifar", *cifar, "--steps", str(out / "steps.json")),
                *("--output", str(out / "gpu_cifar.txt"), "--json", str(out / "cifar.json")),
            ),
            *(130, 240),
            alone=True,
        ),
        Part("more", steps("all", "--resume", "--ahead"), 40, budget, alone=True),
    ]


def settings(environment: Path, data: Path | None) -> dict[str, str]:
    """Return variables for all parts."""
    return {
        "PYTHONUNBUFFERED": "1",
        "PYDTNN_CUBINS": str(environment / CUBINS),
        "TORCHINDUCTOR_CACHE_DIR": str(environment / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "4",  # of each of several processes
        **({"PYDTNN_DATA": str(data)} if data else {}),
    }


def setup_part(environment: Path, wheels: Path | None) -> Part:
    """Return what comes before all other parts."""
    command = [sys.executable, "-m", "tests.gpu_check.setup", "--environment", str(environment)]
    return Part("setup", (*command, *(("--wheels", str(wheels)) if wheels else ())), 45, 240)


def write_report(path: Path, head: Sequence[str], chosen: Sequence[Part], out: Path) -> bool:
    """Write the table of promises, that of the parts and their output; return if all are kept."""
    lines = [*head, "", "| check | wanted | seen | |", "|---|---|---|---|"]
    kept = True
    for promise in PROMISES:
        verdict, figure = promise.judge(out)
        states = [f"{part.name} {part.state}" for part in chosen if part.name in promise.parts]
        if verdict == NOT_RUN:
            figure = f"{figure} ({'; '.join(states) or 'not asked for'})"
        kept = kept and verdict == PASS
        cells = (promise.name, promise.wanted, figure, f"**{verdict}**")
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    lines += ["", "| part | expected | took | |", "|---|---|---|---|"]
    for part in chosen:
        took = f"{part.seconds:.0f} s" if part.seconds else ""
        lines.append(f"| {part.name} | {part.expected:.0f} s | {took} | {part.state} |")
    for table in sorted(out.glob("gpu_*.txt")):
        lines += ["", f"## {table.name}", "", "```", *table.read_text().splitlines(), "```"]
    for part in chosen:
        lines += ["", f"## Output of {part.name}", "", "```", *part.tail(TAIL), "```"]
    beside = path.with_suffix(".part")
    beside.write_text("\n".join(lines) + "\n")
    beside.replace(path)
    return kept


def told_by(command: Sequence[str]) -> list[str]:
    """Return the lines that a command prints, or the reason why it does not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [str(error)]
    return (done.stdout or done.stderr).splitlines()


def describe(python: Path) -> list[str]:
    """Begin a report: GPU, machine, versions, commit."""
    query = ["--query-gpu=name,memory.total,driver_version,clocks.max.sm", "--format=csv,noheader"]
    gpu = told_by(["nvidia-smi", *query]) if shutil.which("nvidia-smi") else []
    info = told_by([str(python), "-m", "pydtnn", "info"])
    torch = "import torch; print(torch.__version__, torch.cuda.nccl.version())"
    commit = f", commit {os.environ['PYDTNN_COMMIT']}" if "PYDTNN_COMMIT" in os.environ else ""
    return [
        f"# pydtnn on {', '.join(gpu) or 'no GPU'}{commit}",
        "",
        f"{time.strftime('%Y-%m-%d %H:%M')} UTC, `python {' '.join(sys.argv)}`",
        "",
        "```",
        *info,
        "PyTorch, its NCCL " + " ".join(told_by([str(python), "-c", torch])[-1:]),
        "```",
    ]


def copy(out: Path, home: Path) -> None:
    """Copy what a call has found so far into few files: the report, the tables, an archive."""
    home.mkdir(parents=True, exist_ok=True)
    for file in (out / "report.md", *out.glob("gpu_*.txt")):
        shutil.copy(file, home)
    with tarfile.open(home / f"{ARCHIVE}.tar.gz", "w:gz") as archive:
        for file in sorted((*out.glob("*.json"), *out.glob("logs/*.log"))):
            archive.add(file, file.relative_to(out))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; the exit status is 0 if all promises are kept."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of report.md, tables, numbers and logs")
    parser.add_argument("--copy", type=Path, help="folder of what is brought home, see above")
    parser.add_argument("--data", type=Path, help="folder of CIFAR-10")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install")
    parser.add_argument("--environment", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--commit", help="its name, where the checkout came without its history")
    parser.add_argument("--budget", type=float, default=570, help="s for everything")
    parser.add_argument("--only", nargs="+", metavar="PART", help="which parts")
    parser.add_argument("--list", action="store_true", help="print the plan, run nothing")
    args = parser.parse_args(arguments)
    out = (args.out or Path("gpu-check")).resolve()
    python = python_of(args.environment.resolve())
    every = parts(python, out, args.data and args.data.resolve(), args.budget)
    names = [part.name for part in every]
    if unknown := set(args.only or ()) - set(names):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    chosen = [part for part in every if part.name in (args.only or names)]
    if args.list:
        for part in chosen:
            print(f"{part.name:10} about {part.expected:3.0f} s, at most {part.limit:3.0f} s")
        return 0
    if args.out is None:
        parser.error("--out is needed: the folder of the report")
    return check(chosen, out, python, args)


def check(chosen: list[Part], out: Path, python: Path, args: argparse.Namespace) -> int:
    """Set up the environment, run the parts, write the report."""
    deadline = time.monotonic() + args.budget
    out.mkdir(parents=True, exist_ok=True)
    logs = out / "logs"
    logs.mkdir(exist_ok=True)
    if args.commit:
        os.environ["PYDTNN_COMMIT"] = args.commit
    os.environ |= settings(args.environment.resolve(), args.data and args.data.resolve())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the report is written
    setup = setup_part(args.environment.resolve(), args.wheels and args.wheels.resolve())
    head = ["# pydtnn on a GPU"]
    everything = [setup, *chosen]
    for part in chosen:  # what an earlier call found is not of this one
        (out / f"{part.name}.json").unlink(missing_ok=True)

    def told() -> bool:
        kept = write_report(out / "report.md", head, everything, out)
        if args.copy:
            copy(out, args.copy)
        return kept

    run([setup], logs, deadline, told)
    problem = f"the environment could not be set up ({setup.state})"
    if setup.state == "done":
        head = describe(python)
        problem = " ".join(told_by([str(python), "-c", PROBE]))
    able = [part for part in chosen if not problem or (setup.state, part.name) == ("done", "first")]
    for part in chosen:
        part.state = part.state if part in able else f"not started: {problem}"
    run(able, logs, deadline, told)
    kept = told()
    print((out / "report.md").read_text())
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
