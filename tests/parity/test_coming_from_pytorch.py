"""What docs/coming_from_pytorch.md says, carried out in both libraries."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Serial
from pydtnn.data import ArrayDataset
from pydtnn.layers import BatchNorm, Conv2d, Flatten, Linear, Net, Sequential, Tanh
from pydtnn.model import Model
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce
from pydtnn.training.trainer import Trainer

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")
F = torch.nn.functional

DOC = Path(__file__).parents[2] / "docs" / "coming_from_pytorch.md"


def model(net: Net, shape: tuple[int, ...]) -> Model:
    return Model(net, shape, backend="numpy", dtype="float64")


def test_every_test_that_the_page_names_is_here():
    named = set(re.findall(r"\[([a-z ]+)\](?!\()", DOC.read_text()))
    tests = {name.removeprefix("test_").replace("_", " ") for name in globals()}
    assert named
    assert named <= tests, named - tests
    assert "docs/coming_from_pytorch.md" in (DOC.parents[1] / "README.md").read_text()


def test_channels():
    names: dict[str, Any] = {}
    exec(re.search(r"```python\n# convert\n(.*?)```", DOC.read_text(), re.DOTALL)[1], names)
    theirs = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, groups=1), torch.nn.Flatten(), torch.nn.Linear(4 * 5 * 6, 2)
    )
    ours = model(Sequential(Conv2d(4, 3), Flatten(), Linear(2)), (7, 8, 3))
    w, b, matrix, last = (p.detach().numpy() for p in theirs.parameters())
    new = [names["filters"](w), b, names["after_flatten"](matrix, 4, 5, 6), last]
    parameters = dict(ours.parameters)
    order = ["conv2d0.w", "conv2d0.b", "linear2.w", "linear2.b"]
    ours.load(dict(zip(order, new, strict=True)))
    assert set(order) == set(parameters)
    x = np.random.default_rng(0).normal(size=(2, 7, 8, 3))
    expected = theirs(torch.from_numpy(x.transpose(0, 3, 1, 2).copy())).detach().numpy()
    np.testing.assert_allclose(ours.predict(x), expected, rtol=1e-10, atol=1e-12)


def test_initial_values():
    torch.manual_seed(0)
    w, b = (model(Linear(300), (200,)).parameters[f"linear.{n}"].value for n in "wb")
    theirs = torch.nn.Linear(200, 300)
    assert not b.any()
    assert abs(theirs.bias.detach().numpy()).max() == pytest.approx(200**-0.5, rel=0.05)
    # of 60,000 uniform numbers the largest is within a thousandth of the limit
    assert abs(w).max() == pytest.approx(math.sqrt(6 / 500), rel=1e-3)
    assert abs(theirs.weight.detach().numpy()).max() == pytest.approx(200**-0.5, rel=1e-3)
    filters = model(Conv2d(64, 3), (4, 4, 32)).parameters["conv2d.w"].value
    # the deviation of 18,432 normal numbers: its own is half a percent
    assert filters.std() == pytest.approx(math.sqrt(2 / (9 * 32)), rel=0.03)


def train(net: Net, x: Any, y: Any, optimizer: Any, **options: Any) -> Trainer:
    trainer = Trainer(model(net, x.shape[1:]), optimizer, exchange=AllReduce(Serial()), **options)
    trainer.fit(ArrayDataset(x, y), global_batch_size=len(x) - len(x) % 4 or 1)
    return trainer


def test_freezing():
    x, y = np.random.default_rng(0).normal(size=(8, 3)), np.arange(8) % 2
    theirs = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)).double()
    for p in theirs[0].parameters():
        p.requires_grad = False
    net = model(Sequential(BatchNorm(name="n"), Linear(2, name="head")), (3,))
    start = {"head.w": theirs[1].weight.detach().numpy(), "head.b": theirs[1].bias.detach().numpy()}
    net.load({**net.state(), **start})
    net.freeze("n")
    trainer = Trainer(net, SGD(0.1), exchange=AllReduce(Serial()))
    trainer.fit(ArrayDataset(x, y), epochs=1, batch_size=8)
    theirs(torch.from_numpy(x))
    assert theirs[0].running_mean.any()  # updated although its parameters are constant
    assert not net.state()["n.running_mean"].any()
    frozen = torch.nn.BatchNorm1d(3).double().eval()
    loss = F.cross_entropy(theirs[1](frozen(torch.from_numpy(x))), torch.from_numpy(y))
    loss.backward()
    expected = start["head.w"] - 0.1 * theirs[1].weight.grad.numpy()
    np.testing.assert_allclose(net.state()["head.w"], expected, rtol=1e-10)


def test_parameter_groups():
    x, y = np.random.default_rng(0).normal(size=(8, 3)), np.arange(8) % 2
    theirs = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    theirs = theirs.double()
    net = model(Sequential(Linear(4, name="body"), Tanh(), Linear(2, name="head")), (3,))
    order = ("body.w", "body.b", "head.w", "head.b")
    values = [p.detach().numpy().copy() for p in theirs.parameters()]
    net.load(dict(zip(order, values, strict=True)))
    groups = {"head": {"lr_factor": 10, "weight_decay": 0.01}}
    trainer = Trainer(net, SGD(0.02, momentum=0.9, groups=groups), exchange=AllReduce(Serial()))
    trainer.fit(ArrayDataset(x, y), epochs=3, batch_size=8)
    rule = torch.optim.SGD(
        [
            {"params": theirs[0].parameters()},
            {"params": theirs[2].parameters(), "lr": 0.2, "weight_decay": 0.01},
        ],
        lr=0.02,
        momentum=0.9,
    )
    for _ in range(3):
        rule.zero_grad()
        F.cross_entropy(theirs(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        rule.step()
    for name, p in zip(order, theirs.parameters(), strict=True):
        np.testing.assert_allclose(net.state()[name], p.detach().numpy(), rtol=1e-9, atol=1e-12)


def test_clipping():
    g = np.array([3.0, 4.0])
    theirs = torch.nn.Parameter(torch.zeros(2))
    theirs.grad = torch.from_numpy(g.copy())
    torch.nn.utils.clip_grad_norm_([theirs], 1.0)
    ours = model(Linear(1, bias=False), (2,))
    optimizer = SGD(1.0, clip_norm=1.0)
    optimizer.bind(ours.backend, ours.buffers)
    ours.parameters["linear.w"].grad[...] = g
    optimizer.step()
    np.testing.assert_allclose(ours.parameters["linear.w"].grad[0], g / 5, rtol=1e-15)
    np.testing.assert_allclose(theirs.grad.numpy(), g / (5 + 1e-6), rtol=1e-15)
