"""Reports of a run: the header, the file run.json with its configuration, the table of results."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from collections import Counter
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

from pydtnn.callbacks import BestWeights
from pydtnn.cli.config import TrainConfig, flags, typed
from pydtnn.cli.installation import collect
from pydtnn.cli.parallel import describe_mesh
from pydtnn.cli.workload import changes_of
from pydtnn.comm.schedules.rule import RULE, Ruled, explain
from pydtnn.data.inputs import inputs_of
from pydtnn.saving.models import describe_model
from pydtnn.training.run_folder import MODEL_FILE, RUN_FILE
from pydtnn.utils.clock import VIRTUAL_SECONDS
from pydtnn.utils.errors import printable
from pydtnn.utils.files import write_file
from pydtnn.utils.machine import peak_memory
from pydtnn.utils.tools import find_tool
from pydtnn.utils.units import align

if TYPE_CHECKING:
    from pydtnn.cli.build import Job
    from pydtnn.kernels.cuda.backend import CudaBackend

SHOWN_ELSEWHERE = (
    "model",
    "dataset",
    "output_dir",
    "resume",
    "evaluate_only",
    "progress",
    "verbose",
)
"""Options that other lines of the header show, or that the user sees."""

UNTITLED = ("lr", VIRTUAL_SECONDS)
"""Entries of logs that the table does not contain."""

_log = logging.getLogger("pydtnn.train")


def describe_job(job: Job) -> list[tuple[str, str]]:
    """Return name and value of the header's lines."""
    config, trainer = job.config, job.trainer
    model, comm = trainer.model, trainer.comm
    backend = model.backend
    parameters, ranks = model.whole.size, trainer.setup.data.size
    shape = " x ".join(map(str, job.train.input_shape))
    total, hosts = job.work.batch, len(set(comm.hosts))
    samples = f"{len(job.train):,} training and {len(job.validation):,} validation samples"
    device = f"{backend.name} ({backend.isa})" if backend.isa else backend.name
    threads = "" if backend.name == "cuda" else f" x {_count(backend.threads, 'thread')}"
    rows = [
        ("model", f"{config.model}, {parameters:,} parameters"),
        ("data", f"{job.train.name}, {samples} of {shape}, {job.train.classes} classes"),
    ]
    if not config.evaluate_only:
        steps = f"{_count(config.epochs, 'epoch')} of {_count(job.steps_per_epoch, 'step')}"
        rows.append(("batch", f"{-(-total // ranks)} per rank, {total} in total; {steps}"))
    rows += [
        ("ranks", f"{comm.size}{threads} on {_count(hosts, 'host')}"),
        ("device", f"{device}, {model.dtype.name}"),
    ]
    if trainer.setup.mesh is not None:
        rows.insert(-1, ("mesh", describe_mesh(trainer.setup.mesh)))
    if options := not_default(config):
        rows.append(("options", options))
    if not config.evaluate_only:
        rows.append(("run folder", str(job.directory)))
    return rows


