"""Runs the cells of a plan: each in processes of its own, and on the same cores."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.comm.cluster_launch import YIELDING, Cluster, mpirun
from benchmarks.comm.ranks import default_launcher as launcher
from benchmarks.common.processes import end
from benchmarks.evaluation.frameworks import FRAMEWORKS, Framework
from benchmarks.evaluation.networks import NETWORKS, samples, weights
from benchmarks.evaluation.plan import Cell, Plan
from pydtnn.data import load_dataset
from pydtnn.utils.files import write_file
from pydtnn.utils.machine import cpu_name

LIMIT_S = 600.0
"""Longest time of a run."""

MAX_REPEATED = 2
"""How often a disturbed run is repeated; the last one counts, and says that it was disturbed."""

BATCHES = 4
"""Steps after which samples are repeated."""

_LIBRARY = ctypes.CDLL(None)


class RunError(RuntimeError):
    """A run has failed; the text is what it printed last."""


def arrays_of(plan: Plan, network: str, folder: Path, seed: int = 0) -> Path:
    """Write the samples and the initial weights of a network and a seed, once."""
    path = folder / "arrays" / f"{network}-{seed}.npz"
    if not path.exists():
        one = NETWORKS[network]
        if plan.data:
            train, test = load_dataset(plan.data)
            named = _normalised(train, train) | {
                f"test_{name}": array for name, array in _normalised(test, train).items()
            }
        else:
            x, y = samples(one, BATCHES * plan.batch * max(plan.ranks), seed)
            named = {"x": x, "y": y}
        named |= {f"w{i}": array for i, array in enumerate(weights(one, seed))}
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, **named)
    return path


def _normalised(dataset: Any, train: Any) -> dict[str, np.ndarray]:
    """Return all samples, with the mean and the deviation of those that are trained."""
    x, y = dataset.read(np.arange(len(dataset)))
    return {"x": train.normalize(x), "y": y.astype(np.int64)}


def counter_of(folder: Path) -> str:
    """Return the library that counts messages (`messages.c`), built once; empty if it cannot be."""
    path = (folder / "messages.so").absolute()
    if not path.exists():
        source = Path(__file__).with_name("messages.c")
        options = ["-O2", "-shared", "-fPIC", "-o", str(path), str(source), "-ldl"]
        with suppress(OSError):
            subprocess.run([*os.environ.get("CC", "cc").split(), *options], capture_output=True)
    return str(path) if path.exists() else ""


def cores_of(ranks: int, threads: int) -> list[list[int]]:
    """Return the cores of each rank: in turn, as many as it has threads."""
    allowed = sorted(os.sched_getaffinity(0))
    return [
        [allowed[(rank * threads + i) % len(allowed)] for i in range(threads)]
        for rank in range(ranks)
    ]


def run_cell(cell: Cell, plan: Plan, folder: Path, python: str) -> dict[str, Any]:
    """Run a cell with the Python of its framework; return what its ranks measured.

    Raises
    ------
    RunError
        If a rank ends with an error, or after `LIMIT_S`.
    """
    framework, own = FRAMEWORKS[cell.framework], folder / "runs" / cell.name
    hosts = plan.hosts_of(cell.ranks)
    each = cell.ranks // hosts
    seed = plan.seed + (cell.repetition if plan.epochs else 0)
    arrays = arrays_of(plan, cell.network, folder, seed).absolute()
    batch, steps, epoch = plan.batch_of(cell.ranks), plan.steps_of(cell.network), 0
    if plan.epochs:
        epoch = len(np.load(arrays)["y"]) // (batch * cell.ranks)
        steps = plan.epochs * epoch - plan.warm_up
    shutil.rmtree(own, ignore_errors=True)  # of a run that was interrupted, or disturbed
    own.mkdir(parents=True)
    job = {
        "ranks": cell.ranks,
        "threads": plan.threads,
        "batch": batch,
        "steps": steps,
        "epoch": epoch,
        "seed": seed,
        "warm_up": plan.warm_up,
        "traced": 0 if cell.repetition else plan.traced,
        "slower": framework.slower,
        "rate": NETWORKS[cell.network].rate,
        "momentum": plan.momentum,
        "layers": NETWORKS[cell.network].layers,
        "cores": cores_of(cell.ranks, plan.threads),
        "arrays": str(arrays),
        "counter": counter_of(folder),
        "started": time.time(),
    }
    path = (own / "job.json").absolute()
    with ExitStack() as stack:
        cluster = None
        if plan.link:
            # Ranks that wait leave their core to others: ours sleep, those of other programs yield.
            ours = framework.adapter.startswith("ours")
            cluster = stack.enter_context(Cluster(hosts, each, plan.link, asleep=ours))
        addresses = cluster.hosts.addresses if cluster else ["127.0.0.1"]
        job["addresses"] = [addresses[rank // each] for rank in range(cell.ranks)]
        write_file("evaluation", path, json.dumps(job).encode())
        _start(_commands(framework, [python, str(framework.program), str(path)], job, cluster), own)
    found = [json.loads((own / f"result-{rank}.json").read_text()) for rank in range(cell.ranks)]
    # MPI's messages inside a host do not pass TCP.
    merged = _merge(found, bool(plan.link) or not framework.mpi)
    used = [core for cores in job["cores"] for core in cores]
    return merged | {"epoch": epoch, "sharing": max(used.count(core) for core in used)}


def _commands(
    framework: Framework, command: list[str], job: Mapping[str, Any], cluster: Cluster | None
) -> list[tuple[list[str], dict[str, str]]]:
    """Return what starts the ranks: mpirun, or a command of each; and the variables of each."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    own = {
        "OMP_NUM_THREADS": str(job["threads"]),
        "MASTER_ADDR": job["addresses"][0],
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(job["ranks"]),
        "LD_PRELOAD": job["counter"],
    }
    beside = Path(command[0]).with_name("mpirun")
    kept = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    if framework.compiled and cluster:  # for the MPICH beside it
        return [(cluster.hydra(beside, command), kept | own | YIELDING)]
    if framework.mpi and cluster:
        library = mpirun().parents[1] / "lib" / "libmpi.so"
        own |= {"MPI4PY_MPIABI": "openmpi", "MPI4PY_LIBMPI": str(library)}
        return [(cluster.command(command), cluster.environment(own))]
    if framework.mpi:
        words = [str(beside), "-np", "{ranks}"] if beside.exists() else shlex.split(launcher())
        before = [word.format(ranks=job["ranks"]) for word in words]
        return [([*before, *command], kept | own)]
    return [
        (
            [*(cluster.hosts.enter(rank // cluster.ranks) if cluster else ()), *command],
            kept | own | {"RANK": str(rank)},
        )
        for rank in range(job["ranks"])
    ]


def _start(commands: list[tuple[list[str], dict[str, str]]], own: Path) -> None:
    """Run commands to their end; `own` is the folder of the run."""
    with ExitStack() as stack:
        log = stack.enter_context((own / "output.txt").open("w+"))
        processes = []
        for words, variables in commands:
            process = subprocess.Popen(
                words, env=variables, stdout=log, stderr=log, preexec_fn=_end_with_parent
            )
            stack.callback(end, process)
            processes.append(process)
        deadline = time.monotonic() + LIMIT_S
        while any(process.poll() is None for process in processes):
            failed = any(process.poll() for process in processes)
            if failed or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        if any(process.poll() != 0 for process in processes):
            log.flush()
            last = [line for line in (own / "output.txt").read_text().splitlines() if line.strip()]
            raise RunError(last[-1] if last else f"no end after {LIMIT_S:.0f} s")


def _end_with_parent() -> None:
    """Let this process end when the one that started it does, however that ends (Linux)."""
    _LIBRARY.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _merge(found: list[dict[str, Any]], through_tcp: bool) -> dict[str, Any]:
    """Return the responses of a run: of a step, the slowest rank's; of others, the largest."""
    times = np.max([one["times"] for one in found], axis=0)
    counted = {name: max(one[name] for one in found) for name in ("bytes", "messages")}
    by = found[0]["counted_by"]
    if np.isnan(counted["bytes"]) or (by == "TCP" and not through_tcp):
        counted, by = dict.fromkeys(counted), "nothing"
    return {
        "version": found[0]["version"],
        "losses": np.mean([one["losses"] for one in found], axis=0).tolist(),
        "times": times.tolist(),
        **{name: max(one[name] for one in found) for name in ("start_up", "memory", "link_bytes")},
        **counted,
        "counted_by": by,
        "cpu": sum(one["cpu"] for one in found),
        "accuracy": found[0]["accuracy"],
        "traced": [one["traced"] for one in found] if found[0]["traced"] else [],
    }


# -- the machine ----------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Return the state of the machine: load, time stolen from it, frequency, temperature."""
    fields = [int(value) for value in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    text = Path("/proc/cpuinfo").read_text()
    clocks = [float(line.split(":")[1]) for line in text.splitlines() if "cpu MHz" in line]
    zones = sorted(Path("/sys/class/thermal").glob("thermal_zone*/temp"))
    energy = Path("/sys/class/powercap/intel-rapl:0/energy_uj")
    return {
        "at": time.time(),
        "cpu": cpu_name(),
        "load": os.getloadavg()[0],
        "busy": sum(fields[:3]) + sum(fields[5:8]),
        "steal": fields[7] if len(fields) > 7 else 0,
        "all": sum(fields),
        "mhz": float(np.mean(clocks)) if clocks else None,
        "celsius": int(zones[0].read_text()) / 1000 if zones else None,
        "joules": int(energy.read_text()) / 1e6 if os.access(energy, os.R_OK) else None,
    }


def disturbance(
    before: Mapping[str, Any], after: Mapping[str, Any], own: float
) -> dict[str, float]:
    """Return the cores that other programs used during a run, and the share of time stolen.

    Parameters
    ----------
    before, after : mapping
        Of `machine`.
    own : float
        Time of the processor that the run used, in s.
    """
    ticks, cores = os.sysconf("SC_CLK_TCK"), os.cpu_count() or 1
    seconds = max(after["at"] - before["at"], 1e-9)
    steal = (after["steal"] - before["steal"]) / max(after["all"] - before["all"], 1)
    busy = (after["busy"] - before["busy"]) / ticks - (after["steal"] - before["steal"]) / ticks
    return {"load": min(max((busy - own) / seconds, 0.0), cores), "steal": steal}
