"""Networks of torchvision in ONNX files of both exporters of PyTorch compute the same here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.interchange import import_onnx
from tests.each import each

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")
models = pytest.importorskip("torchvision", reason="torchvision is not installed").models
for _package in ("onnx", "onnxscript"):
    pytest.importorskip(_package, reason=f"{_package} is not installed; pip install {_package}")

FAMILIES = [
    *("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s"),
    *("googlenet", "inception_v3", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small"),
    *("regnet_y_400mf", "resnet18", "resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_0"),
    *("vgg11_bn", "vit_b_16"),
]
"""A network of each family of images; Swin transformers and MaxViT are refused."""

REFUSED = ["maxvit_t", "swin_t", "swin_v2_t"]


def network(name: str) -> tuple[Any, int]:
    """A network in float32 with statistics and heads that are neither 0 nor 1, and its size."""
    torch.manual_seed(0)
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    net = models.get_model(name, weights=None, num_classes=10, **options).float().eval()
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(module.running_mean, 0, 0.1)
            torch.nn.init.uniform_(module.running_var, 0.5, 1)
        elif isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, 0, 0.02)
    return net, 299 if name == "inception_v3" else 224


def export(net: Any, x: Any, path: Path, *, dynamo: bool) -> None:
    options = {"external_data": False, "verbose": False} if dynamo else {}
    torch.onnx.export(net, (x,), str(path), dynamo=dynamo, **options)


def check(net: Any, size: int, path: Path, *, dynamo: bool) -> int:
    """Compare the outputs of two samples; return the number of outputs."""
    x = torch.randn(2, 3, size, size, dtype=torch.float32)
    with torch.no_grad():
        theirs = net(x)
    export(net, x[:1], path, dynamo=dynamo)
    ours = import_onnx(path).predict(np.moveaxis(x.numpy(), 1, -1))
    pairs = [*zip(ours, theirs, strict=True)] if isinstance(ours, tuple) else [(ours, theirs)]
    for y, expected in pairs:
        scale = expected.abs().max().item()
        assert scale > 0
        np.testing.assert_allclose(y, expected.numpy(), rtol=0, atol=1e-5 * scale)
    return len(pairs)


@pytest.fixture(autouse=True)
def _float32() -> Any:
    """Networks are made of float32 numbers, as users export them."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


@pytest.mark.filterwarnings("ignore")  # of the exporters
@each("dynamo", [False, True])
@each("name", FAMILIES)
def test_a_family_has_the_outputs_of_pytorch(name: str, dynamo: bool, tmp_path: Path) -> None:
    net, size = network(name)
    check(net, size, tmp_path / "net.onnx", dynamo=dynamo)


@pytest.mark.filterwarnings("ignore")  # of the exporters
@each("name", REFUSED)
def test_attention_with_terms_of_its_own_is_refused_by_name(name: str, tmp_path: Path) -> None:
    net, size = network(name)
    export(net, torch.randn(1, 3, size, size), tmp_path / "net.onnx", dynamo=False)
    with pytest.raises(ValueError, match=r"import_onnx: \S+: node \S+(, operator | has the opera)"):
        import_onnx(tmp_path / "net.onnx")
