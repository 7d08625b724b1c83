"""The code blocks of docs/extending.md run, do what they say, and are as short as promised."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn import layers
from pydtnn.comm import create_communicator, run_threads
from pydtnn.comm.exchange import AllReduce, GradientExchange
from pydtnn.data import ArrayDataset
from pydtnn.layers import Layer, Linear, Sequential
from pydtnn.model import Model
from pydtnn.optimizers import SGD, Optimizer
from pydtnn.testing import check_layer
from pydtnn.trainer import Trainer

DOC = Path(__file__).parent.parent / "docs" / "extending.md"
BLOCKS = dict(re.findall(r"```python\n# (\w+)\n(.*?)```", DOC.read_text(), re.DOTALL))
LIMITS = {"layer": 12, "optimizer": 8, "schedule": 3, "scheme": 10}


def run(block: str) -> Any:
    """Execute a block and return what it defines."""
    names: dict[str, Any] = {"np": np, "Layer": Layer, "Optimizer": Optimizer}
    names |= {"GradientExchange": GradientExchange} | vars(layers)
    before = set(names)
    exec(BLOCKS[block], names)
    (name,) = set(names) - before - {"__builtins__"}
    return names[name]


def lines_of_code(source: str) -> int:
    """Count lines without blank ones and docstrings."""
    documented = (ast.ClassDef, ast.FunctionDef)
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node):
            first = node.body[0]
            docstrings |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = enumerate(source.splitlines(), start=1)
    return sum(bool(text.strip()) and number not in docstrings for number, text in lines)


def problem(seed: int = 0) -> ArrayDataset:
    """A linear classification that every rule should get better at."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(96, 5)).astype("float32")
    return ArrayDataset(x, (x @ rng.normal(size=(5, 3))).argmax(axis=1))


def losses(optimizer: Optimizer, exchange: GradientExchange, epochs: int = 4) -> list[float]:
    model = Model(Sequential(Linear(3)), (5,), backend="numpy", dtype="float64")
    trainer = Trainer(model, optimizer, exchange=exchange)
    return [logs["loss"] for logs in trainer.fit(problem(), epochs=epochs, global_batch_size=16)]


@pytest.mark.parametrize(("block", "limit"), LIMITS.items())
def test_an_extension_is_as_short_as_promised(block: str, limit: int) -> None:
    assert lines_of_code(BLOCKS[block]) <= limit


@pytest.mark.parametrize("block", ["layer", "parameters"])
def test_the_layers_have_right_gradients(block: str) -> None:
    check_layer(run(block)(), (4, 4, 3))


def test_the_optimizer_rule_learns() -> None:
    history = losses(run("optimizer")(lr=0.02), AllReduce(create_communicator("serial")))
    assert history[-1] < 0.7 * history[0]


def test_the_schedule_sets_the_learning_rate() -> None:
    schedule = run("schedule")
    optimizer = SGD(schedule)
    losses(optimizer, AllReduce(create_communicator("serial")), epochs=2)
    assert optimizer.iterations == 12
    assert optimizer.lr_now == schedule(11)


def test_the_scheme_learns_and_ends_with_equal_parameters() -> None:
    scheme = run("scheme")

    def rank(comm: Any) -> tuple[list[float], np.ndarray]:
        exchange = scheme(comm)
        history = losses(SGD(0.2), exchange)
        exchange.average_parameters()
        return history, exchange.buckets[0].values.copy()

    (first, weights), *others = run_threads(3, rank)
    assert first[-1] < 0.7 * first[0]
    for history, other in others:
        assert history == first
        np.testing.assert_array_equal(other, weights)


def test_the_model_is_built_for_classes_and_a_shape() -> None:
    net = run("model")(7, (12, 10, 3))
    assert Model(net, (12, 10, 3), backend="numpy").output_shape == (7,)
