"""Random combinations of features, and what trainer, command line and oracle make of each."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn import ArrayDataset, Mesh, Trainer
from pydtnn.comm import Communicator, run_threads
from pydtnn.optimizers import OPTIMIZERS
from pydtnn.parallel.compression import COMPRESSORS
from pydtnn.parallel.schemes import SCHEMES
from pydtnn.tools.perfmodel.compute.analytic import AnalyticCosts
from pydtnn.tools.perfmodel.dry_step import DryStep
from pydtnn.tools.perfmodel.oracle.ranking import Oracle
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.projection import Projector, without_formula
from pydtnn.train import main
from pydtnn.training.workload import Workload
from pydtnn.utils.errors import RankError

SHAPE, CLASSES, BATCH, HIDDEN = (8, 8, 1), 4, 16, [8, 8, 8]

AXES: tuple[dict[str, int], ...] = (
    {"data": 2},
    {"data": 3},
    {"pipeline": 2},
    {"data": 2, "pipeline": 2},
    {"filter": 2},
    {},
)
"""Of meshes; more of those along which features exclude each other."""


SCHEDULES = ("1f1b", "gpipe", "zb_h1", "chimera")


def draw(rng: np.random.Generator) -> dict[str, Any]:
    """Draw options of a run by name, as a workload and the command line have them."""

    def some(share: float, name: str, values: Any) -> dict[str, Any]:
        return {name: values[rng.integers(len(values))]} if rng.random() < share else {}

    axes = AXES[rng.integers(len(AXES))]
    staged = "pipeline" in axes
    options: dict[str, Any] = {"axes": axes, "optimizer": "sgd"}
    options |= some(0.4, "optimizer", [*OPTIMIZERS]) | some(0.5, "scheme", [*SCHEMES])
    options |= some(0.3, "compress", [*COMPRESSORS]) | some(0.2, "accumulation", [2])
    options |= some(0.4 if staged else 0.1, "micro_batches", [2, 4])
    options |= some(0.2, "sync_batch_norm", [True]) | some(0.2, "dtype", ["float64"])
    options |= some(0.5, "pipeline_schedule", SCHEDULES) if staged else {}
    options |= some(0.2, "exact", [True])
    if "exact" in options:
        options["tuning"] = "fixed"
    return options


def work_of(options: dict[str, Any]) -> Workload:
    """Return the description of a run."""
    model_options = {"hidden": HIDDEN}
    rule = {"optimizer_options": {"lr": 0.01}}
    return Workload("mlp", SHAPE, CLASSES, BATCH, model_options=model_options, **rule | options)


def refusal(call: Callable[[], object]) -> str:
    """Return the sentence with which something is refused; empty if it is not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few micro-batches
        try:
            call()
        except (RankError, ValueError) as error:
            return str(error)
    return ""


def table_of(work: Workload) -> str:
    """Return the sentence of the table about a run, of any stage."""

    def check() -> None:
        for stage in range(work.stages):
            work.check(DryStep(work, work.create_backend(), stage=stage).model)

    return refusal(check)


def train(work: Workload, comm: Communicator) -> None:
    """Train an epoch of two steps."""
    mesh = Mesh(comm, **work.axes) if work.axes else None
    model = work.create_model(work.create_net(), work.create_backend(), mesh)
    exchange = work.create_exchange(comm if mesh is None else mesh.data)
    parts = {"exchange": exchange, "mesh": mesh, **work.trainer_options()}
    trainer = Trainer(model, work.create_optimizer(), progress=False, metrics=(), **parts)
    rng = np.random.default_rng(0)
    y = rng.integers(CLASSES, size=2 * BATCH)
    trainer.fit(ArrayDataset(rng.random((len(y), *SHAPE)), y), global_batch_size=BATCH)


def command_of(options: dict[str, Any]) -> list[str]:
    """Return the options as they are typed, of a run on virtual ranks."""
    work, given = work_of(options), dict(options)
    axes = given.pop("axes")
    line = ["--model", "mlp", "--model-options", f'{{"hidden": {HIDDEN}}}', "--quiet"]
    shape = f'"shape": {[*SHAPE]}, "classes": {CLASSES}'
    line += ["--dataset-options", f'{{"samples": {2 * BATCH}, "test_samples": 4, {shape}}}']
    line += ["--global-batch-size", str(BATCH), "--epochs", "1", "--lr", "0.01", "--threads", "1"]
    line += ["--virtual-ranks", str(work.ranks), "--platform", "cpu-10gbit"]
    line += ["--loader-threads", "0", "--checkpoint-epochs", "0"]
    if axes:
        line += ["--parallel", ",".join(f"{axis}={n}" for axis, n in axes.items())]
    for name, value in given.items():
        label = "--" + name.replace("_", "-")
        line += [label] if value is True else [label, str(value)]
    return line


def run(options: dict[str, Any], folder: Path) -> tuple[int, str]:
    """Return the status of a command line, and what it wrote on the standard error."""
    told = io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
        status = main([*command_of(options), "--output-dir", str(folder)])
    return status, told.getvalue()


def proposed(work: Workload) -> bool:
    """Return whether the oracle takes a run to be possible, as far as it has formulas."""
    platform = Platform.load("cpu-10gbit")
    plain = replace(work, axes={}, micro_batches=None, scheme="allreduce", compress=None)
    oracle = Oracle(Projector(plain, platform, AnalyticCosts.of(plain, platform)))
    return without_formula(work) == "" and oracle.entry(work).possible


def judge(options: dict[str, Any], folder: Path) -> str:
    """Assert that all answer alike; return the sentence of the table, empty if it runs."""
    work = work_of(options)
    why = table_of(work)
    refused = refusal(lambda: run_threads(work.ranks, lambda comm: train(work, comm)))
    status, told = run(options, folder)
    if why:
        assert why in refused, (options, why, refused)
        assert status != 0, options
        assert len(told.splitlines()) == 1, told
        assert "Traceback" not in told, told
    else:
        assert refused == "", (options, refused)
        assert (status, told) == (0, ""), (options, status, told)
    assert not (why and proposed(work)), options
    return why
