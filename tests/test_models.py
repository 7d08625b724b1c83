"""The networks of `pydtnn.models`: sizes as published, shapes, names, and options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.data import ArrayDataset
from pydtnn.kernels import create_backend
from pydtnn.layers import Block, StepContext
from pydtnn.layers.node import nodes
from pydtnn.model import Model
from pydtnn.model.graph import Graph
from pydtnn.models import (
    MODELS,
    cifar_densenet,
    cifar_resnet,
    create_net,
    imagenet_densenet,
    imagenet_resnet,
    mlp,
    vgg,
    vit,
)
from pydtnn.models.auxiliary import Heads
from pydtnn.optimizers import Adam
from pydtnn.training.trainer import Trainer
from tests.each import each

CIFAR = (32, 32, 3)
IMAGENET = (224, 224, 3)
INCEPTION = (299, 299, 3)
MNIST = (28, 28, 1)

# For ImageNet as torchvision and, for mobilenet_v1, Keras list them; cnn is the one of PyTorch's
# examples. The small forms are those in use for CIFAR: VGG and AlexNet with one linear layer, the
# others with a 3 x 3 stem, MobileNets with fewer strides.
PARAMETERS: dict[tuple[str, tuple[int, ...], int], int] = {
    ("mlp", MNIST, 10): 669_706,
    ("cnn", MNIST, 10): 1_199_882,
    ("alexnet", CIFAR, 10): 2_472_266,
    ("alexnet", IMAGENET, 1000): 61_100_840,
    ("vgg11", IMAGENET, 1000): 132_863_336,
    ("vgg11_bn", IMAGENET, 1000): 132_868_840,
    ("vgg13", IMAGENET, 1000): 133_047_848,
    ("vgg13_bn", IMAGENET, 1000): 133_053_736,
    ("vgg16", IMAGENET, 1000): 138_357_544,
    ("vgg16_bn", IMAGENET, 1000): 138_365_992,
    ("vgg19", IMAGENET, 1000): 143_667_240,
    ("vgg19_bn", IMAGENET, 1000): 143_678_248,
    ("vgg11", CIFAR, 10): 9_225_610,
    ("vgg11_bn", CIFAR, 10): 9_231_114,
    ("vgg13", CIFAR, 10): 9_410_122,
    ("vgg13_bn", CIFAR, 10): 9_416_010,
    ("vgg16", CIFAR, 10): 14_719_818,
    ("vgg16_bn", CIFAR, 10): 14_728_266,
    ("vgg19", CIFAR, 10): 20_029_514,
    ("vgg19_bn", CIFAR, 10): 20_040_522,
    ("resnet8", CIFAR, 10): 78_042,
    ("resnet20", CIFAR, 10): 272_474,
    ("resnet32", CIFAR, 10): 466_906,
    ("resnet44", CIFAR, 10): 661_338,
    ("resnet56", CIFAR, 10): 855_770,
    ("resnet110", CIFAR, 10): 1_730_714,
    ("resnet1202", CIFAR, 10): 19_424_026,
    ("resnet18", IMAGENET, 1000): 11_689_512,
    ("resnet34", IMAGENET, 1000): 21_797_672,
    ("resnet50", IMAGENET, 1000): 25_557_032,
    ("resnet101", IMAGENET, 1000): 44_549_160,
    ("resnet152", IMAGENET, 1000): 60_192_808,
    ("resnet18", CIFAR, 10): 11_173_962,
    ("resnet34", CIFAR, 10): 21_282_122,
    ("resnet50", CIFAR, 10): 23_520_842,
    ("resnet101", CIFAR, 10): 42_512_970,
    ("resnet152", CIFAR, 10): 58_156_618,
    ("vit_tiny", IMAGENET, 1000): 5_717_416,  # of the ViTs as in timm
    ("vit_small", IMAGENET, 1000): 22_050_664,
    ("vit_b16", IMAGENET, 1000): 86_567_656,
    ("vit_tiny", CIFAR, 10): 5_362_762,
    ("gpt", (256,), 256): 10_844_160,
    ("gpt_nano", (64,), 256): 100_272,
    ("moe_gpt", (256,), 256): 60_488_448,
    ("moe_gpt_nano", (64,), 256): 268_896,
    ("llama", (256,), 256): 9_540_480,
    ("llama_nano", (64,), 256): 88_656,
    ("char_lstm", (64,), 256): 1_184_000,
    ("char_gru", (64,), 256): 920_832,
    ("cnn1d", (1024, 1), 5): 264_837,
    ("gpt2_small", (1024,), 50_257): 124_439_808,  # as the published weights
    ("resnext50", IMAGENET, 1000): 25_028_904,
    ("resnext50", CIFAR, 10): 22_992_714,
    ("densenet40", CIFAR, 10): 1_019_722,
    ("densenet100", CIFAR, 10): 769_162,
    ("densenet121", IMAGENET, 1000): 7_978_856,
    ("densenet161", IMAGENET, 1000): 28_681_000,
    ("densenet169", IMAGENET, 1000): 14_149_480,
    ("densenet201", IMAGENET, 1000): 20_013_928,
    ("densenet121", CIFAR, 10): 6_956_298,
    ("densenet161", CIFAR, 10): 26_482_378,
    ("densenet169", CIFAR, 10): 12_493_322,
    ("densenet201", CIFAR, 10): 18_104_330,
    ("googlenet", IMAGENET, 1000): 6_624_904,
    ("googlenet", CIFAR, 10): 5_490_986,
    ("inception_v3", INCEPTION, 1000): 23_834_568,
    ("mobilenet_v1", IMAGENET, 1000): 4_231_976,
    ("mobilenet_v1", CIFAR, 10): 3_217_226,
    ("mobilenet_v2", IMAGENET, 1000): 3_504_872,
    ("mobilenet_v2", CIFAR, 10): 2_236_682,
    ("cosmoflow", (128, 128, 128, 4), 4): 5_597_604,
}
# 0.27 M, 0.46 M, 0.66 M, 0.85 M, 1.7 M and 19.4 M in table 6 of He et al. 2016
OPTION_A = {20: 269_722, 32: 464_154, 44: 658_586, 56: 853_018, 110: 1_727_962, 1202: 19_421_274}


def wire(net: Block, shape: tuple[int, ...]) -> Graph:
    """The graph alone: nothing is allocated."""
    graph = Graph([shape], backend=create_backend("numpy"), dtype="float32")
    graph.finish(nodes(graph.add(net, graph.inputs[0])))
    return graph


def parameters(graph: Graph) -> int:
    own = {id(p.source): p.size for node in graph.nodes for p in node.layer.parameters}
    return sum(own.values())


def test_every_model_has_its_number_here() -> None:
    assert {name for name, _, _ in PARAMETERS} == set(MODELS)


@each("key", PARAMETERS)
def test_parameters_are_as_many_as_published(key: tuple[str, tuple[int, ...], int]) -> None:
    name, shape, classes = key
    graph = wire(create_net(name, classes, shape), shape)
    assert parameters(graph) == PARAMETERS[key]
    positions = (
        shape if len(shape) == 1 and name.startswith(("gpt", "moe", "llama", "char")) else ()
    )
    assert [node.shape for node in graph.outputs] == [(*positions, classes)]


@each(
    ("name", "shape", "options", "count"),
    [
        # torchvision's resnext101_32x8d, resnext101_64x4d and wide_resnet50_2
        ("resnet101", IMAGENET, {"groups": 32, "group_width": 8}, 88_791_336),
        ("resnet101", IMAGENET, {"groups": 64, "group_width": 4}, 83_455_272),
        ("resnet50", IMAGENET, {"group_width": 128}, 68_883_240),
        # 7.0 M in table 2 of Huang et al. 2017
        ("densenet100", CIFAR, {"bottleneck": False, "compression": 1.0}, 6_979_642),
        # torchvision's, with auxiliary outputs
        ("googlenet", IMAGENET, {"auxiliary": True}, 13_004_888),
        ("inception_v3", INCEPTION, {"auxiliary": True}, 27_161_264),
    ],
)
def test_options_change_the_number_of_parameters_as_published(
    name: str, shape: tuple[int, ...], options: dict[str, Any], count: int
) -> None:
    classes = 10 if shape == CIFAR else 1000
    assert parameters(wire(create_net(name, classes, shape, **options), shape)) == count


@each(
    ("classes", "options", "count"),
    [  # Llama 3.2 1B, Llama 2 7B and Mixtral 8x7B, as published
        (
            128_256,
            {"depth": 16, "heads": 32, "groups": 8, "width": 2048, "hidden": 8192},
            1_235_814_400,
        ),
        (
            32_000,
            {
                "depth": 32,
                "heads": 32,
                "groups": 32,
                "width": 4096,
                "hidden": 11_008,
                "tied": False,
            },
            6_738_415_616,
        ),
        (
            32_000,
            {
                "depth": 32,
                "heads": 32,
                "groups": 8,
                "width": 4096,
                "hidden": 14_336,
                "experts": 8,
                "tied": False,
            },
            46_702_792_704,
        ),
    ],
)
def test_a_llama_has_as_many_parameters_as_published(
    classes: int, options: dict[str, Any], count: int
) -> None:
    assert parameters(wire(create_net("llama", classes, (8,), **options), (8,))) == count


@each(
    ("options", "given"),
    [({"heads": 5}, "5 heads"), ({"heads": 6, "groups": 4}, "6 heads, .* and 4 groups")],
)
def test_heads_and_groups_of_a_llama_that_do_not_divide_are_refused(
    options: dict[str, Any], given: str
) -> None:
    with pytest.raises(ValueError, match=f"llama: twice the heads must divide .*, got {given}"):
        create_net("llama", 10, (8,), **options)


@each(
    ("name", "width", "millions"),
    [
        # table 6 of Howard et al. 2017
        ("mobilenet_v1", 0.75, 2.6),
        ("mobilenet_v1", 0.5, 1.3),
        ("mobilenet_v1", 0.25, 0.5),
        # those of timm
        ("mobilenet_v2", 0.5, 1.97),
        ("mobilenet_v2", 1.4, 6.11),
    ],
)
def test_the_width_changes_the_number_of_parameters_as_published(
    name: str, width: float, millions: float
) -> None:
    graph = wire(create_net(name, 1000, IMAGENET, width=width), IMAGENET)
    assert round(parameters(graph) / 1e6, 2 if name == "mobilenet_v2" else 1) == millions


def image_sizes(graph: Graph) -> list[int]:
    """Heights of the images between the layers, each once, in order."""
    return list(dict.fromkeys(node.shape[0] for node in graph.nodes if len(node.shape) == 3))


@each(
    ("name", "shape", "sizes"),
    [
        ("densenet100", CIFAR, [32, 16, 8]),
        ("densenet121", CIFAR, [32, 16, 8, 4]),
        ("densenet121", IMAGENET, [224, 112, 56, 28, 14, 7]),
        ("googlenet", CIFAR, [32, 16, 8]),
        ("googlenet", IMAGENET, [224, 112, 56, 28, 14, 7]),
        ("mobilenet_v1", CIFAR, [32, 16, 8, 4]),
        ("mobilenet_v1", IMAGENET, [224, 112, 56, 28, 14, 7]),
        ("mobilenet_v2", CIFAR, [32, 16, 8, 4]),
        ("mobilenet_v2", IMAGENET, [224, 112, 56, 28, 14, 7]),
        ("resnext50", CIFAR, [32, 16, 8, 4]),
        ("resnext50", IMAGENET, [224, 112, 56, 28, 14, 7]),
    ],
)
def test_small_images_keep_more_of_their_size(
    name: str, shape: tuple[int, ...], sizes: list[int]
) -> None:
    assert image_sizes(wire(create_net(name, 10, shape), shape)) == sizes


def test_auxiliary_outputs_read_the_blocks_of_the_papers() -> None:
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


def test_a_head_of_no_part_is_told() -> None:
    part = create_net("mlp", 3, (4,))
    with pytest.raises(ValueError, match="Heads: expected names of parts, got there"):
        Heads(part, heads={"there": create_net("mlp", 3, (4,))})


@each("depth", OPTION_A)
def test_option_a_has_no_parameters_in_its_shortcuts(depth: int) -> None:
    graph = wire(cifar_resnet(depth, 10, CIFAR, shortcut="A"), CIFAR)
    assert parameters(graph) == OPTION_A[depth]


@each("depth", [20, 44, 56])
def test_a_resnet_has_as_many_layers_with_weights_as_its_name_says(depth: int) -> None:
    graph = wire(cifar_resnet(depth, 10, CIFAR, shortcut="A"), CIFAR)
    weights = [p for node in graph.nodes for p in node.layer.parameters if p.name.endswith(".w")]
    assert len(weights) == depth


def test_names_tell_the_place() -> None:
    names = [node.name for node in wire(create_net("resnet20", 10, CIFAR), CIFAR).nodes]
    for name in ("stem.conv", "stage1.0.conv1", "stage2.0.shortcut.bn", "stage3.2.add", "head.fc"):
        assert name in names
    names = [node.name for node in wire(create_net("vgg16_bn", 10, CIFAR), CIFAR).nodes]
    for name in ("stage1.conv1", "stage5.bn3", "stage5.pool", "head.fc"):
        assert name in names
    names = [node.name for node in wire(create_net("densenet100", 10, CIFAR), CIFAR).nodes]
    for name in ("stem.conv", "block1.0.conv1", "transition2.pool", "block3.15.concat", "head.bn"):
        assert name in names
    names = [node.name for node in wire(create_net("mobilenet_v2", 10, CIFAR), CIFAR).nodes]
    for name in ("stage1.0.project.bn", "stage2.1.depthwise.conv", "stage2.1.add", "head.conv"):
        assert name in names
    names = [node.name for node in wire(create_net("googlenet", 10, CIFAR), CIFAR).nodes]
    for name in ("block3a.five.reduce.conv", "block3a.pool.max", "pool3", "block5b.concat", "fc"):
        assert name in names


def test_convolutions_before_relu_are_drawn_after_he() -> None:
    model = Model(create_net("resnet20", 10, CIFAR), CIFAR, backend="numpy")
    w = model.parameters["stage3.2.conv2.w"].value
    # 36864 draws: the standard deviation is known to 1 / sqrt(2 * 36864) = 0.4 %
    assert float(w.std()) == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.02)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("mlp", (4, 5), {"hidden": [7, 6, 5], "dropout": 0.2}),
        ("mlp", (12,), {"hidden": ()}),
        ("cnn", (6, 7, 1), {}),
        ("alexnet", (29, 30, 3), {}),
        ("alexnet", (29, 30, 3), {"local_response": True}),
        ("vgg11", (32, 33, 1), {}),
        ("resnet20", (4, 5, 3), {}),
        ("resnet20", (8, 7, 3), {"shortcut": "A"}),
        ("resnet18", (8, 8, 3), {}),
        ("resnet50", (8, 9, 1), {}),
        ("resnext50", (8, 9, 1), {}),
        ("densenet40", (4, 5, 3), {"dropout": 0.2}),
        ("densenet100", (5, 4, 1), {"growth": 6, "dropout": 0.2}),
        ("densenet121", (8, 9, 3), {"growth": 8}),
        ("googlenet", (8, 9, 1), {"kernel": 5}),
        ("inception_v3", (75, 76, 3), {}),
        ("vit_tiny", (8, 12, 3), {"dropout": 0.1, "attention_dropout": 0.1}),
        ("vit_small", (15, 10, 1), {"patch": 5}),
        ("mobilenet_v1", (8, 9, 3), {"width": 0.3}),
        ("mobilenet_v2", (8, 9, 3), {"width": 0.35}),
        ("cosmoflow", (8, 9, 10, 2), {"stages": 3, "filters": 4}),
    ],
)
def test_small_inputs_go_forward_and_backward(
    name: str, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    model = Model(create_net(name, 3, shape, **options), shape, backend="numpy")
    x = np.random.default_rng(0).normal(size=(2, *shape)).astype("float32")
    y, residuals = model.forward(x, StepContext(training=True, samples=np.arange(2)))
    assert y.shape == (2, 3)
    model.backward(np.ones_like(y), residuals)
    assert all(np.isfinite(p.grad).all() for p in model.parameters.values())
    first = list(model.parameters.values())[-2]
    assert (first.grad != 0).any(), f"nothing arrived at {first.name}"


@each(
    "name",
    ["alexnet", "vgg11_bn", "resnet18", "densenet121", "googlenet", "mobilenet_v1", "mobilenet_v2"],
)
@each("size", [64, 65, 96, 160, 224, 256])
def test_every_size_from_64_on_fits_the_large_form(name: str, size: int) -> None:
    assert wire(create_net(name, 5, (size, size, 3)), (size, size, 3)).outputs[0].shape == (5,)


def test_images_larger_than_224_need_no_more_parameters() -> None:
    for name in ("alexnet", "vgg11"):
        large = wire(create_net(name, 1000, (320, 256, 3)), (320, 256, 3))
        assert parameters(large) == PARAMETERS[name, IMAGENET, 1000]


@each(
    ("name", "least"),
    [
        ("cnn", 6),
        ("alexnet", 29),
        ("vgg16", 32),
        ("resnet44", 4),
        ("resnet50", 8),
        ("resnext50", 8),
        ("densenet40", 4),
        ("densenet121", 8),
        ("googlenet", 8),
        ("inception_v3", 75),
        ("mobilenet_v1", 8),
        ("mobilenet_v2", 8),
    ],
)
def test_images_that_are_too_small_are_told(name: str, least: int) -> None:
    wire(create_net(name, 3, (least, least, 1)), (least, least, 1))
    with pytest.raises(
        ValueError,
        match=rf"{name}: images must be at least {least} x {least}, got {least} x {least - 1}; ",
    ):
        create_net(name, 3, (least, least - 1, 1))


def test_the_auxiliary_output_of_inception_needs_large_images() -> None:
    with pytest.raises(
        ValueError, match="inception_v3: images must be at least 299 x 299, got 298"
    ):
        create_net("inception_v3", 3, (298, 299, 3), auxiliary=True)


def test_a_vector_in_the_place_of_an_image_is_told() -> None:
    with pytest.raises(ValueError, match=r"vgg16: expected images of shape \(H, W, C\), got \(784"):
        create_net("vgg16", 3, (784,))


@each(
    ("name", "options", "sentence"),
    [
        ("resnet45", {}, "unknown model 'resnet45'; did you mean .*'resnet44'"),
        (
            "resnet20",
            {"shortcuts": "A"},
            "unknown option of resnet20 'shortcuts'; did you mean 'sho",
        ),
        ("resnet20", {"shortcut": "B"}, "unknown shortcut of resnet20 'B'; "),
    ],
)
def test_unknown_names_are_told_with_the_nearest(
    name: str, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        create_net(name, 10, CIFAR, **options)


def test_patches_that_do_not_fit_into_the_image_are_told() -> None:
    with pytest.raises(ValueError, match="vit: images must be at least 16 x 16, got 12 x 40"):
        create_net("vit_tiny", 10, (12, 40, 3), patch=16)
    with pytest.raises(
        ValueError, match="vit: the sides of images must be multiples of patch=16, got 64 x 70"
    ):
        create_net("vit_b16", 10, (64, 70, 3))
    with pytest.raises(ValueError, match="MultiHeadAttention: heads must divide the 9 features"):
        wire(vit(9, 1, 2, 3, (8, 8, 3)), (8, 8, 3))


def test_names_in_a_vision_transformer_tell_the_place() -> None:
    names = [node.name for node in wire(create_net("vit_tiny", 10, CIFAR), CIFAR).nodes]
    for name in ("embedding.position", "block0.attention.in_proj", "block11.fc2", "head.fc"):
        assert name in names


def test_depths_that_do_not_exist_are_told() -> None:
    with pytest.raises(ValueError, match="cifar_resnet: depth must be 6 n \\+ 2, .* not 45"):
        cifar_resnet(45, 10, CIFAR)
    with pytest.raises(
        ValueError, match=r"imagenet_resnet: depth must be one of \(18, 34, .* not 2"
    ):
        imagenet_resnet(20, 10, CIFAR)
    with pytest.raises(ValueError, match=r"vgg: depth must be one of \(11, 13, 16, 19\), not 12"):
        vgg(12, 10, CIFAR)
    with pytest.raises(ValueError, match="cifar_densenet: depth must be 3 n \\+ 4, .* not 41"):
        cifar_densenet(41, 10, CIFAR)
    with pytest.raises(ValueError, match="cifar_densenet: depth must be 6 n \\+ 4, .* not 43"):
        cifar_densenet(43, 10, CIFAR, bottleneck=True)
    with pytest.raises(
        ValueError, match=r"imagenet_densenet: depth must be one of \(121, .* not 1"
    ):
        imagenet_densenet(100, 10, CIFAR)


@each(
    ("name", "options", "sentence"),
    [
        ("resnet34", {"groups": 32}, "groups and group_width must be 1 and 64 for depth 34, .* 32"),
        ("resnet50", {"groups": 0}, "imagenet_resnet: groups must be at least 1, got 0"),
        ("densenet40", {"compression": 1.5}, "cifar_densenet: compression must be .* 1, got 1.5"),
        ("densenet121", {"growth": 0}, "imagenet_densenet: growth must be at least 1, got 0"),
        ("densenet40", {"dropout": 1.0}, "Dropout: rate must be .* got 1"),
        ("googlenet", {"kernel": 4}, "googlenet: kernel must be odd, .* got 4"),
        ("mobilenet_v1", {"width": 0}, "mobilenet_v1: width must be .* 0, got 0"),
        ("mobilenet_v2", {"width": -1}, "mobilenet_v2: width must be .* 0, got -1"),
    ],
)
def test_options_out_of_range_are_told(name: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        create_net(name, 10, CIFAR, **options)


def test_layer_options_are_checked_by_the_layers() -> None:
    with pytest.raises(ValueError, match="Linear: features must be at least 1, got 0"):
        mlp(0, (4,))


def test_cosmoflow_with_filters_of_3_has_the_parameters_of_its_implementation_in_pytorch() -> None:
    shape = (128, 128, 128, 4)
    assert parameters(wire(create_net("cosmoflow", 4, shape, kernel=3), shape)) == 8_907_556


def test_cosmoflow_learns_the_mean_and_deviation_of_volumes() -> None:
    rng = np.random.default_rng(0)
    targets = rng.uniform(-1, 1, (64, 2)).astype("float32")
    means, deviations = (targets[:, i].reshape(-1, 1, 1, 1, 1) for i in range(2))
    x = rng.normal(size=(64, 8, 8, 8, 1)) * (deviations + 2) + means
    data = ArrayDataset(x.astype("float32"), targets, classes=None)
    net = create_net("cosmoflow", 2, (8, 8, 8, 1), filters=4, stages=3, dropout=0)
    trainer = Trainer(Model(net, (8, 8, 8, 1)), Adam(0.003), loss="mse", metrics=["mae"])
    history = trainer.fit(data, epochs=15, batch_size=16)
    assert history[-1]["loss"] < 0.3 * history[0]["loss"]
    assert abs(trainer.model.predict(x)).max() < 1.2


@each(
    ("shape", "options", "sentence"),
    [
        (
            (64, 64, 4),
            {},
            r"cosmoflow: expected volumes of shape \(D, H, W, C\), got \(64, 64, 4\)",
        ),
        (
            (32, 31, 64, 4),
            {},
            "cosmoflow: volumes must be at least 32 x 32 x 32 for 5 stages, got 32 x 31 x 64",
        ),
        ((16, 16, 16, 4), {"kernel": 0}, "cosmoflow: volumes must be at least 32 x 32 x 32 for 5"),
        ((16, 16, 16, 4), {"kernel": 0, "stages": 4}, "Conv3d: kernel_size must be a positive int"),
    ],
)
def test_volumes_and_options_that_do_not_fit_are_told(
    shape: tuple[int, ...], options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        create_net("cosmoflow", 4, shape, **options)


def test_alexnet_has_local_responses_where_it_is_told() -> None:
    names = [
        n.name for n in wire(create_net("alexnet", 10, CIFAR, local_response=True), CIFAR).nodes
    ]
    assert [names[names.index(f"norm{i}") - 1] for i in (1, 2)] == ["relu1", "relu2"]
    assert [names[names.index(f"norm{i}") + 1] for i in (1, 2)] == ["pool1", "pool2"]
    plain = [n.name for n in wire(create_net("alexnet", 10, CIFAR), CIFAR).nodes]
    assert [name for name in names if not name.startswith("norm")] == plain


def test_the_documented_numbers_of_parameters_are_true() -> None:
    page = (Path(__file__).parents[1] / "docs" / "models.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|([^|]*)\| ([\d,]+) \|", page, re.M)
    assert len(rows) > 20
    for name, given, count in rows:
        sizes, _, classes = (given.strip() or "224 x 224 x 3, 1000").partition(", ")
        shape = tuple(map(int, sizes.removesuffix(" tokens").split(" x ")))
        assert PARAMETERS[name, shape, int(classes)] == int(count.replace(",", ""))
    assert set(MODELS) <= set(re.findall(r"`(\w+)`", page)) | {
        f"{name}_bn" for name in ("vgg11", "vgg13", "vgg19")
    }


def test_the_documented_networks_of_sequences_are_built() -> None:
    page = (Path(__file__).parents[1] / "docs" / "models.md").read_text()
    text, code, recurrent = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(text, names)
    assert names["text"].shape == (24,)
    assert bytes(names["text"][:4].tolist()) == b"def "
    exec(code, names)
    x, lengths = np.ones((2, 50, 64), "float32"), np.array([[50], [3]], "float32")
    assert names["model"].predict((x, lengths)).shape == (2, 50, 10)
    exec(recurrent, names)
    assert names["model"].predict(x[..., :12]).shape == (2, 10)


@each("name", ["char_lstm", "char_gru"])
def test_a_recurrent_network_learns_which_token_follows(name: str) -> None:
    rng = np.random.default_rng(0)
    start, step = rng.integers(0, 7, (20, 1)), rng.integers(1, 4, (20, 1))
    text = (start + step * np.arange(20)) % 7  # the step follows from two tokens
    net = create_net(name, 7, (19,), width=16, layers=1)
    data = ArrayDataset(text[:, :-1].astype("float32"), text[:, 1:], classes=7)
    trainer = Trainer(Model(net, (19,)), Adam(0.02), progress=False)
    trainer.fit(data, epochs=20, batch_size=10)
    assert trainer.losses[-1] < trainer.losses[0] / 2


@each(
    ("name", "shape", "options", "sentence"),
    [
        ("char_lstm", (8, 3), {}, r"char_rnn: expected sequences of tokens, of shape \(T,\), got"),
        ("char_lstm", (8,), {"kind": "rnn"}, "char_rnn: kind must be lstm or gru, got 'rnn'"),
        ("cnn1d", (8, 8, 3), {}, r"cnn1d: expected signals of shape \(L, C\), got \(8, 8, 3\)"),
        ("cnn1d", (8, 3), {"width": 0}, "cnn1d: width must be"),
    ],
)
def test_sequences_and_signals_that_do_not_fit_are_told(
    name: str, shape: tuple[int, ...], options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        create_net(name, 5, shape, **options)
