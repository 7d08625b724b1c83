"""Nodes of ONNX files of other programs: what onnxruntime computes, or an error that names them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.layers import GELU, ReLU, ReLU6, Sequential, Sigmoid, SiLU, Tanh
from pydtnn.model import Model
from pydtnn.tools.interchange import export_onnx, import_onnx
from pydtnn.tools.interchange.__main__ import main
from pydtnn.tools.interchange.onnx import importing
from pydtnn.tools.interchange.onnx.functions import decimal
from pydtnn.tools.interchange.onnx.reading import Reading
from pydtnn.tools.interchange.onnx.sequence_readers import READERS
from tests.each import each
from tests.tools.interchange.runtime import Node, assert_close, compute, node, samples, write

RNG = np.random.default_rng(0)
IMAGE, FEATURES, SEQUENCE = ("n", 4, 7, 6), ("n", 6), ("n", 5, 6)


def floats(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype("float32")


def chain(*operators: Any) -> list[Node]:
    """Nodes one after the other: names with further inputs, "-" for none, perhaps attributes."""
    nodes, value = [], "x"
    for i, entry in enumerate(operators, start=1):
        words, attributes = (entry, {}) if isinstance(entry, str) else entry
        operator, *inputs = words.split()
        output = "y" if i == len(operators) else f"t{i}"
        inputs = [value, *("" if name == "-" else name for name in inputs)]
        nodes.append(node(operator, inputs, [output], **attributes))
        value = output
    return nodes


def gate(operator: str, **attributes: Any) -> list[Any]:
    """The product of a value with a function of it."""
    return [node(operator, ["x"], ["g"], **attributes), node("Mul", ["x", "g"], ["y"])]


POOL = {"kernel_shape": [3, 2], "strides": [2, 2]}
ERF = [
    node("Div", ["x", "root"], ["a"]),
    node("Erf", ["a"], ["b"]),
    node("Add", ["b", "one"], ["c"]),
    node("Mul", ["x", "c"], ["d"]),
    node("Mul", ["d", "half"], ["y"]),
]
HARD = [
    node("Add", ["x", "three"], ["a"]),
    node("Clip", ["a", "zero", "six"], ["b"]),
    node("Div", ["b", "six"], ["c"]),
    node("Mul", ["x", "c"], ["y"]),
]
SQUEEZE = [
    node("ReduceMean", ["x", "hw"], ["a"], keepdims=1),
    node("Conv", ["a", "w1"], ["b"]),
    node("Sigmoid", ["b"], ["c"]),
    node("Mul", ["c", "x"], ["y"]),
]
SHUFFLE = [
    node("Reshape", ["x", "to5"], ["a"]),
    node("Transpose", ["a"], ["b"], perm=[0, 2, 1, 3, 4]),
    node("Reshape", ["b", "to4"], ["c"]),
    node("Split", ["c"], ["d", "e"], axis=1, num_outputs=2),
    node("Conv", ["e", "w2"], ["f"]),
    node("Concat", ["f", "d"], ["y"], axis=1),
]
CUT_SHAPES = [
    node("Shape", ["x"], ["s"]),
    node("Gather", ["s", "i0"], ["n"]),
    node("Unsqueeze", ["n", "i00"], ["m"]),
    node("Concat", ["m", "minus"], ["t"], axis=0),
    node("Reshape", ["x", "t"], ["f"]),
    node("Gemm", ["f", "big"], ["y"]),
]
NUMBERS: dict[str, Any] = {
    **{"root": np.float32(np.sqrt(2)), "one": np.float32(1), "half": np.float32([0.5])},
    **{"three": np.float32(3), "zero": np.float32(0), "six": np.float32(6)},
    **{"hw": np.array([2, 3]), "w1": floats(4, 4, 1, 1), "w2": floats(2, 2, 1, 1)},
    **{"to5": np.array([0, 2, 2, 7, 6]), "to4": np.array([0, 4, 7, 6]), "i0": np.array(0)},
    **{
        "i00": np.array([0]),
        "minus": np.array([-1]),
        "big": floats(168, 3),
        "axis1": np.array([1]),
    },
    **{"w": floats(4, 3, 3, 2), "bias": floats(3), "c4": floats(4), "c411": floats(4, 1, 1)},
    **{"v4": np.abs(floats(4)), "c6": floats(6), "c56": floats(5, 6)},
    **{"c168": floats(168), "v168": np.abs(floats(168))},
    **{"none": floats(0), "scales": np.float32([1, 1, 2, 3]), "ten": np.array([10])},
    **{"hundred": np.array([100])},
    **{"slope": np.float32([0.25]), "conv": floats(5, 4, 3, 3), "pads": np.array([1, 0, 0, 2])},
    **{"behind": np.array([0, 0, 0, 0, 0, 1, 1, 1]), "pads_at": np.array([-1, 2])},
    **{"m66": floats(6, 6), "sizes": np.array([1, 4, 14, 6])},
    **{"to1": np.array([1, 4, 7, 6]), "i012": np.array([1, 2, 3], np.int32)},
}
WORKS: dict[str, Any] = {
    "mean of an image before opset 18": (chain(("ReduceMean", {"axes": [3, 2]})), IMAGE, 13),
    "mean of rows": (chain(("ReduceMean axis1", {"keepdims": 0})), SEQUENCE),
    "axes of one element": chain("GlobalAveragePool", "Squeeze"),
    "silu": gate("Sigmoid"),
    "gelu": (chain("Gelu"), IMAGE, 20),
    "tanh gelu": (chain(("Gelu", {"approximate": "tanh"})), SEQUENCE, 20),
    "gelu of erf": (ERF, SEQUENCE),
    "hard swish of clip": HARD,
    "product with itself": chain("Mul x"),
    "squeeze and excitation": SQUEEZE,
    "transposed convolution": chain(
        ("ConvTranspose w bias", {"strides": [2, 3], "output_padding": [1, 0]})
    ),
    "nearest": chain(
        (
            "Resize none scales",
            {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
        )
    ),
    "linear": (chain(("Resize - - sizes", {"mode": "linear"})), (1, 4, 7, 6)),
    "layer norm": (chain("LayerNormalization c6 c6"), SEQUENCE),
    "layer norm of channels": chain(
        ("Transpose", {"perm": [0, 2, 3, 1]}),
        ("LayerNormalization c4", {"axis": 3}),
        ("Transpose", {"perm": [0, 3, 1, 2]}),
    ),
    "instance norm": chain("InstanceNormalization c4 c4"),
    "group norm": (chain(("GroupNormalization c4 c4", {"num_groups": 2})), IMAGE, 21),
    "batch norm of positions": (chain("BatchNormalization c4 c4 c4 v4"), ("n", 4, 4)),
    "an input": (chain("Identity"), FEATURES),
    "cast": chain(("Cast", {"to": 1}), "Relu"),
    "a constant that is cast": (
        [node("Cast", ["i012"], ["c"], to=7), node("Gather", ["x", "c"], ["y"], axis=1)],
        FEATURES,
    ),
    "clip without end": chain("Clip zero"),
    "prelu": chain("PRelu slope"),
    "ceil": chain(("MaxPool", POOL | {"ceil_mode": 1, "pads": [1, 0, 0, 1]})),
    "same lower": chain(("MaxPool", POOL | {"auto_pad": "SAME_LOWER"})),
    "shuffle": SHUFFLE,
    "computed shapes": CUT_SHAPES,
    "norm of flattened features": chain(
        "Flatten", "BatchNormalization c168 c168 c168 v168", "Gemm big"
    ),
    "same upper convolution": chain(
        ("Conv conv", {"auto_pad": "SAME_UPPER", "strides": [2, 1]}), "Clip zero six"
    ),
    "products of features": chain("Flatten", ("Gemm big bias", {"alpha": 0.5, "beta": 2.0})),
    "local response": chain(("LRN", {"size": 3, "alpha": 0.5})),
    "slice of flattened features": chain("Flatten", "Slice ten hundred axis1"),
    "softmax of pixels": chain(("Softmax", {"axis": 1})),
    "factors and terms of channels": chain("Mul c411", "Add c411", "Sub c411"),
    "a number less": ([node("Sub", ["one", "x"], ["y"])], IMAGE),
    "divided channels": (chain("Div v4"), ("n", 5, 4)),
    "terms of positions": (chain("Add c56"), SEQUENCE),
    "pads of some axes": chain("Pad pads - pads_at"),
    "pads behind each axis": chain("Pad behind"),
    "outer flatten": (chain(("Flatten", {"axis": 3}), "Reshape to1"), (1, 4, 7, 6)),
}


def layer_norm(*behind: Any, axes: Any = None, opset: int = 18) -> list[Any]:
    """A layer norm as exporters write it before opset 17, and what follows it."""
    attributes = {} if opset >= 18 else {"axes": [-1]}
    more = [axes or "last"] if opset >= 18 else []
    last = "n" if behind else "y"
    return [
        node("ReduceMean", ["x", *more], ["m"], **attributes),
        node("Sub", ["x", "m"], ["a"]),
        node("Pow", ["a", "two"], ["s"]),
        node("ReduceMean", ["s", *more], ["v"], **attributes),
        node("Add", ["v", "epsilon"], ["e"]),
        node("Sqrt", ["e"], ["d"]),
        node("Div", ["a", "d"], [last]),
        *behind,
    ]


AFFINE = [node("Mul", ["n", "c6"], ["k"]), node("Add", ["b6", "k"], ["y"])]


def attention(*between: Any, scores: str = "s", opset: int = 18) -> list[Any]:
    """Attention of two heads, with nodes between the products `p` and Softmax of `scores`."""
    parts = {"num_outputs": 3} if opset >= 18 else {}
    return [
        node("MatMul", ["x", "qkv"], ["h"]),
        node("Split", ["h"], ["q", "k", "v"], axis=2, **parts),
        *[node("Reshape", [name, "heads"], [f"{name}1"]) for name in "qkv"],
        node("Transpose", ["q1"], ["q2"], perm=[0, 2, 1, 3]),
        node("Transpose", ["k1"], ["k2"], perm=[0, 2, 3, 1]),
        node("Transpose", ["v1"], ["v2"], perm=[0, 2, 1, 3]),
        node("MatMul", ["q2", "k2"], ["p"]),
        *between,
        node("Softmax", [scores], ["weights"]),
        node("MatMul", ["weights", "v2"], ["o"]),
        node("Transpose", ["o"], ["o1"], perm=[0, 2, 1, 3]),
        node("Reshape", ["o1", "together"], ["y"]),
    ]


def scaled(by: str) -> Any:
    return node("Mul", ["p", by], ["s"])


def masked(hidden: str, *values: str) -> Any:
    """`masked_fill` of scores with a number, or `where` with the number as the second value."""
    return node("Where", [hidden, *values], ["f"])


def class_token(*shape: Any) -> list[Any]:
    return [
        node("Shape", ["x"], ["size"]),
        node("Gather", ["size", "i0"], ["count"]),
        node("Unsqueeze", ["count", "i00"], ["one_count"]),
        *shape,
        node("Concat", ["tokens", "x"], ["y"], axis=1),
    ]


def resized(to: tuple[int, int], **options: Any) -> tuple[Any, ...]:
    name = f"to{to[0]}x{to[1]}"
    NUMBERS[name] = np.array([1, 4, *to])
    return chain((f"Resize - - {name}", options)), (1, 4, 7, 6)


THRESHOLD = [
    node("Softplus", ["x"], ["a"]),
    node("Greater", ["x", "twenty"], ["b"]),
    node("Where", ["b", "x", "a"], ["y"]),
]
LINEAR = {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"}
FLOOR = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
LATER = np.triu(np.ones((5, 5), bool), 1)
NUMBERS |= {
    **{"two": np.float32(2), "epsilon": np.float32(1e-3), "b6": floats(6), "last": np.array([-1])},
    **{"last_two": np.array([2, 3]), "qkv": floats(6, 18), "heads": np.array([0, 5, 2, 3])},
    **{
        "together": np.array([0, 5, 6]),
        "third": np.float32(1 / np.sqrt(3)),
        "twenty": np.float32(20),
    },
    **{"later": LATER, "kept": ~LATER[None, None], "infinite": np.float32(-np.inf)},
    **{
        "tokens2": floats(1, 2, 6),
        "large": np.float32(-1e9),
        "token": floats(1, 1, 6),
        "minus2": np.array([-1, -1]),
    },
    **{"ones3": np.ones(3, np.int64), "minus3": -np.ones(3, np.int64)},
    **{"six_rows": np.array([6]), "six_six": np.array([6, 6]), "two_rows": np.array([1, 5, 12])},
    **{"one_by_one": floats(5, 4, 1, 1), "minus_half": np.float32(-0.5)},
}
WORKS |= {
    "layer norm of nodes": (layer_norm(*AFFINE), SEQUENCE),
    "layer norm of nodes before opset 18": (layer_norm(*AFFINE, opset=13), SEQUENCE, 13),
    "layer norm of nodes of images": (layer_norm(axes="last_two"), IMAGE),
    "causal attention by masked_fill": (
        attention(scaled("third"), masked("later", "infinite", "s"), scores="f"),
        SEQUENCE,
    ),
    "causal attention by where": (
        attention(scaled("third"), masked("kept", "s", "large"), scores="f"),
        SEQUENCE,
    ),
    "causal attention, masked before its factor": (
        attention(masked("later", "large", "p"), node("Mul", ["f", "half"], ["s"])),
        SEQUENCE,
    ),
    "attention of another scale": (attention(scaled("half"), opset=13), SEQUENCE, 13),
    "attention with a scale of computed constants": (
        attention(node("Pow", ["three", "minus_half"], ["third_1"]), scaled("third_1")),
        SEQUENCE,
    ),
    "attention without a scale": (attention(scores="p"), SEQUENCE),
    "class token by expand": (
        class_token(
            node("Concat", ["one_count", "minus2"], ["sizes_1"], axis=0),
            node("Equal", ["sizes_1", "minus3"], ["free"]),
            node("Where", ["free", "ones3", "sizes_1"], ["shape"]),
            node("Expand", ["token", "shape"], ["tokens"]),
        ),
        SEQUENCE,
    ),
    "class token of one sample": (
        [node("Concat", ["token", "x"], ["y"], axis=1)],
        (1, *SEQUENCE[1:]),
    ),
    "pixels of channels": chain(("DepthToSpace", {"blocksize": 2, "mode": "CRD"})),
    "filled shapes": (
        [
            node("ConstantOfShape", ["six_rows"], ["a"]),
            node("Add", ["a", "c6"], ["b"]),
            node("Add", ["x", "b"], ["y"]),
        ],
        FEATURES,
    ),
    "transposed constants of three axes": (
        [
            node("Transpose", ["c411"], ["a"], perm=[1, 0, 2]),
            node("Reshape", ["a", "minus"], ["b"]),
            node("Add", ["x", "b"], ["y"]),
        ],
        ("n", 4),
    ),
    "softplus below a threshold": (THRESHOLD, FEATURES),
    "maxima of images": chain(("ReduceMax hw", {"keepdims": 0})),
    "maxima of channels": chain(("ReduceMax axis1", {"keepdims": 0})),
    "nearest by fractions": resized((10, 4), **FLOOR),
    "nearest centres by fractions": resized((5, 9), nearest_mode="round_prefer_ceil"),
    "nearest centres by other fractions": resized((4, 8)),
    "linear by fractions": resized((10, 4), **LINEAR),
    "convolution of one pixel with padding": chain(("Conv one_by_one", {"pads": [1, 0, 1, 2]})),
    "leaky relu of slope 0": chain(("LeakyRelu", {"alpha": 0.0})),
    "prelu of slope 0": (chain("PRelu zero"), FEATURES),
}


STATES = [
    node("Shape", ["x"], ["size"]),
    node("Gather", ["size", "i0"], ["count"]),
    node("Unsqueeze", ["count", "i00"], ["n"]),
    node("Concat", ["n3", "n", "n4"], ["shape3"], axis=0),
    node("Expand", ["s114", "shape3"], ["states"]),
    node("Slice", ["states", "n1", "n2", "i00"], ["h0"]),
    node("Concat", ["n1", "n", "n4"], ["shape1"], axis=0),
    node("ConstantOfShape", ["shape1"], ["c0"]),
    node("Transpose", ["x"], ["first"], perm=[1, 0, 2]),
    node("LSTM", ["first", "w4", "u4", "b4", "", "h0", "c0"], ["all"], hidden_size=4),
    node("Squeeze", ["all", "axis1"], ["steps"]),
    node("Transpose", ["steps"], ["y"], perm=[1, 0, 2]),
]
NUMBERS |= {"w4": floats(1, 16, 6), "u4": floats(1, 16, 4), "b4": floats(1, 32)}
NUMBERS |= {"s114": np.zeros((1, 1, 4), "float32")}
NUMBERS |= {f"n{number}": np.array([number]) for number in (1, 2, 3, 4)}
WORKS |= {
    "states of the size of the batch before the first step": (STATES, SEQUENCE),
    "axes that are added and taken away": (chain("Unsqueeze axes13", "Squeeze axes13"), SEQUENCE),
    "means of channels": chain(("ReduceMean axis1", {"keepdims": 0})),
    "means of channels and columns": chain(("ReduceMean axes13", {"keepdims": 0})),
    "means of rows and channels": chain(("ReduceMean axes12", {"keepdims": 1})),
    "a sum of one": chain("Sum"),
}
NUMBERS |= {"axes13": np.array([1, 3]), "axes12": np.array([1, 2])}


def of_images(entry: Any) -> tuple[Any, ...]:
    """The nodes, shape and perhaps opset of an entry, which is of images if it has nodes alone."""
    return entry if isinstance(entry, tuple) else (entry, IMAGE)


def used(nodes: list[Any]) -> dict[str, Any]:
    """The constants that nodes read."""
    names = {name for entry in nodes for name in entry.inputs}
    return {name: array for name, array in NUMBERS.items() if name in names}


@each("name", WORKS)
def test_a_model_computes_what_onnxruntime_does(name, tmp_path):
    nodes, shape, *opset = of_images(WORKS[name])
    path = write(tmp_path / "net.onnx", nodes, shape, used(nodes), *opset)
    model = import_onnx(path)
    (x,) = samples(model, 1 if shape[0] == 1 else 3)
    assert_close(model.predict(x), compute(path, x))
    if name in ("silu", "gelu of erf", "hard swish of clip"):
        assert len(model.description.parts) == 1
    if name != "shuffle":  # features in an order that an exported file cannot express
        back = tmp_path / "back.onnx"
        export_onnx(model, back)
        assert_close(compute(back, x), model.predict(x))


BATCH_NORM = node(
    "BatchNormalization", ["x", "c4", "c4", "c4", "v4"], ["y", "m1", "v1", "m2", "v2"]
)
REFUSED: dict[str, Any] = {
    "asin: has the operator Asin, which cannot be imported; expected one of": chain("Relu", "Asin"),
    "maxpool: dilations must be 1, got [2, 1]": chain(
        ("MaxPool", {"kernel_shape": [2, 2], "dilations": [2, 1]})
    ),
    "conv: input 1 must be a constant, got x, which is co": chain("Conv x"),
    "softmax: the axis must not be that of the batch, got 0": chain(("Softmax", {"axis": 0})),
    "softmax: expected an axis whose following ones": (chain("Softmax"), IMAGE, 11),
    "concat: expected computed inputs, or a constant position": (
        [node("Concat", ["x", "c411b"], ["y"], axis=1)],
        ("n", 4, 1, 1),
    ),
    "concat: expected a constant position (1, 1, 6) before a sequence, got (1, 2, 6)": (
        [node("Concat", ["tokens2", "x"], ["y"], axis=1)],
        (1, *SEQUENCE[1:]),
    ),
    "batchnormalization: expected a network for inference": ([BATCH_NORM], IMAGE, 13),
    "dropout: expected a network for inference, got training_mode=True": chain("Dropout half true"),
    "conv: kernel, strides and dilations must be positive": chain(
        ("Conv conv", {"strides": [0, 1]})
    ),
    "prelu: the slope must be one positive number": chain("PRelu c411"),
    "clip: expected constants, or a part of an activation": chain("Clip zero three"),
    "resize: expected a whole height and width of an image": chain("Resize - ones4h"),
    "expand: input 0 must be a constant, got x": (chain("Expand two_rows"), SEQUENCE),
    "depthtospace: mode must be CRD": chain(("DepthToSpace", {"blocksize": 2})),
    "where: a mask must hide later positions": (
        attention(scaled("third"), masked("kept", "infinite", "s"), scores="f"),
        SEQUENCE,
    ),
    "mul: masked scores must have a factor above 0.01, got -1": (
        attention(masked("later", "large", "p"), node("Mul", ["f", "minus_f"], ["s"])),
        SEQUENCE,
    ),
    "div: the axes must be the last ones": (layer_norm(axes="axis1"), SEQUENCE),
    "resize: outputs of samples must have at most": chain("Resize - huge"),
    "expand: the inputs do not suit the operator (expected at most": (
        [node("Expand", ["one", "wide"], ["a"]), node("Add", ["x", "a"], ["y"])],
        IMAGE,
    ),
    "concat: the inputs do not suit the operator (expected at most": (
        [node("Concat", ["c168"] * 100_000, ["a"], axis=0), node("Add", ["x", "a"], ["y"])],
        IMAGE,
    ),
    "averagepool: ceil_mode must be 0 if pads count": chain(
        ("AveragePool", POOL | {"ceil_mode": 1, "pads": [0, 1, 0, 0], "count_include_pad": 1})
    ),
    "relu: expected attention: a product of queries": (chain("MatMul x", "Relu"), ("n", 6, 6)),
    "range: the inputs do not suit the operator (integer division or modulo by zero)": (
        [node("Range", ["i0", "i0", "i0"], ["a"]), node("Add", ["x", "a"], ["y"])],
        IMAGE,
    ),
    "split: expected parts of the axis of size 4, got [1, 1, 1, 1, 0, -1, -2, -3": (
        [node("Split", ["x"], ["y", *map(str, range(999))], axis=1)],
        IMAGE,
    ),
    "gather: expected one index, or a range": (chain(("Gather i021", {"axis": 1})), FEATURES),
    "gather: expected integers, got indices of shape (1, 2), int64": (
        chain(("Gather rows", {"axis": 1})),
        FEATURES,
    ),
    "lrn: size must be odd, got 4": chain(("LRN", {"size": 4})),
    "reshape: input 1 must be a list of integers, got int64": (chain("Reshape rows"), FEATURES),
}
NUMBERS |= {
    **{"c411b": floats(1, 4, 1, 1)},
    **{"true": np.array(True), "ones4h": np.float32([1, 1, 1.5, 1]), "i021": np.array([0, 2, 1])},
    **{"huge": np.float32([1, 1, 1e6, 1e6])},
    **{"wide": np.array([2**20, 2**20]), "i0": np.array(0), "minus_f": np.float32(-1)},
    **{"rows": np.array([[0, -1]])},
}


@each("message", REFUSED)
def test_a_node_that_no_layer_computes_is_refused_by_name(message, tmp_path):
    nodes, shape, *opset = of_images(REFUSED[message])
    path = write(tmp_path / "net.onnx", nodes, shape, used(nodes), *opset)
    operator, _, problem = message.partition(": ")
    with pytest.raises(ValueError, match=re.escape(problem)) as caught:
        import_onnx(path)
    assert len(str(caught.value)) < 1000
    start = f"import_onnx: {path}: node {operator}"
    assert str(caught.value).startswith(start)
    assert "\n" not in str(caught.value)


def test_nodes_compute_as_many_constants_as_are_allowed(tmp_path, monkeypatch):
    monkeypatch.setattr(importing, "MAX_ELEMENTS", 100 - 4 * 2)  # beside four times those of a file
    numbers = {"a0": np.float32([1]), "forty": np.array([40])}
    for count in (2, 3):
        nodes = [node("Expand", [f"a{i}", "forty"], [f"a{i + 1}"]) for i in range(count)]
        nodes += [node("Add", ["x", f"a{count}"], ["y"])]
        path = write(tmp_path / f"{count}.onnx", nodes, ("n", 40), numbers)
        if count == 2:
            import_onnx(path)
    with pytest.raises(ValueError, match="constants that nodes compute must not exceed those of"):
        import_onnx(path)


NO_NODE: dict[str, tuple[Any, ...]] = {
    "input x must be of shape (N, C, H, W), (N, C, D, H, W), (N, T, C) or (N, C) w": (
        chain("Relu"),
        ("n", 3, "h", "w"),
    ),
    "expected operators of opset 11 or later, got opset 6": (chain("Relu"), IMAGE, {}, 6),
    "output y must be computed, got a constant or integers": (
        [node("Identity", ["c"], ["y"])],
        IMAGE,
        {"c": np.float32([1])},
    ),
    "conv.w must be finite, got inf": (
        chain("Conv infinite"),
        IMAGE,
        {"infinite": np.float32(np.inf) * np.ones((2, 4, 1, 1), "float32")},
    ),
}


@each("message", NO_NODE)
def test_a_file_that_cannot_be_imported_is_refused_in_a_sentence(message, tmp_path):
    path = write(tmp_path / "net.onnx", *NO_NODE[message])
    with pytest.raises(ValueError, match="^" + re.escape(f"import_onnx: {path}: {message}")):
        import_onnx(path)
    data = path.read_bytes()
    for damage in (data[: len(data) // 2], b"a text, not a file"):
        path.write_bytes(damage)
        with pytest.raises(ValueError, match="not an ONNX file, or damaged"):
            import_onnx(path)


def damaged(kind: str, path: Path) -> None:
    """Write a file that a program would have to trust."""
    onnx: Any = pytest.importorskip("onnx", reason="onnx is not installed; pip install onnx")
    write(path, chain("Add c4", "Relu"), ("n", 4), used(chain("Add c4")))
    message = onnx.load(path)
    graph, (secret,) = message.graph, message.graph.initializer
    if kind == "constant":
        graph.node.insert(0, onnx.helper.make_node("Constant", [], ["k"], value=secret))
        graph.node[1].input[1] = "k"
        del graph.initializer[:]
        secret = graph.node[0].attribute[0].t
    if kind == "type":
        secret.data_type = 99
    elif kind == "type of an input":
        graph.input[0].type.tensor_type.elem_type = 99
    elif kind == "no output":
        del graph.output[:]
    elif kind == "function":
        message.functions.add(name="Relu2", domain="own")
    else:
        secret.ClearField("raw_data")
        secret.data_location = onnx.TensorProto.EXTERNAL
        (path.parent / "secret").write_bytes(floats(4).tobytes())
        place = f"../{path.parent.name}/secret" if kind == "constant" else "secret"
        start, length = (-4, str(10**30)) if kind == "negative" else (0, "9" * 5000)
        for key, value in {"location": place, "offset": str(start), "length": length}.items():
            secret.external_data.add(key=key, value=value)
    path.write_bytes(message.SerializeToString())


@each(
    ("kind", "problem"),
    [
        ("constant", "array c4: expected plain names of files in "),
        ("length", "not an ONNX file, or damaged ("),
        ("negative", "not an ONNX file, or damaged ("),
        ("type", "not an ONNX file, or damaged ("),
        ("type of an input", "input x must have elements of type float16, float32, float64, int32"),
        ("no output", "expected a graph with inputs and outputs, got one without"),
        ("function", "expected a graph of operators and dense arrays, got functions or sparse"),
    ],
)
def test_a_file_is_not_trusted(kind, problem, tmp_path, monkeypatch):
    path = tmp_path / "net.onnx"
    damaged(kind, path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="^" + re.escape(f"import_onnx: {path}: {problem}")):
        import_onnx(path)


@each("entries", [{}, {"offset": "8", "length": "24"}])
def test_arrays_in_a_file_beside_it_are_read(entries, tmp_path):
    onnx: Any = pytest.importorskip("onnx", reason="onnx is not installed; pip install onnx")
    nodes = chain("Add c6", "Relu")
    inside = import_onnx(write(tmp_path / "a.onnx", nodes, FEATURES, used(nodes)))
    path = tmp_path / "b.onnx"
    message = onnx.load(tmp_path / "a.onnx")
    (array,) = message.graph.initializer
    start = int(entries.get("offset", 0))
    (tmp_path / "b.onnx.data").write_bytes(b"." * start + array.raw_data)
    array.ClearField("raw_data")
    array.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": "b.onnx.data", **entries}.items():
        array.external_data.add(key=key, value=value)
    path.write_bytes(message.SerializeToString())
    model = import_onnx(path, verify=importing.can_verify())
    (x,) = samples(model)
    np.testing.assert_array_equal(model.predict(x), inside.predict(x))
    (tmp_path / "b.onnx.data").rename(tmp_path / "c")
    with pytest.raises(FileNotFoundError, match=r"array c6: file \S+b.onnx.data does not exist"):
        import_onnx(path)
    (tmp_path / "b.onnx.data").symlink_to("/etc/hostname")
    with pytest.raises(ValueError, match="array c6: expected files in .*, a link to"):
        import_onnx(path)


def of_one(count: int) -> list[Any]:
    """Many nodes that read the same input, a concatenation, and one that reads them all."""
    made = [f"a{number}" for number in range(2 * count)]
    every = [node("Concat", ["b", "b"], [name], axis=1) for name in made]
    return [node("Concat", ["x", "x"], ["b"], axis=1), *every, node("Concat", made, ["y"], axis=1)]


def test_the_work_of_an_import_is_proportional_to_the_nodes(tmp_path):
    def calls(count: int) -> int:
        nodes = of_one(count)
        path, number = write(tmp_path / "net.onnx", nodes, FEATURES, used(nodes)), 0

        def count_call(frame: Any, event: str, argument: Any) -> None:
            nonlocal number
            number += event == "call"

        sys.setprofile(count_call)
        try:
            import_onnx(path)
        finally:
            sys.setprofile(None)
        return number

    calls(1)  # imports modules
    small, large = calls(25), calls(100)
    assert large < 4.4 * small  # proportional, and what does not depend on the nodes


def wrong(at: Reading) -> Any:
    """A reader that errs."""
    return at.layer(ReLU(), at.value())


def test_a_wrong_import_is_found_by_its_outputs_unless_they_are_not_compared(
    tmp_path, monkeypatch, capsys
):
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    path, folder = write(tmp_path / "net.onnx", chain("Tanh"), IMAGE), str(tmp_path / "a.pydtnn")
    import_onnx(path, verify=True)
    assert main(["import", str(path), folder]) == 0
    assert "outputs are those of onnxruntime" in capsys.readouterr().out
    monkeypatch.setattr(importing, "READERS", {**READERS, "Tanh": wrong})
    import_onnx(path)
    with pytest.raises(ValueError, match=r"output y differs by .* the import is wrong, please"):
        import_onnx(path, verify=True)
    with pytest.raises(ValueError, match="differs by 1e-09 of at most 2e-09"):
        importing._compare("y", np.float64([1e-9]), np.float64([2e-9]), "float32")
    assert main(["import", str(path), folder]) == 1
    assert "the import is wrong" in capsys.readouterr().err
    assert main(["import", str(path), folder, "--no-verify"]) == 0
    monkeypatch.setattr("pydtnn.tools.interchange.__main__.can_verify", lambda: False)
    assert main(["import", str(path), folder]) == 0
    assert "not compared: onnxruntime is not installed" in capsys.readouterr().out


def test_batches_of_a_fixed_size_may_have_any(tmp_path):
    nodes = chain("Reshape flat", "Gemm big")
    constants = {"flat": np.array([1, 168]), "big": NUMBERS["big"]}
    path = write(tmp_path / "net.onnx", nodes, (1, 4, 7, 6), constants)
    model = import_onnx(path, verify=True)
    (x,) = samples(model, 3)
    expected = np.concatenate([compute(path, x[i : i + 1]) for i in range(3)])
    assert_close(model.predict(x), expected)


def test_a_reshaped_matrix_of_an_embedding_is_not_that_of_tied_logits(tmp_path):
    nodes = [
        node("Gather", ["m66", "x"], ["h"]),
        node("Reshape", ["m66", "six_six"], ["m"]),
        node("MatMul", ["h", "m"], ["y"]),
    ]
    path = write(tmp_path / "net.onnx", nodes, ("n", 5), used(nodes), kind="INT64")
    x = np.arange(5, dtype="float32")[np.newaxis]
    assert_close(import_onnx(path).predict(x), compute(path, x))


def test_a_matrix_of_tokens_and_of_their_logits_is_one(tmp_path):
    nodes = [
        node("Gather", ["m66", "x"], ["h"]),
        node("Transpose", ["m66"], ["m"], perm=[1, 0]),
        node("MatMul", ["h", "m"], ["y"]),
    ]
    path = write(tmp_path / "net.onnx", nodes, ("n", 5), used(nodes), kind="INT64")
    model, x = import_onnx(path), np.arange(5, dtype="float32")[np.newaxis]
    assert [p.shape for p in model.parameters.values()] == [(6, 6)]
    assert_close(model.predict(x), compute(path, x))


def test_layers_have_the_names_of_nodes_and_a_constant_may_be_one(tmp_path):
    onnx: Any = pytest.importorskip("onnx", reason="onnx is not installed; pip install onnx")
    target = onnx.numpy_helper.from_array(np.array([0, -1], np.int64))
    nodes = [
        node("Constant", [], ["shape"], value=target),
        node("Reshape", ["x", "shape"], ["a"], name="/flat"),
        node("MatMul", ["a", "big"], ["b"], name="/product"),
        node("Add", ["bias", "b"], ["c"], name="/body/sum"),
        node("Softmax", ["c"], ["y"]),
    ]
    path = write(tmp_path / "net.onnx", nodes, IMAGE, used(nodes))
    model = import_onnx(path)
    assert [part.name for part in model.description.parts] == ["flat", "body.sum", "softmax"]
    (x,) = samples(model)
    assert_close(model.predict(x), compute(path, x))


def test_numbers_of_float32_are_their_shortest_decimals_and_others_stay():
    assert decimal(float(np.float32(0.1))) == 0.1
    assert decimal(1 / 3) == 1 / 3


def test_a_network_of_one_activation_of_another_has_both(tmp_path):
    model = Model(Sequential(Sigmoid(), GELU("none"), ReLU6(), GELU(), Tanh(), SiLU()), (3,))
    export_onnx(model, tmp_path / "net.onnx")
    kinds = [part.layer.kind for part in import_onnx(tmp_path / "net.onnx").description.parts]
    assert kinds == [Sigmoid, GELU, ReLU6, GELU, Tanh, SiLU]
