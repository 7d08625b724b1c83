"""State dicts of torchvision's networks give the same outputs here, and ours give them there.

Weights and running statistics are random. The networks of a family differ in their depth only: one
stands for all.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from pydtnn.layers import StepContext
from pydtnn.model import Model
from pydtnn.models import create_net
from pydtnn.tools.interchange import import_onnx, load_state_dict, save_state_dict
from tests.each import each

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")
torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")

CLASSES = 7

UNTRAINED = {"init_weights": False, "num_classes": CLASSES}
NETWORKS: dict[str, tuple[Any, int, dict[str, Any], dict[str, Any]]] = {
    "alexnet": ("alexnet", 224, {}, {}),
    "vgg11": ("vgg11", 224, {}, {}),
    "vgg13_bn": ("vgg13_bn", 224, {}, {}),
    "resnet18": ("resnet18", 64, {}, {}),
    "resnet50": ("resnet50", 64, {}, {}),
    "resnext50_32x4d": ("resnext50", 64, {}, {}),
    "densenet121": ("densenet121", 64, {}, {}),
    "googlenet": ("googlenet", 64, {}, {**UNTRAINED, "aux_logits": False}),
    "googlenet with heads": ("googlenet", 96, {"auxiliary": True}, UNTRAINED),
    "inception_v3": ("inception_v3", 107, {}, {**UNTRAINED, "aux_logits": False}),
    "inception_v3 with heads": ("inception_v3", 299, {"auxiliary": True}, UNTRAINED),
    "mobilenet_v2": ("mobilenet_v2", 64, {}, {}),
    "mobilenet_v2 of half width": ("mobilenet_v2", 64, {"width": 0.5}, {"width_mult": 0.5}),
    "vit_b_16": ("vit_b16", 224, {}, {}),
}


@pytest.fixture(autouse=True)
def _float32() -> None:
    """Use float32, unlike the other tests here: the largest networks have 144 million weights."""
    torch.set_default_dtype(torch.float32)


def randomize(arrays: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Random values with which outputs of deep networks neither vanish nor explode."""
    rng = np.random.default_rng(seed)
    values: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if array.ndim > 1:
            values[name] = rng.normal(0, np.prod(array.shape[1:]) ** -0.5, array.shape)
        else:
            shift = 1 if name.endswith(("bias", "running_mean", ".b", "beta")) else 0
            values[name] = rng.uniform(0.5, 1.5, array.shape) - shift
    return {name: value.astype("float32") for name, value in values.items()}


def theirs(case: str) -> Any:
    """A network of torchvision, in evaluation, with random weights and statistics."""
    _, _, _, options = NETWORKS[case]
    make = getattr(torchvision.models, case.split()[0])
    with torch.device("meta"):
        module = make(weights=None, **{"num_classes": CLASSES, **options}).eval()
    module = module.to_empty(device="cpu")
    tensors = {k: t for k, t in module.state_dict().items() if t.is_floating_point()}
    for name, array in randomize(tensors, seed=0).items():
        tensors[name].copy_(torch.from_numpy(array))
    return module


def ours(case: str, seed: int) -> Model:
    net, side, options, _ = NETWORKS[case]
    shape = (side, side, 3)
    model = Model(create_net(net, CLASSES, shape, **options), shape)
    model.load(randomize(model.state(), seed))
    return model


def outputs(model: Model, x: np.ndarray) -> list[np.ndarray]:
    y, _ = model.forward(x, StepContext(training=False))
    return [np.asarray(part) for part in (y if isinstance(y, tuple) else (y,))]


def their_outputs(module: Any, x: np.ndarray) -> list[np.ndarray]:
    """Outputs, with those of the auxiliary heads, which torchvision computes in training only."""
    heads = {"aux1": "inception4a", "aux2": "inception4d", "AuxLogits": "Mixed_6e"}
    found: dict[str, Any] = {}
    handles = [
        getattr(module, source).register_forward_hook(
            lambda _, __, y, head=head: found.update({head: getattr(module, head)(y)})
        )
        for head, source in heads.items()
        if getattr(module, head, None) is not None
    ]
    with torch.no_grad():
        y = module(torch.from_numpy(np.moveaxis(x, -1, 1).copy()))
    for handle in handles:
        handle.remove()
    return [part.numpy() for part in (y, *found.values())]


