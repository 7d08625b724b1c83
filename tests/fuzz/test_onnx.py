"""Random ONNX graphs compute what onnxruntime does, or are refused with the node's name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.model import Model
from pydtnn.tools.interchange import export_onnx, import_onnx

onnx = pytest.importorskip("onnx", reason="onnx is not installed; pip install onnx")
runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
helper = onnx.helper

RTOL = 1e-4
"""Of the largest output: a dozen operators of float32, among them quotients and logarithms."""

INITIAL = [("n", 4, 6, 5), (1, 3, 7, 4), (2, 6, 4, 4), ("n", 5, 6), (1, 4, 4), ("n", 8), (3, 6)]
NAMED = r"import_onnx: \S+: (output y: )?(node \S+|output y|not an ONNX file).*"
"""Errors name the node; those of graphs that onnx itself refuses are its own."""


class Draft:
    """A graph under construction: nodes, constants, and values with their shapes."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.opset = int(rng.choice([11, 13, 17, 18, 20, 21]))
        self.input = INITIAL[rng.integers(len(INITIAL))]
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.values: list[tuple[str, tuple[Any, ...]]] = [("x", self.input)]

    def pick(self, *choices: Any) -> Any:
        return choices[self.rng.integers(len(choices))]

    def few(self, most: int) -> int:
        return int(self.rng.integers(1, most + 1))

    def floats(self, *shape: int) -> str:
        return self.constant(self.rng.normal(size=shape).astype("float32"))

    def constant(self, array: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(onnx.numpy_helper.from_array(np.asarray(array), name))
        return name

    def axes(self, name: str, axes: list[int], since: int) -> tuple[list[str], dict[str, Any]]:
        """Axes as an input since an opset, as an attribute before."""
        if self.opset >= since:
            return [self.constant(np.array(axes, np.int64))], {}
        return [], {name: axes}

    def add(self, operator: str, inputs: list[str], **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name

    def message(self) -> Any:
        """The file, with the last value as its output."""
        nodes = [*self.nodes, helper.make_node("Identity", [self.values[-1][0]], ["y"], name="y")]
        kind = onnx.TensorProto.FLOAT
        graph = helper.make_graph(
            nodes,
            "graph",
            [helper.make_tensor_value_info("x", kind, self.input)],
            [helper.make_tensor_value_info("y", kind, None)],
            self.constants,
        )
        imports = [helper.make_opsetid("", self.opset)]
        made = helper.make_model(graph, opset_imports=imports, ir_version=8)
        return onnx.shape_inference.infer_shapes(made, strict_mode=True, data_prop=True)

    def grow(self) -> None:
        """Add a node or a few; those that do not fit are taken back."""
        before = len(self.nodes), len(self.constants), len(self.values)
        name, shape = self.values[-1] if self.rng.random() < 0.8 else self.pick(*self.values)
        try:
            made = self.pick(*MAKERS)(self, name, shape)
            if made is None:
                raise ValueError
            self.values.append((made, ()))
            (output,) = self.message().graph.output
            dims = output.type.tensor_type.shape.dim
            sizes = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in dims]
            known = [n for n in sizes if isinstance(n, int)]
            if len(known) < len(sizes) - 1 or not sizes or not 0 < np.prod(known or [1]) < 3000:
                raise ValueError
            self.values[-1] = (made, tuple(sizes))
        except (ValueError, TypeError, IndexError, onnx.shape_inference.InferenceError):
            nodes, constants, values = before
            del self.nodes[nodes:], self.constants[constants:], self.values[values:]


Maker = Callable[[Draft, str, tuple[Any, ...]], str | None]


def window(draft: Draft, shape: tuple[Any, ...]) -> dict[str, Any]:
    options: dict[str, Any] = {"kernel_shape": [draft.few(3), draft.few(3)]}
    options["strides"] = [draft.few(3), draft.few(2)]
    way = draft.pick("pads", "pads", "none", "SAME_UPPER", "SAME_LOWER", "VALID")
    if way == "pads":
        most = [max(k - 1, 0) for k in options["kernel_shape"]]
        options["pads"] = [int(draft.rng.integers(0, k + 1)) for k in (*most, *most)]
    elif way != "none":
        options["auto_pad"] = way
    return options


def conv(draft: Draft, x: str, shape: tuple[Any, ...]) -> str | None:
    if len(shape) != 4:
        return None
    options = window(draft, shape)
    group = draft.pick(1, 1, 2, 3, shape[1])
    filters = group * draft.few(3)
    if shape[1] % group:
        return None
    if draft.rng.random() < 0.2:
        options["dilations"] = [draft.few(2), draft.few(2)]
    weights = draft.floats(filters, shape[1] // group, *options["kernel_shape"])
    bias = [draft.floats(filters)] * draft.few(2)
    return draft.add("Conv", [x, weights, *bias[1:]], group=group, **options)


def conv_transpose(draft: Draft, x: str, shape: tuple[Any, ...]) -> str | None:
    if len(shape) != 4:
        return None
    options = window(draft, shape)
    group = draft.pick(1, 1, 2)
    if shape[1] % group:
        return None
    weights = draft.floats(shape[1], draft.few(3), *options["kernel_shape"])
    if draft.rng.random() < 0.3:
        options["output_padding"] = [draft.few(2) - 1, draft.few(2) - 1]
    return draft.add("ConvTranspose", [x, weights], group=group, **options)


def pool(draft: Draft, x: str, shape: tuple[Any, ...]) -> str | None:
    if len(shape) != 4:
        return None
    operator = draft.pick("MaxPool", "AveragePool", "GlobalAveragePool")
    if operator.startswith("Global"):
        return draft.add(operator, [x])
    options = window(draft, shape)
    if draft.opset >= 19 or operator == "MaxPool":
        options["ceil_mode"] = draft.few(2) - 1
    if operator == "AveragePool":
        options["count_include_pad"] = draft.few(2) - 1
    return draft.add(operator, [x], **options)


def norm(draft: Draft, x: str, shape: tuple[Any, ...]) -> str | None:
    kind = draft.pick("batch", "instance", "layer", "response", "group")
    if kind == "layer":
        axis = int(draft.rng.integers(-len(shape), len(shape)))
        sizes = shape[axis:]
        if draft.opset < 17 or "n" in sizes:
            return None
        return draft.add("LayerNormalization", [x, draft.floats(*sizes)], axis=axis)
    if len(shape) < 3 and kind != "batch":
        return None
    vectors = [draft.floats(shape[1]) for _ in range(3)]
    if kind == "batch":
        variance = draft.constant(draft.rng.uniform(0.5, 2, shape[1]).astype("float32"))
        return draft.add("BatchNormalization", [x, *vectors, variance])
    if kind == "instance" and shape[2:] != (1,) * len(shape[2:]):  # of one element is rounding
        return draft.add("InstanceNormalization", [x, *vectors[:2]])
    if kind == "group":
        if draft.opset < 21 or shape[1] % 2 or np.prod(shape[1:]) == 2:
            return None
        return draft.add("GroupNormalization", [x, *vectors[:2]], num_groups=2)
    return (
        draft.add("LRN", [x], size=draft.few(4), alpha=0.3, beta=0.7) if len(shape) == 4 else None
    )


UNARY: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("Relu", "Sigmoid", "Tanh", "Atan", "Neg", "Identity", "HardSwish")),
    ("Softplus", {}),
    *(("Elu", {"alpha": a}) for a in (1.0, 0.3)),
    *(("LeakyRelu", {"alpha": a}) for a in (0.01, 0.5, 0.0)),
    *(("HardSigmoid", {"alpha": a}) for a in (0.2, 1 / 6)),
    *[("Gelu", {}), ("Gelu", {"approximate": "tanh"}), ("Erf", {}), ("Cast", {"to": 1})],
    *[("Dropout", {}), ("Log", {})],
]


