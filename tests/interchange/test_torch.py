"""Networks of PyTorch, written by hand, compute the same here, and the other way round."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.interchange import load_state_dict, save_state_dict, state_dict
from pydtnn.layers import Linear
from pydtnn.model import Model
from pydtnn.saving.weights import encode
from tests.interchange.twins import SHAPE, TWINS, logits, torch, twins

SUFFIXES = (".pt", ".pth", ".safetensors")


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


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", TWINS)
def test_weights_of_pytorch_give_the_same_logits(
    name: str, suffix: str, tmp_path: Path, images: np.ndarray
) -> None:
    module, model = twins(name)
    report = load_state_dict(model, save(module, tmp_path / f"net{suffix}"))
    assert report.by == ("order" if name == "features" else "names")
    assert not report.misfits
    assert_equal(model.predict(images), logits(module, images))


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", TWINS)
def test_weights_from_here_give_the_same_logits(
    name: str, suffix: str, tmp_path: Path, images: np.ndarray
) -> None:
    module, model = twins(name)
    model.statistics.running[:] = np.random.default_rng(1).uniform(0.5, 1.5, 1)
    save_state_dict(model, tmp_path / f"net{suffix}", like=module.state_dict())
    if suffix == ".safetensors":
        from safetensors.torch import load_file

        arrays = load_file(tmp_path / f"net{suffix}")
    else:
        arrays = torch.load(tmp_path / f"net{suffix}", weights_only=True)
        assert list(arrays) == list(module.state_dict())
    before = logits(module, images)
    module.load_state_dict(arrays)
    assert_equal(model.predict(images), logits(module, images))
    assert np.abs(before - logits(module, images)).max() > 1e-3


@pytest.mark.parametrize("name", ["cnn", "positions"])
def test_names_are_those_of_modules_with_the_names_of_the_layers(
    name: str, images: np.ndarray
) -> None:
    module, model = twins(name)
    module.load_state_dict({k: torch.from_numpy(a.copy()) for k, a in state_dict(model).items()})
    assert_equal(model.predict(images), logits(module, images))


def test_checkpoints_and_parallel_modules_are_read(tmp_path: Path, images: np.ndarray) -> None:
    module, model = twins("resnet8")
    entries = {f"module.{name}": tensor for name, tensor in module.state_dict().items()}
    torch.save({"epoch": 3, "state_dict": entries}, tmp_path / "checkpoint.pt")
    load_state_dict(model, tmp_path / "checkpoint.pt")
    assert_equal(model.predict(images), logits(module, images))


def test_tensors_of_16_bits_are_read() -> None:
    weight = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16)
    model = Model(Linear(1, bias=False), (2,))
    load_state_dict(model, {"weight": weight})
    np.testing.assert_array_equal(model.state()["linear.w"], [[1.5, -2.0]])


class Harmful:
    """An object whose unpickling writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def damaged(kind: str, folder: Path) -> Path:
    """A file that is no state dict."""
    module, _ = twins("cnn")
    path = folder / ("net.safetensors" if kind.endswith("safetensors") else "net.pt")
    if kind.startswith("truncated"):
        data = save(module, path).read_bytes()
        path.write_bytes(data[: len(data) // 2])
    elif kind == "malicious":
        torch.save({**module.state_dict(), "fc2.bias": Harmful(folder / "written")}, path)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "a module":
        torch.save(module, path)
    elif kind == "a list":
        torch.save([torch.zeros(2)], path)
    elif kind == "a number":
        torch.save({**module.state_dict(), "fc2.bias": 1}, path)
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("truncated pt", "expected a file of torch.save, got one that is damaged (File is not a"),
        ("truncated safetensors", "not a safetensors file, or truncated ("),
        (
            "malicious",
            "expected tensors, got a file that refers to ",
        ),
        (
            "empty",
            "expected a file of torch.save, got one that is damaged (pickle exh",
        ),
        (
            "a module",
            "expected tensors, got a file that refers to tests.interchange.twins.D",
        ),
        ("a list", "expected tensors by name, got list; save the state_dict() of the module"),
        ("a number", "expected tensors by name, got int for 'fc2.bias'; save the state_dict() of"),
    ],
)
def test_damaged_and_malicious_files_are_refused_in_a_sentence(
    kind: str, message: str, tmp_path: Path
) -> None:
    path, (_, model) = damaged(kind, tmp_path), twins("cnn")
    before = encode(model.state())
    with pytest.raises(ValueError, match="^" + re.escape(f"load_state_dict: {path}: {message}")):
        load_state_dict(model, path)
    assert encode(model.state()) == before
    assert [*tmp_path.iterdir()] == [path]