def not_default(config: TrainConfig) -> str:
    """Return the options that differ from the defaults, as they are typed.

    >>> not_default(TrainConfig(epochs=8, augment="crop:4,flip", overlap=False))
    '--augment crop:4,flip --epochs 8 --scheme allreduce:overlap=false'
    """
    usual = flags(TrainConfig).items()
    other = [own for name, own in usual if getattr(config, name) != own.default]
    names = [own.owner or own.name for own in other if own.name not in SHOWN_ELSEWHERE]
    return " ".join(typed(config, name) for name in dict.fromkeys(names))


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def write_run_files(job: Job) -> None:
    """Write run.json: configuration, command, versions, ranks, threads, device and commit.

    The network is in model.json, as in a saved model, unless an option of a layer cannot be saved.
    With several ranks, call it on one of them.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    trainer = job.trainer
    backend, optimizer = trainer.model.backend, trainer.optimizer
    content = {
        "configuration": asdict(job.config),
        "command": shlex.join(sys.orig_argv),
        "started": _now(),
        "ranks": trainer.comm.size,
        "mesh": None if trainer.setup.mesh is None else trainer.setup.mesh.shape,
        "hosts": len(set(trainer.comm.hosts)),
        "threads": backend.threads,
        "device": backend.name,
        "instruction_set": backend.isa,
        "gpu": describe_gpu(job),
        "tuning": backend.autotuner.mode,
        "parameters": trainer.model.whole.size,
        "samples": {"train": len(job.train), "validation": len(job.validation)},
        "global_batch_size": job.work.batch,
        "steps_per_epoch": job.steps_per_epoch,
        "schedule": repr(optimizer.schedule),
        "weight_decay": optimizer.weight_decay,
        "predicted": None if job.predicted is None else asdict(job.predicted),
        "failures": [] if job.survival is None else job.survival.about(),
        "environment": job.about.get("environment") or collect(),  # of an earlier attempt
    }
    job.about = content
    _write_about(job)
    try:
        text = describe_model(trainer.model, trainer.model.inputs or inputs_of(job.train))
    except ValueError as error:
        _log.debug("%s was not written: %s", MODEL_FILE, error)
        return
    write_file(MODEL_FILE, job.directory / MODEL_FILE, text)


def write_end(job: Job) -> None:
    """Add to run.json when the run has ended, unless it was interrupted.

    With several ranks, call it on one of them.
    """
    job.about["ended"] = _now()
    if job.survival is not None:
        job.about["failures"] = job.survival.about()
    _write_about(job)


def _write_about(job: Job) -> None:
    text = json.dumps(job.about, indent=2, default=str) + "\n"
    write_file(RUN_FILE, job.directory / RUN_FILE, text.encode())


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def log_details(job: Job) -> None:
    """Log the parts that the library has chosen, for `--verbose`."""
    trainer = job.trainer
    backend, comm, buckets = trainer.model.backend, trainer.comm, trainer.model.buckets
    largest = max(bucket.grads.nbytes for bucket in buckets)
    total = sum(bucket.grads.nbytes for bucket in buckets)
    _log.debug("optimizer: %s, %r", type(trainer.optimizer).__name__, trainer.optimizer.schedule)
    _log.debug("scheme: %s", typed(job.config, "scheme").partition(" ")[2])
    _log.debug("buckets: %d, up to %d of %d B of gradients", len(buckets), largest, total)
    allreduce = explain(comm.hosts) if job.config.allreduce == RULE else job.config.allreduce
    _log.debug("allreduce: %s", allreduce if comm.size > 1 else "none: there is one rank")
    _log.debug("transport: %s", comm.transport or "arrays in host memory")
    _log.debug("tuning: %s", backend.autotuner.mode)


def print_report(job: Job) -> None:
    """Print the table at the end of a run: results, throughput and time per activity.

    Collective: all ranks call it; rank 0 prints.
    """
    comm = job.trainer.comm
    short = 0 if job.predicted is None else job.predicted.warm
    warm, times = ({}, {}) if job.meter is None else job.meter.after(short)
    own = {
        "seconds": job.trainer.seconds,
        "peak": peak_memory(),
        "times": times,
        "warm": warm,
        "bytes": comm.traffic.bytes - job.sent_before,
        "process": comm.share(lambda: comm.rank),
        "gpu_peak": getattr(job.trainer.model.backend.memory, "peak_held", 0),
    }
    ranks = comm.gather_object(own)
    if comm.rank == 0:
        if short:
            job.predicted = job.predicted.by_steps(_times(ranks, "warm"), _times(ranks))
        if job.about:
            job.about["measured"] = _times(ranks) or None
            job.about["predicted"] = None if job.predicted is None else asdict(job.predicted)
        lines = align(_rows(job, ranks), 2)
        title = f"{job.config.model} on {job.train.name}"
        rule = "-" * min(max(map(len, [title, *lines])), 100)  # as wide as most terminals
        print(printable("\n".join(["", title, rule, *lines])), flush=True)


def describe_gpu(job: Job) -> dict[str, Any]:
    """Return name, libraries, precision and transport of the GPU; empty for other devices."""
    trainer = job.trainer
    backend = trainer.model.backend
    if backend.name != "cuda":
        return {}
    cuda = cast("CudaBackend", backend)
    return {
        "name": cuda.gpu,
        "libraries": list(cuda.versions),
        "tf32": cuda.tf32,
        "graph": trainer.steps.graph,
        "images": _images(job),
        "transport": trainer.comm.transport,
    }


def _images(job: Job) -> str:
    """Describe where images are augmented and normalised, and why if not on the GPU."""
    shards = job.trainer.exchange.sums.shards or job.trainer.setup.data.size
    total = job.work.batch
    loader = job.trainer.setup.loader(job.train, total, shards, **changes_of(job.config))
    why_not = loader.why_not_raw
    return f"prepared on the host: {why_not}" if why_not else "prepared on the GPU"


def _rows(job: Job, ranks: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return name and value of each line, results first: mean times of ranks, maximum memory."""
    trainer = job.trainer
    backend = trainer.model.backend
    steps, communication, data, evaluation = (
        sum(r["seconds"][part] for r in ranks) / len(ranks)
        for part in ("steps", "communication", "data", "evaluation")
    )
    wall = steps + data
    last = trainer.history[-1] if trainer.history else {}
    megabytes = max(r["bytes"] for r in ranks) / 1e6
    gpu_peak = max(r["gpu_peak"] for r in ranks)
    exchanged = [("exchanged per rank", f"{megabytes:.1f} MB")] if len(ranks) > 1 else []
    threads = f"with {backend.threads} thread{'s' * (backend.threads > 1)} each"
    # Messages between GPUs are asynchronous; the host cannot measure how long they take.
    times = [("time in steps", f"{steps:.1f} s")]
    if backend.name != "cuda" or not trainer.comm.capturable:
        times = [
            ("time in compute", f"{steps - communication:.1f} s"),
            ("time in communication", f"{communication:.1f} s not overlapped with computation"),
        ]
    results = [
        (_title(name), f"{value:.4f}") for name, value in last.items() if name not in UNTITLED
    ]
    virtual = []
    if job.config.virtual_ranks:
        virtual = find_tool("virtual_ranks").describe(job, steps - communication + data, wall)
    processes = Counter(r["process"] for r in ranks)
    each, shared = "per rank", list[tuple[str, str]]()
    if job.config.exact_mesh:
        share = f"{communication / steps if steps else 0:.0%} of the time in steps"
        text = f"{len(processes)} with up to {max(processes.values())} ranks; messages, sums and "
        text += f"waits for ranks of the same process take {share}"
        each, shared = "per process", [("processes", text)]
    compared = [] if job.predicted is None else job.predicted.rows(_times(ranks))
    return [
        ("epochs", f"{trainer.epoch}, in steps of {job.work.batch} samples"),
        *_best(job),
        *sorted(results, key=lambda row: not row[0].startswith("validation")),
        ("samples/s", f"{trainer.samples_seen / wall:.0f}" if wall else "no step was executed"),
        *virtual,
        *times,
        ("time waiting for data", f"{data:.1f} s"),
        ("time in evaluation", f"{evaluation:.1f} s"),
        *exchanged,
        (
            "peak memory " + ("of all ranks" if job.config.virtual_ranks else each),
            f"{max(r['peak'] for r in ranks) / 1e6:.0f} MB",
        ),
        *([("peak memory per GPU", f"{gpu_peak / 1e6:.0f} MB")] if backend.name == "cuda" else []),
        ("ranks", f"{len(ranks)}, {'each on a GPU' if backend.name == 'cuda' else threads}"),
        *shared,
        *_gpu(job),
        *_communication(job),
        *[("failure", str(failure)) for failure in (job.survival.failures if job.survival else ())],
        *(compared if job.config.verbose else compared[:2]),
        ("run folder", str(job.directory)),
    ]