def unary(draft: Draft, x: str, shape: tuple[Any, ...]) -> str | None:
    operator, attributes = draft.pick(*UNARY)
    if (operator == "Gelu" and draft.opset < 20) or (operator == "HardSwish" and draft.opset < 14):
        return None
    if operator == "Log":  # of positive numbers
        x = draft.add("Add", [draft.add("Relu", [x]), draft.constant(np.float32(0.5))])
    return draft.add(operator, [x], **attributes)


def number(draft: Draft) -> str:
    value = draft.pick(0.5, 1.0, 2.0, 3.0, 6.0, -1.0, 0.0, 1.7)
    return draft.constant(np.full(draft.pick((), (1,)), value, "float32"))


def arithmetic(draft: Draft, x: str, shape: tuple[Any, ...]) -> str | None:
    operator = draft.pick("Add", "Mul", "Sub", "Div", "Max", "Min", "Pow", "PRelu", "Clip")
    if operator == "Clip":
        bounds = draft.pick([0.0, 6.0], [0.0], [0.0, 1.0], [-1.0, 1.0])
        return draft.add("Clip", [x, *(draft.constant(np.float32(b)) for b in bounds)])
    if operator in ("Max", "Min", "Pow"):
        return draft.add(operator, [x, number(draft)])
    sizes = [1 if n == "n" or draft.rng.random() < 0.5 else n for n in shape]
    if operator == "PRelu" or draft.rng.random() < 0.4:
        sizes = [1] * len(sizes)
        if len(sizes) > 1:
            sizes[1] = shape[1]
    constant = draft.floats(*sizes) if draft.rng.random() < 0.6 else number(draft)
    pair = [x, constant] if operator == "PRelu" or draft.rng.random() < 0.7 else [constant, x]
    return draft.add(operator, pair)


