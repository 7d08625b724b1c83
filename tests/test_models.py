"""The networks of `pydtnn.models`: sizes as published, shapes, names, and options."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.data import ArrayDataset, TokenDataset
from pydtnn.data.batch import shapes_of
from pydtnn.kernels import create_backend
from pydtnn.layers import Block
from pydtnn.layers.node import nodes
from pydtnn.model import Model
from pydtnn.model.graph import Graph
from pydtnn.models import (
    MODELS,
    cifar_densenet,
    cifar_resnet,
    create_net,
    gpt,
    imagenet_densenet,
    imagenet_resnet,
    vgg,
)
from pydtnn.models.auxiliary import Heads
from pydtnn.optimizers import SGD, AdamW
from pydtnn.training.trainer import Trainer
from tests.each import each

CIFAR = (32, 32, 3)
IMAGENET = (224, 224, 3)
INCEPTION = (299, 299, 3)
MNIST = (28, 28, 1)

PAGE = (Path(__file__).parents[1] / "docs" / "models.md").read_text()


def documented() -> dict[tuple[str, Any, int], int]:
    """The rows of the page: for ImageNet as torchvision and, for mobilenet_v1, Keras list them."""
    rows = re.findall(r"^\| `(\w+)` \|([^|]*)\| ([\d,]+) \|", PAGE, re.M)
    found = {}
    for name, columns, count in rows:
        sizes, _, classes = (columns.strip() or "224 x 224 x 3, 1000").partition(", ")
        given = sizes.removesuffix(" tokens").split(" to ")
        shapes = tuple(tuple(map(int, part.split(" x "))) for part in given)
        shape = shapes if shapes[1:] else shapes[0]
        found[name, shape, int(classes)] = int(count.replace(",", ""))
    return found


# Of other depths, and forms for CIFAR: VGG and AlexNet with one linear layer, the others with a
# 3 x 3 stem, MobileNets with fewer strides.
PARAMETERS: dict[tuple[str, Any, int], int] = documented() | {
    ("alexnet", CIFAR, 10): 2_472_266,
    ("vgg11_bn", IMAGENET, 1000): 132_868_840,
    ("vgg13", IMAGENET, 1000): 133_047_848,
    ("vgg13_bn", IMAGENET, 1000): 133_053_736,
    ("vgg16", IMAGENET, 1000): 138_357_544,
    ("vgg19", IMAGENET, 1000): 143_667_240,
    ("vgg19_bn", IMAGENET, 1000): 143_678_248,
    ("vgg11_bn", CIFAR, 10): 9_231_114,
    ("resnet8", CIFAR, 10): 78_042,
    ("resnet32", CIFAR, 10): 466_906,
    ("resnet56", CIFAR, 10): 855_770,
    ("resnet110", CIFAR, 10): 1_730_714,
    ("resnet1202", CIFAR, 10): 19_424_026,
    ("resnet34", IMAGENET, 1000): 21_797_672,
    ("resnet101", IMAGENET, 1000): 44_549_160,
    ("resnet152", IMAGENET, 1000): 60_192_808,
    ("resnet50", CIFAR, 10): 23_520_842,
    ("vit_tiny", CIFAR, 10): 5_362_762,
    ("char_gru", (64,), 256): 920_832,
    ("densenet100", CIFAR, 10): 769_162,
    ("densenet161", IMAGENET, 1000): 28_681_000,
    ("densenet169", IMAGENET, 1000): 14_149_480,
    ("densenet201", IMAGENET, 1000): 20_013_928,
    ("densenet121", CIFAR, 10): 6_956_298,
    ("googlenet", CIFAR, 10): 5_490_986,
    ("mobilenet_v1", CIFAR, 10): 3_217_226,
    ("mobilenet_v2", CIFAR, 10): 2_236_682,
}


def wire(net: Block, shape: Any) -> Graph:
    """The graph alone: nothing is allocated."""
    graph = Graph(shapes_of(shape), backend=create_backend("numpy"), dtype="float32")
    graph.finish(nodes(graph.add(net, *graph.inputs)))
    return graph


def parameters(graph: Graph) -> int:
    own = {id(p.source): p.size for node in graph.nodes for p in node.layer.parameters}
    return sum(own.values())


@each("key", PARAMETERS)
def test_parameters_are_as_many_as_published(key):
    name, shape, classes = key
    graph = wire(create_net(name, classes, shape), shape)
    assert parameters(graph) == PARAMETERS[key]
    last = shapes_of(shape)[-1]
    sequences = ("gpt", "moe", "llama", "char", "bert", "transformer", "t5")
    positions = last if len(last) == 1 and name.startswith(sequences) else ()
    assert [node.shape for node in graph.outputs] == [(*positions, classes)]


LLAMA_2 = {"depth": 32, "heads": 32, "groups": 32, "width": 4096, "hidden": 11_008, "tied": False}
LLAMA_3 = {"depth": 16, "groups": 8, "width": 2048, "hidden": 8192, "tied": True}
MIXTRAL = {"groups": 8, "hidden": 14_336, "experts": 8}

OPTIONS: list[tuple[str, tuple[int, ...], int, dict[str, Any], int]] = [
    # torchvision's resnext101_32x8d, resnext101_64x4d and wide_resnet50_2
    ("resnet101", IMAGENET, 1000, {"groups": 32, "group_width": 8}, 88_791_336),
    ("resnet50", IMAGENET, 1000, {"group_width": 128}, 68_883_240),
    # 7.0 M in table 2 of Huang et al. 2017
    ("densenet100", CIFAR, 10, {"bottleneck": False, "compression": 1.0}, 6_979_642),
    # torchvision's, with auxiliary outputs
    ("googlenet", IMAGENET, 1000, {"auxiliary": True}, 13_004_888),
    ("inception_v3", INCEPTION, 1000, {"auxiliary": True}, 27_161_264),
    # 2.6 M and 0.5 M in table 6 of Howard et al. 2017; 6.11 M in timm
    ("mobilenet_v1", IMAGENET, 1000, {"width": 0.75}, 2_585_560),
    # 1.7 M in table 6 of He et al. 2016
    ("resnet110", CIFAR, 10, {"shortcut": "A"}, 1_727_962),
    # as in PyTorch
    ("cosmoflow", (128, 128, 128, 4), 4, {"kernel": 3}, 8_907_556),
    # Llama 3.2 1B, Llama 2 7B and Mixtral 8x7B, as published
    ("llama", (8,), 128_256, {**LLAMA_2, **LLAMA_3}, 1_235_814_400),
    ("llama", (8,), 32_000, {**LLAMA_2, **MIXTRAL}, 46_702_792_704),
    # images larger than 224 x 224 need no more
    ("alexnet", (320, 256, 3), 1000, {}, 61_100_840),
]


@each(("name", "shape", "classes", "options", "count"), OPTIONS)
def test_options_change_the_number_of_parameters_as_published(name, shape, classes, options, count):
    assert parameters(wire(create_net(name, classes, shape, **options), shape)) == count


def image_sizes(graph: Graph) -> list[int]:
    """Heights of the images between the layers, each once, in order."""
    return list(dict.fromkeys(node.shape[0] for node in graph.nodes if len(node.shape) == 3))


@each(
    ("name", "shape", "sizes"),
    [
        ("densenet121", IMAGENET, [224, 112, 56, 28, 14, 7]),
        ("googlenet", CIFAR, [32, 16, 8]),
        ("mobilenet_v2", CIFAR, [32, 16, 8, 4]),
    ],
)
def test_small_images_keep_more_of_their_size(name, shape, sizes):
    assert image_sizes(wire(create_net(name, 10, shape), shape)) == sizes


def test_auxiliary_outputs_read_the_blocks_of_the_papers():
    for name, shape, places in (
        ("googlenet", IMAGENET, {"auxiliary1": (14, 14, 512), "auxiliary2": (14, 14, 528)}),
        ("inception_v3", INCEPTION, {"auxiliary": (17, 17, 768)}),
    ):
        graph = wire(create_net(name, 10, shape, auxiliary=True), shape)
        assert [node.shape for node in graph.outputs] == [(10,)] * (1 + len(places))
        plain = [node.name for node in wire(create_net(name, 10, shape), shape).nodes]
        assert [n.name for n in graph.nodes if n.name.split(".")[0] not in places] == plain
        for head, read in places.items():
            first = next(node for node in graph.nodes if node.name.startswith(f"{head}."))
            assert first.inputs[0].shape == read


def test_auxiliary_outputs_are_trained_and_can_be_left_out_afterwards():
    shape, rng = (8, 8, 3), np.random.default_rng(0)
    x, y = rng.normal(size=(8, *shape)).astype("float32"), rng.integers(3, size=8)
    model = Model(create_net("googlenet", 3, shape, auxiliary=True), shape)
    before = {name: value.copy() for name, value in model.state().items()}
    trainer = Trainer(model, SGD(0.01), auxiliary_weights=[0.3, 0.3], progress=False)
    trainer.fit(ArrayDataset(x, y), global_batch_size=8)
    after = model.state()
    for name in ("stem.conv1.conv.w", "auxiliary1.fc2.w", "auxiliary2.fc2.w", "fc.w"):
        assert (after[name] != before[name]).any(), name

    plain = Model(create_net("googlenet", 3, shape), shape)
    report = plain.load(after, strict=False)
    assert not report.missing
    assert {name.split(".")[0] for name in report.unexpected} == {"auxiliary1", "auxiliary2"}
    # the same layers; 1e-5 is a few dozen times the rounding of float32
    np.testing.assert_allclose(plain.predict(x), model.predict(x)[0], rtol=1e-5, atol=1e-5)


def test_a_head_of_no_part_is_told():
    part = create_net("mlp", 3, (4,))
    with pytest.raises(ValueError, match="Heads: expected names of parts, got there"):
        Heads(part, heads={"there": create_net("mlp", 3, (4,))})


@each(
    ("model", "expected"),
    [
        ("resnet20", "stem.conv stage1.0.conv1 stage2.0.shortcut.bn stage3.2.add head.fc"),
        ("vgg16_bn", "stage1.conv1 stage5.bn3 stage5.pool head.fc"),
        ("densenet100", "stem.conv block1.0.conv1 transition2.pool block3.15.concat head.bn"),
        ("googlenet", "block3a.five.reduce.conv block3a.pool.max pool3 block5b.concat fc"),
        ("vit_tiny", "embedding.position block0.attention.in_proj block11.fc2 head.fc"),
    ],
)
def test_names_tell_the_place(model, expected):
    assert {*expected.split()} <= {n.name for n in wire(create_net(model, 10, CIFAR), CIFAR).nodes}


@each(
    "name",
    ["alexnet", "vgg11_bn", "resnet18", "densenet121", "googlenet", "mobilenet_v1", "mobilenet_v2"],
)
@each("size", [64, 65, 96, 160, 224, 256])
def test_every_size_from_64_on_fits_the_large_form(name, size):
    assert wire(create_net(name, 5, (size, size, 3)), (size, size, 3)).outputs[0].shape == (5,)


def test_the_page_names_every_network():
    assert len(documented()) > 20
    assert {name for name, _, _ in PARAMETERS} == set(MODELS)
    names = set(re.findall(r"`(\w+)`", PAGE))
    assert set(MODELS) <= names | {f"{name}_bn" for name in ("vgg11", "vgg13", "vgg19")}


@pytest.mark.tools
def test_the_documented_networks_of_sequences_are_built():
    blocks = re.findall(r"```python\n# ([\w ]+)\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    for title, code in blocks:
        exec(code, names)
        if title == "generate":
            assert names["text"].shape == (24,)
            assert bytes(names["text"][:4].tolist()) == b"def "
        if title == "encoders":
            assert names["translator"].output_shapes == ((20, 100),)
        if title == "lengths":
            x, lengths = np.ones((2, 50, 64), "float32"), np.array([[50], [3]], "float32")
            assert names["model"].predict((x, lengths)).shape == (2, 50, 10)
        if title == "recurrent":
            assert names["model"].predict(x[..., :12]).shape == (2, 10)
    assert {"generate", "encoders", "lengths", "recurrent"} <= {title for title, _ in blocks}
    assert len(blocks) == PAGE.count("```python")


PATTERN = np.tile([0, 3, 1, 1, 4, 2, 3, 0, 2], 60)
"""The token after 0, 1 or 3 depends on the tokens before it."""


@each("name", ["gpt_nano", "llama_nano"])
def test_logits_depend_on_no_later_token(name, rng):
    model = Model(create_net(name, 11, (9,)), (9,), backend="cpu", dtype="float64")
    x = rng.integers(11, size=(2, 9)).astype("float64")
    changed = x.copy()
    changed[:, 5:] = (x[:, 5:] + 1) % 11
    y, z = model.predict(x), model.predict(changed)
    np.testing.assert_allclose(z[:, :5], y[:, :5], rtol=0, atol=1e-15)
    assert (abs(z[:, 5:] - y[:, 5:]) > 1e-6).any(axis=-1).all()


def test_a_pattern_is_learned_from_the_tokens_before():
    data = TokenDataset(PATTERN, 12)
    model = Model(gpt(5, (12,), depth=1, heads=2, width=16), (12,))
    trainer = Trainer(model, AdamW(lr=0.01), metrics=["accuracy", "perplexity"])
    trainer.fit(data, epochs=30, global_batch_size=8)
    found = trainer.evaluate(data)
    assert found["accuracy"] > 0.9
    assert found["perplexity"] == pytest.approx(np.exp(found["loss"]), rel=1e-5)
    assert found["perplexity"] < 1.4


SMALLEST = {
    **{"cnn": 6, "alexnet": 29, "vgg16": 32, "resnet44": 4, "resnet50": 8, "densenet40": 4},
    **{"densenet121": 8, "googlenet": 8, "inception_v3": 75, "mobilenet_v1": 8, "mobilenet_v2": 8},
}


@each(
    ("name", "shape", "options", "words"),
    [
        *(
            (name, (least, least - 1, 1), {}, f"{name}: images must be at least {least} x {least}")
            for name, least in SMALLEST.items()
        ),
        ("inception_v3", (298, 299, 3), {"auxiliary": True}, "at least 299 x 299, got 298"),
        ("resnet20", CIFAR, {"shortcut": "B"}, "unknown shortcut of resnet20 'B'; "),
        ("vit_tiny", (12, 40, 3), {"patch": 16}, "vit: images must be at least 16 x 16"),
        ("llama", (8,), {"heads": 5}, "llama: twice the heads must divide .*, got 5 heads"),
        ("llama", (8,), {"heads": 6, "groups": 4}, "llama: .*, got 6 heads, .* and 4 groups"),
        ("resnet34", CIFAR, {"groups": 32}, "must be 1 and 64 for depth 34, .* 32"),
        ("densenet40", CIFAR, {"compression": 1.5}, "compression must be .* 1, got 1.5"),
        ("googlenet", CIFAR, {"kernel": 4}, "googlenet: kernel must be odd, .* got 4"),
        ("cosmoflow", (64, 64, 4), {}, r"expected volumes of shape \(D, H, W, C\)"),
        ("cosmoflow", (32, 31, 64, 4), {}, "at least 32 x 32 x 32 for 5 stages, got 32 x 31"),
        ("char_lstm", (8,), {"kind": "rnn"}, "char_rnn: kind must be lstm or gru, got 'rnn'"),
        ("bert_nano", ((8,), (2,)), {}, r"bert: expected tokens .* got \(8,\) and \(2,\)"),
        ("t5_nano", (8,), {}, r"t5: expected tokens of a source .* got \(8,\); use --dataset rev"),
        ("transformer_nano", ((8,), (8,)), {"positions": "sines"}, "sinusoids or learned, got 's"),
        ("cnn1d", (8, 8, 3), {}, r"expected signals of shape \(L, C\), got \(8, 8, 3\)"),
    ],
)
def test_shapes_and_options_that_do_not_fit_are_refused(name, shape, options, words):
    with pytest.raises(ValueError, match=words):
        create_net(name, 5, shape, **options)


def test_the_smallest_images_are_possible():
    for name, least in SMALLEST.items():
        wire(create_net(name, 3, (least, least, 1)), (least, least, 1))


@each(
    ("make", "depth", "words"),
    [
        (cifar_resnet, 45, r"cifar_resnet: depth must be 6 n \+ 2, .* not 45"),
        (imagenet_resnet, 20, r"imagenet_resnet: depth must be one of \(18, 34, .* not 20"),
        (vgg, 12, r"vgg: depth must be one of \(11, 13, 16, 19\), not 12"),
        (cifar_densenet, 41, r"cifar_densenet: depth must be 3 n \+ 4, .* not 41"),
        (partial(cifar_densenet, bottleneck=True), 43, r"depth must be 6 n \+ 4, .* not 43"),
        (imagenet_densenet, 100, r"imagenet_densenet: depth must be one of \(121, .* not 100"),
    ],
)
def test_depths_that_do_not_exist_are_refused(make, depth, words):
    with pytest.raises(ValueError, match=words):
        make(depth, 10, CIFAR)
