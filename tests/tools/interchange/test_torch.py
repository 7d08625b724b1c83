"""Networks of PyTorch, written by hand, compute the same here, and the other way round."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.layers import Linear
from pydtnn.model import Model
from pydtnn.saving.weights import encode
from pydtnn.tools.interchange import load_state_dict, save_state_dict, state_dict
from tests.each import each
from tests.tools.interchange.twins import SHAPE, TWINS, logits, torch, twins

CASES = [*((name, ".pt") for name in TWINS), ("cnn", ".pth"), ("resnet8", ".safetensors")]


@pytest.fixture
def images(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=(3, *SHAPE))


def assert_equal(ours: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9 * np.abs(theirs).max())


def save(module: Any, path: Path) -> Path:
    """Write the state dict of a module as a user of PyTorch does."""
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file(module.state_dict(), path)
    else:
        torch.save(module.state_dict(), path)
    return path


@each(("name", "suffix"), CASES)
def test_weights_give_the_same_logits_there_and_here(name, suffix, tmp_path, images):
    module, model = twins(name)
    report = load_state_dict(model, save(module, tmp_path / f"net{suffix}"))
    assert report.by == "names"
    assert not report.misfits
    before = logits(module, images)
    assert_equal(model.predict(images), before)
    _, model = twins(name)  # with other weights
    model.statistics.running[:] = np.random.default_rng(1).uniform(0.5, 1.5, 1)
    save_state_dict(model, tmp_path / f"ours{suffix}", like=module.state_dict())
    if suffix == ".safetensors":
        from safetensors.torch import load_file

        arrays = load_file(tmp_path / f"ours{suffix}")
    else:
        arrays = torch.load(tmp_path / f"ours{suffix}", weights_only=True)
        assert list(arrays) == list(module.state_dict())
    module.load_state_dict(arrays)
    assert_equal(model.predict(images), logits(module, images))
    assert np.abs(before - logits(module, images)).max() > 1e-3


@each("name", ["cnn", "positions"])
def test_names_are_those_of_modules_with_the_names_of_the_layers(name, images):
    module, model = twins(name)
    module.load_state_dict({k: torch.from_numpy(a.copy()) for k, a in state_dict(model).items()})
    assert_equal(model.predict(images), logits(module, images))


def test_checkpoints_and_parallel_modules_are_read(tmp_path, images):
    module, model = twins("resnet8")
    entries = {f"module.{name}": tensor for name, tensor in module.state_dict().items()}
    torch.save({"epoch": 3, "state_dict": entries}, tmp_path / "checkpoint.pt")
    load_state_dict(model, tmp_path / "checkpoint.pt")
    assert_equal(model.predict(images), logits(module, images))


def test_bfloat16_and_float8_of_safetensors_are_read(tmp_path):
    from safetensors.torch import save_file

    for i, dtype in enumerate((torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)):
        weight, model = torch.tensor([[1.5, -2.0]]).to(dtype), Model(Linear(1, bias=False), (2,))
        save_file({"weight": weight}, tmp_path / f"{i}.safetensors")
        load_state_dict(model, tmp_path / f"{i}.safetensors")
        np.testing.assert_array_equal(model.state()["linear.w"], [[1.5, -2.0]])
    load_state_dict(model, {"weight": torch.tensor([[0.5, -1.0]], dtype=torch.bfloat16)})
    np.testing.assert_array_equal(model.state()["linear.w"], [[0.5, -1.0]])


def test_an_index_of_several_files_is_read(tmp_path, images):
    module, model = twins("resnet8")
    arrays, parts = module.state_dict(), {}
    for i in range(3):
        part = dict([*arrays.items()][i::3])
        path = tmp_path / f"model-{i + 1:05}-of-00003.bin"
        torch.save(part, path)
        parts |= dict.fromkeys(part, path.name)
    index = tmp_path / "model.bin.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": parts}))
    report = load_state_dict(model, index)
    assert not report.misfits
    assert_equal(model.predict(images), logits(module, images))
    for weight_map, message in (
        (parts | {"conv1.weight": "../model.bin"}, "expected plain names of files in"),
        (parts | {"conv1.weight": "model-9.bin"}, "model-9.bin does not exist"),
        ([], "expected JSON with a weight_map of names"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises((OSError, ValueError), match=message):
            load_state_dict(model, index)


@dataclasses.dataclass
class Options:
    lr: float = 0.1


@each(("protocol", "before_1_6"), [(2, False), (4, True)])
def test_objects_of_training_scripts_are_skipped(protocol, before_1_6, tmp_path, images):
    module, model = twins("resnet8")
    others = {
        "args": argparse.Namespace(lr=np.float64(0.1), when=datetime.datetime(2024, 5, 1)),
        "options": Options(),
        "epoch": np.int64(3),
        "best": np.float64(0.5),
        "rng": np.random.default_rng(0).bit_generator.state,
        "history": collections.defaultdict(list, {"loss": [1.0]}),
        "folder": Path("runs"),
        "callbacks": {Options: {"best": np.ones(3)}, None: 1.0, 0.5: 2},
        "range": slice(1, 2),
        "optimizer": torch.optim.SGD(module.parameters(), 0.1, 0.9).state_dict(),
    }
    path = tmp_path / "checkpoint.pth"
    torch.save(
        {**others, "model": module.state_dict()},
        path,
        pickle_protocol=protocol,
        _use_new_zipfile_serialization=not before_1_6,
    )
    report = load_state_dict(model, path)
    assert not report.misfits
    names = {
        "argparse.Namespace",
        "datetime.datetime",
        "tests.tools.interchange.test_torch.Options",
    }
    assert names <= {*report.skipped}
    assert "skipped, without executing anything: " in str(report)
    assert_equal(model.predict(images), logits(module, images))
    with pytest.raises(ValueError, match=r"; skipped, without executing anything: \w+\.\w+"):
        load_state_dict(Model(Linear(2), (3,)), path)


class Harmful:
    """An object whose unpickling writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_malicious_files_and_modules_are_refused_in_a_sentence(tmp_path):
    module, model = twins("cnn")
    path, before = tmp_path / "net.pt", encode(model.state())
    for value, message in (
        (
            {**module.state_dict(), "fc2.bias": Harmful(tmp_path / "written")},
            "arrays do not fit the model (matched by names): fc2.b is missing; skipped, without ",
        ),
        (module, "expected tensors, got a file that refers to tests.tools.interchange.twins.D"),
    ):
        torch.save(value, path)
        with pytest.raises(ValueError, match=re.escape(f"load_state_dict: {path}: {message}")):
            load_state_dict(model, path)
        assert encode(model.state()) == before
        assert [*tmp_path.iterdir()] == [path]