def of_two(draft: Draft, x: str, shape: tuple[Any, ...]) -> str | None:
    other, _ = draft.pick(*draft.values)
    if draft.rng.random() < 0.3:
        return draft.add(draft.pick("Mul", "Add"), [x, draft.add("Sigmoid", [x])])
    return draft.add(draft.pick("Add", "Mul", "Sub", "Sum", "Div"), [x, other])


def activation(draft: Draft, x: str, shape: tuple[Any, ...]) -> str | None:
    """GELU, or HardSwish, of several nodes, perhaps with another constant."""
    half, three = draft.constant(np.float32(0.5)), draft.constant(np.float32(3))
    if draft.few(2) == 1:
        root = draft.constant(np.float32(draft.pick(np.sqrt(2), np.sqrt(2), 1.5)))
        odd = draft.add("Erf", [draft.add("Div", [x, root])])
        one = draft.constant(np.float32(1))
        return draft.add("Mul", [draft.add("Mul", [x, draft.add("Add", [odd, one])]), half])
    zero, six = draft.constant(np.float32(0)), draft.constant(np.float32(6))
    gate = draft.add("Clip", [draft.add("Add", [x, three]), zero, six])
    return draft.add("Mul", [x, draft.add("Div", [gate, draft.pick(six, three)])])


def reduce(draft: Draft, x: str, shape: tuple[Any, ...]) -> str | None:
    count = draft.few(2)
    axes = draft.rng.choice(len(shape), min(count, len(shape)), replace=False).tolist()
    inputs, attributes = draft.axes("axes", axes, 18)
    operator = draft.pick("ReduceMean", "ReduceMax")
    return draft.add(operator, [x, *inputs], keepdims=draft.few(2) - 1, **attributes)


def softmax(draft: Draft, x: str, shape: tuple[Any, ...]) -> str | None:
    operator = draft.pick("Softmax", "LogSoftmax")
    return draft.add(operator, [x], axis=int(draft.rng.integers(-len(shape), len(shape))))


def matrix(draft: Draft, x: str, shape: tuple[Any, ...]) -> str | None:
    features = draft.few(5)
    if not isinstance(shape[-1], int):
        return None
    if len(shape) == 2 and draft.rng.random() < 0.6:
        bias = draft.pick([], [(features,)], [(1, features)], [()], [(1,)], [(3, 1)])
        turned = draft.few(2) - 1
        sizes = (features, shape[1]) if turned else (shape[1], features)
        inputs = [x, draft.floats(*sizes), *(draft.floats(*b) for b in bias)]
        return draft.add("Gemm", inputs, transB=turned, alpha=draft.pick(1.0, 0.5))
    made = draft.add("MatMul", [x, draft.floats(shape[-1], features)])
    if draft.rng.random() < 0.5:
        made = draft.add("Add", [made, draft.floats(*draft.pick((features,), (1, features)))])
    return made


def view(draft: Draft, x: str, shape: tuple[Any, ...]) -> str | None:
    kind = draft.pick("Transpose", "Flatten", "Reshape", "Reshape", "Unsqueeze", "Squeeze")
    if kind == "Transpose":
        keeps = draft.rng.random() < 0.7
        perm = draft.rng.permutation(len(shape) - keeps) + keeps
        return draft.add(kind, [x], perm=[0] * keeps + perm.tolist())
    if kind == "Flatten":
        return draft.add(kind, [x], axis=draft.pick(1, 1, 2, -1))
    if kind in ("Unsqueeze", "Squeeze"):
        axes = [int(draft.rng.integers(1, len(shape) + 1))]
        if kind == "Squeeze":
            axes = [i for i, n in enumerate(shape) if n == 1 and i][:1]
        inputs, attributes = draft.axes("axes", axes, 13)
        return draft.add(kind, [x, *inputs], **attributes) if axes else None
    sizes = [int(n) for n in shape[1:]] or [1]
    target = draft.pick([-1], sizes[::-1], [*sizes[1:], sizes[0]], [sizes[0], -1], [-1, sizes[-1]])
    if draft.rng.random() < 0.3:
        target = [2, -1, *target[1:]]
    return draft.add(kind, [x, draft.constant(np.array([0, *target], np.int64))])