def assert_equal(own: list[np.ndarray], other: list[np.ndarray]) -> None:
    assert len(own) == len(other)
    for a, b in zip(own, other, strict=True):
        assert np.ptp(b, axis=0).max() > 1e-3 * np.abs(b).max(), "the images do not matter"
        # 1e-5: float32, up to 200 layers, sums in another order
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


@each("case", NETWORKS)
def test_outputs_are_equal_after_loading_there_and_here(case, tmp_path):
    module = theirs(case)
    side = NETWORKS[case][1]
    x = np.random.default_rng(1).normal(size=(2, side, side, 3)).astype("float32")
    if case.startswith("inception"):
        x *= 1000  # 40 layers without residuals, each of which makes differences smaller
    torch.save(module.state_dict(), tmp_path / "there.pth")
    model = ours(case, seed=1)
    report = load_state_dict(model, tmp_path / "there.pth")
    assert report.by == "names"
    assert_equal(outputs(model, x), their_outputs(module, x))

    other = ours(case, seed=2)
    save_state_dict(other, tmp_path / "here.pth", like=tmp_path / "there.pth")
    (tmp_path / "there.pth").unlink()
    before = outputs(model, x)
    module.load_state_dict(torch.load(tmp_path / "here.pth", weights_only=True), strict=True)
    assert_equal(outputs(other, x), their_outputs(module, x))
    assert np.abs(before[0] - outputs(other, x)[0]).max() > 1e-3


def test_a_googlenet_without_heads_reads_the_weights_of_one_with_heads(tmp_path):
    """Layers of the heads have the shapes of others, among which they were matched by order."""
    module, model = theirs("googlenet with heads"), ours("googlenet", seed=1)
    report = load_state_dict(model, module.state_dict(), strict=False)
    assert len(report.pairs) == len(model.state())
    assert {misfit.problem for misfit in report.misfits} == {"extra"}
    assert all(misfit.theirs.startswith("aux") for misfit in report.misfits)
    x = np.random.default_rng(1).normal(size=(2, 64, 64, 3)).astype("float32")
    assert_equal(outputs(model, x), their_outputs(module, x)[:1])


@pytest.mark.filterwarnings("ignore")  # of the exporter
@each(
    "case", ["alexnet", "densenet121", "googlenet", "mobilenet_v2", "resnext50_32x4d", "vit_b_16"]
)
def test_an_onnx_file_has_the_outputs_of_pytorch(case, tmp_path):
    pytest.importorskip("onnx", reason="onnx is not installed")
    module, side = theirs(case), NETWORKS[case][1]
    x = np.random.default_rng(1).normal(size=(2, side, side, 3)).astype("float32")
    images = torch.from_numpy(x[:1].transpose(0, 3, 1, 2).copy())
    torch.onnx.export(module, (images,), str(tmp_path / "net.onnx"), dynamo=False)
    model = import_onnx(tmp_path / "net.onnx")
    assert_equal([model.predict(x)], their_outputs(module, x))


@each("case", ["densenet121", "vit_b_16"])
def test_the_names_in_published_files_are_read(case):
    """torchvision changes them when it reads the files."""
    module, model = theirs(case), ours(case, seed=1)
    arrays = {}
    for name, tensor in module.state_dict().items():
        name = re.sub(r"(denselayer\d+\.\w+)(\d)\.", r"\1.\2.", name)
        arrays[name.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2.")] = tensor
    assert load_state_dict(model, arrays).by == "names"
    side = NETWORKS[case][1]
    x = np.random.default_rng(1).normal(size=(2, side, side, 3)).astype("float32")
    assert_equal(outputs(model, x), their_outputs(module, x))
