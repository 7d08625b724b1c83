"""The code blocks of docs/tracing.md run and do what they say."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.cli.config import TrainConfig, flags
from pydtnn.comm import Communicator, run_threads
from pydtnn.data import ArrayDataset
from pydtnn.layers import Flatten, Linear, ReLU, Sequential
from pydtnn.model import Model
from pydtnn.tools.tracing import load_timeline
from pydtnn.tools.tracing.exports import FORMATS
from pydtnn.training.trainer import Trainer
from pydtnn.utils.observer import Kind, Observer
from tests.tools.tracing.synthetic import MS, write_run

TEXT = (Path(__file__).parents[3] / "docs" / "tracing.md").read_text()
BLOCKS = dict(re.findall(r"```python\n# (\w+)\n(.*?)```", TEXT, re.DOTALL))


def small() -> tuple[Model, ArrayDataset]:
    rng = np.random.default_rng(0)
    data = ArrayDataset(rng.normal(size=(512, 4, 4, 1)), rng.integers(0, 3, 512))
    net = Sequential(Flatten(), Linear(8), ReLU(), Linear(3, name="head"))
    return Model(net, (4, 4, 1), backend="numpy"), data


def test_the_trace_in_python_has_the_chosen_steps(tmp_path):
    def rank(comm: Communicator) -> None:
        model, data = small()
        names: dict[str, Any] = {"Trainer": Trainer, "model": model, "data": data}
        exec(BLOCKS["trace"], names | {"folder": tmp_path})

    run_threads(2, rank)
    steps = load_timeline(tmp_path).steps
    assert steps.epochs.tolist() == [0] * 6 + [1] * 4
    assert steps.numbers.tolist() == [*range(10, 16), *range(4)]


def test_the_observer_adds_up_the_time_of_layers():
    names: dict[str, Any] = {"Observer": Observer, "Kind": Kind, "time": time}
    exec(BLOCKS["observer"], names)
    model, data = small()
    times = names["LayerTimes"]()
    start = time.perf_counter()
    Trainer(model, "sgd", observers=[times], progress=False).fit(data)
    elapsed = time.perf_counter() - start
    layers = [node.name for node in model.graph.nodes[1:]]
    passes = {(name, kind) for name in layers for kind in ("FORWARD", "BACKWARD")}
    assert passes - {("flatten0", "BACKWARD")} <= set(times.seconds)
    assert 0 < sum(times.seconds.values()) < elapsed
    assert not times.open


def test_the_analysis_in_python_prints_efficiency_slow_ranks_and_causes(tmp_path, capsys):
    write_run(tmp_path, slower=lambda rank, *where: 9 * MS * ((rank, where[-1]) == (1, "data")))
    exec(BLOCKS["analysis"], {"folder": tmp_path})
    parallel, slow, late = capsys.readouterr().out.splitlines()
    assert 0.5 < float(parallel) < 1
    assert slow.split()[:2] == ["1", "data"]
    assert late.startswith("PathPart(rank=1")


def test_formats_options_and_kinds_of_activities_are_described():
    table = TEXT.partition("## Other tools")[2]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == {*FORMATS}
    given = [own for own in flags(TrainConfig).values() if own.name.startswith("trace")]
    options = {own.label.replace("--trace ", "--trace FOLDER:") for own in given}
    described = re.findall(r"^\| `(--trace FOLDER:\w+|--trace)", TEXT, re.MULTILINE)
    assert options == set(described)
    described = re.findall(r"`([A-Z]+)`", TEXT.partition("## What is recorded")[2])
    assert {kind.name for kind in Kind} <= set(described)