def _best(job: Job) -> list[tuple[str, str]]:
    """Return the line with the best epoch, whose weights are in a file."""
    for callback in job.trainer.callbacks:
        if isinstance(callback, BestWeights) and callback.best is not None:
            epoch = job.trainer.epoch - callback.waited
            text = f"{callback.best:.4f} after epoch {epoch}, in {callback.path.name}"
            return [(f"best {_title(callback.monitor)}", text)]
    return []


def _times(ranks: list[dict[str, Any]], which: str = "times") -> dict[str, float]:
    """Return the times of a step, the mean of all ranks, and the most memory of a rank."""
    times = [rank[which] for rank in ranks]
    if not all(times):
        return {}
    mean = {name: sum(own[name] for own in times) / len(times) for name in times[0]}
    return mean | {"memory": max(own["memory"] for own in times)}


def _gpu(job: Job) -> list[tuple[str, str]]:
    """Return the lines that describe the GPU."""
    gpu = describe_gpu(job)
    if not gpu:
        return []
    tf32 = "float32 rounded to TF32 in products" if gpu["tf32"] else "no TF32"
    dtype = job.trainer.model.dtype.name
    return [
        ("GPU", ", ".join([gpu["name"], *gpu["libraries"]])),
        ("precision", f"{dtype}, {tf32}" if dtype == "float32" else dtype),
        ("steps", gpu["graph"]),
        ("images", gpu["images"]),
        *([("between GPUs", gpu["transport"])] if gpu["transport"] else []),
    ]


def _communication(job: Job) -> list[tuple[str, str]]:
    """Return the lines that describe the allreduce, if there are several ranks."""
    config, inner = job.config, job.trainer.comm.summing
    if config.exact_mesh:
        return [("allreduce", "in the order of the ranks")]
    if config.allreduce != RULE:
        return [("allreduce", config.allreduce)]
    if isinstance(inner, Ruled) or (inner.size == inner.local_size > 1 and not inner.capturable):
        return [("allreduce", explain(inner.hosts))]
    return []


def _title(name: str) -> str:
    """Return the title of a logged value: "val_loss" is "validation loss"."""
    part = "validation" if name.startswith("val_") else "training"
    return f"{part} {name.removeprefix('val_').replace('_', ' ')}"