def part(draft: Draft, x: str, shape: tuple[Any, ...]) -> str | None:
    axis = int(draft.rng.integers(1, len(shape)))
    size, kind = shape[axis], draft.pick("Slice", "Gather", "Split", "Pad", "Concat")
    if not isinstance(size, int):
        return None
    if kind == "Slice":
        start = int(draft.rng.integers(0, size))
        stop = draft.pick(size, size + 5, -1, 2**31 - 1, start + 1)
        numbers = [[start], [stop], [draft.pick(axis, axis - len(shape))], [draft.few(2)]]
        return draft.add(kind, [x, *(draft.constant(np.array(n, np.int64)) for n in numbers)])
    if kind == "Gather":
        every = [*range(size)]
        index = draft.pick(0, -1, size - 1, [0], [0, size - 1], every, every[::2])
        return draft.add(kind, [x, draft.constant(np.array(index, np.int64))], axis=axis)
    if kind == "Split":
        if size < 2 or draft.opset < 13:
            return None
        first = int(draft.rng.integers(1, size))
        sizes, names = draft.constant(np.array([first, size - first])), [f"v{len(draft.nodes)}"]
        names.append(f"{names[0]}_rest")
        made = helper.make_node(kind, [x, sizes], names, name=names[0], axis=axis)
        draft.nodes.append(made)
        return draft.add("Concat", names[::-1], axis=axis) if draft.few(2) == 1 else names[0]
    if kind == "Pad":
        pads = draft.rng.integers(0, 3, 2 * len(shape))
        pads[[0, len(shape)]] = 0
        return draft.add(kind, [x, draft.constant(pads.astype(np.int64))])
    other, _ = draft.pick(*draft.values)
    return draft.add(kind, [x, other], axis=draft.pick(axis, axis - len(shape)))


def resize(draft: Draft, x: str, shape: tuple[Any, ...]) -> str | None:
    if len(shape) != 4:
        return None
    scales = np.float32(
        [1, 1, draft.pick(1, 2, 3, 0.5, 4 / 3), draft.pick(1, 2, 1.5, 2, 0.6, 2.25)]
    )
    mode = draft.pick("nearest", "linear")
    options = {"mode": mode}
    if mode == "nearest":
        options["nearest_mode"] = draft.pick("floor", "ceil", "round_prefer_floor")
    where = draft.pick("half_pixel", "asymmetric", "pytorch_half_pixel", "align_corners")
    options["coordinate_transformation_mode"] = where
    empty = draft.constant(np.zeros(0, "float32"))
    return draft.add("Resize", [x, empty, draft.constant(scales)], **options)


MAKERS: list[Maker] = [
    *(conv, conv, conv_transpose, pool, pool, norm, norm, unary, unary, arithmetic, arithmetic),
    *(of_two, activation, reduce, softmax, matrix, view, view, part, part, resize),
]


def computed(path: Path, x: np.ndarray) -> np.ndarray | None:
    """What onnxruntime computes; None if it refuses the file."""
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    try:
        session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        (value,) = session.get_inputs()
        (y,) = session.run(None, {value.name: np.moveaxis(x, -1, 1) if x.ndim > 3 else x})
    except Exception:  # of any type: those of onnxruntime have no common one
        return None
    y = y if y.ndim > 1 else y[:, None]  # an output (N,) is (N, 1) in a model
    return np.moveaxis(y, 1, -1) if y.ndim > 3 else y


def attempted(call: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """What a call returns, and the message of its error, or none."""
    try:
        return call(*args), ""
    except ValueError as error:
        return None, str(error)


def assert_equal(model: Model, x: np.ndarray, expected: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        y = model.predict(x)
    finite = np.isfinite(expected)
    bound = RTOL * abs(expected[finite]).max(initial=0) + 1e-30
    alike = y.shape == expected.shape and np.allclose(y, expected, 0, bound, equal_nan=True)
    if expected.ndim == 3 and not alike and expected.shape[1] == len(y):
        expected = expected.swapaxes(0, 1)  # the batch is the first axis of a model's outputs
    np.testing.assert_allclose(y, expected, rtol=0, atol=bound, equal_nan=True, strict=True)


@pytest.mark.fuzz("onnx")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of logarithms and overflows in networks
def test_an_imported_graph_computes_what_onnxruntime_does(cases, tmp_path):
    path, back = tmp_path / "net.onnx", tmp_path / "back.onnx"
    for case in cases:
        draft = Draft(case.rng)
        for _ in range(draft.few(9)):
            draft.grow()
        path.write_bytes(draft.message().SerializeToString())
        model, problem = attempted(import_onnx, path)
        if model is None:
            assert re.fullmatch(NAMED, problem), problem
            continue
        batch = draft.input[0] if isinstance(draft.input[0], int) else 3
        x = case.rng.normal(size=(batch, *model.input_shapes[0])).astype("float32")
        expected = computed(path, x)
        if expected is None:
            continue
        case.compare(assert_equal, model, x, expected)
        _, problem = attempted(export_onnx, model, back)
        if problem:
            assert problem.startswith("export_onnx: ")
            continue
        again = computed(back, x)
        assert again is not None
        case.compare(assert_equal, model, x, again)
