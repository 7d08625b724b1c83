"""Time to accuracy: both sides make the same updates, and complete seeds are not trained again."""

import json
import sys
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from tests.each import each


def seed(*accuracies):
    return {side: [[n, a] for a in accuracies] for n, side in ((1.0, "ours"), (2.5, "eager"))}


def test_seeds_in_the_file_of_results_are_not_trained_again(tmp_path, monkeypatch, capsys):
    from benchmarks import time_to_accuracy as program

    trained = []

    def train_seed(options, sides, number, epochs):
        trained.append(number)
        return seed(0.5, 0.99 + number / 1000)

    monkeypatch.setattr(program, "train_seed", train_seed)
    arguments = ["--recipe=mnist-99", f"--results={tmp_path / 'r'}", "--sides", "ours", "eager"]
    others = (["--epochs=3", "--lr=0.1"], ["--lr=0.1", "--epochs=3"])
    for seeds, more in ((2, []), (3, []), *((1, options) for options in others)):
        monkeypatch.setattr(sys, "argv", ["program", *arguments, f"--seeds={seeds}", *more])
        program.main()
    assert trained == [0, 1, 2, 0]  # with other values, anew; in another order, not
    assert [json.loads(row)["seed"] for row in (tmp_path / "r").read_text().splitlines()] == trained
    printed = capsys.readouterr().out.split()
    assert printed.count("2.5") == 4
    assert "99.10" in printed  # the mean of three seeds


def test_the_time_to_an_accuracy_is_that_of_the_first_epoch_that_reaches_it():
    from benchmarks.time_to_accuracy import until

    assert until([(1.0, 0.5), (2.0, 0.9), (4.0, 0.95)], 0.9) == 3.0
    assert until([(1.0, 0.5)], 0.9) == float("inf")


@pytest.mark.long
@each("rule", ["sgd:nesterov=true", "muon"])
def test_both_sides_make_the_same_updates(rule, tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from benchmarks.common.torch_twin import Twin, channels_last, pairs, to_torch
    from benchmarks.time_to_accuracy import Ours, Theirs, Update
    from pydtnn.cli.build import create_job
    from pydtnn.data import Loader

    options = ["--recipe=mnist-99", "--dataset=digits", "--steps-per-epoch=4", "--epochs=1"]
    options += ["--model=whitened_cnn:widths=[4,8],residual=[0,1]", "--augment=:moved=1"]
    options += ["--dtype=float64", f"--optimizer={rule}"]
    if rule == "muon":
        options.append("--momentum=null")
    sides = Ours(options, 3), Theirs(options, 3, compiled=False)
    for side in sides:
        side.turns(lambda seconds: 1)
    assert sides[0].epochs[0][1] == sides[1].epochs[0][1]
    job = create_job(replace(sides[0].config, fusion=False), sides[0].comm, 1, tmp_path)
    twin = Twin(job.trainer.model)
    update = Update(job, twin)
    with Loader(job.train, global_batch_size=32, dtype="float64") as loader:
        for batch in islice(loader.epoch(0), 4):
            job.trainer.train_step(batch)
            x, y = to_torch(batch.x), torch.from_numpy(batch.y)
            torch.nn.functional.cross_entropy(twin(x), y, label_smoothing=0.1).backward()
            update.step()
    for layer, module in zip(twin.layers, twin.steps, strict=True):
        for p, tensor in pairs(layer, module):
            other = channels_last(layer, tensor).detach().numpy().reshape(p.shape)
            np.testing.assert_allclose(other, p.master, atol=1e-11, err_msg=p.name)
