"""Layers as operators of ONNX, for inference.

Images are (N, C, H, W), volumes (N, C, D, H, W) and features (N, C). A function adds the nodes of
one layer; the last one has the layer's name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from math import pi, sqrt
from typing import Any

import numpy as np

from pydtnn import layers
from pydtnn.layers import Layer
from pydtnn.layers.base import Shape
from pydtnn.layers.masks import positions_seen
from pydtnn.layers.positions import LinearBiases, RelativePositions
from pydtnn.layers.recurrent import states_given
from pydtnn.layers.window import resolve_padding
from pydtnn.utils.imports import import_optional


class OnnxDraft:
    """Nodes and constants of a graph.

    Parameters
    ----------
    who : str
        First words of errors.
    dtype : numpy.dtype
        Of floating-point constants.
    layers : collection of str
        Names of all layers, which values within another one do not get.

    Attributes
    ----------
    nodes, constants : list
        Messages NodeProto and TensorProto of ONNX.
    layer : str
        The one that is written.
    """

    def __init__(self, who: str, dtype: np.dtype, layers: Collection[str] = ()) -> None:
        self.layers, self.layer = {*layers}, ""
        self.helper = import_optional("onnx.helper", "onnx", who)
        self.numpy = import_optional("onnx.numpy_helper", "onnx", who)
        self.dtype = dtype
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self._names: set[str] = set()

    def constant(self, name: str, value: Any) -> str:
        """Add an array, integers as int64; return its name. It may have been added before."""
        name = self._free(name)
        if name in self._names:
            return name
        self._names.add(name)
        array = np.asarray(value)
        dtype = np.int64 if array.dtype.kind == "i" else self.dtype
        self.constants.append(self.numpy.from_array(array.astype(dtype, order="C"), name))
        return name

    def named(self, layer: str, values: Mapping[str, Any]) -> list[str]:
        """Add arrays of a layer by their names in it; return their names."""
        return [self.constant(f"{layer}.{name}", value) for name, value in values.items()]

    def node(
        self,
        operator: str,
        inputs: list[str],
        output: str,
        *,
        name: str = "",
        first: str = "",
        **attributes: Any,
    ) -> str:
        """Add a node, which is named as its output by default; return the output's name.

        With `first`, the name of an output before it, which is not read.
        """
        output = self._free(output)
        outputs = [first, output] if first else [output]
        made = self.helper.make_node(operator, inputs, outputs, name=name or output, **attributes)
        self.nodes.append(made)
        return output

    def _free(self, name: str) -> str:
        return f"{name}_" if name in self.layers and name != self.layer else name

    def value(self, name: str, shape: Shape, dtype: str | None = None) -> Any:
        """Return the declaration of an input or output, with batches of any size."""
        kind = self.helper.np_dtype_to_tensor_dtype(np.dtype(dtype or self.dtype))
        return self.helper.make_tensor_value_info(name, kind, ["N", *channels_first(shape)])


def channels_first(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return an entry for each axis of a sample in the order of ONNX: (C, H, W) for images."""
    return (shape[-1], *shape[:-1]) if len(shape) >= 3 else shape


@dataclass(frozen=True, eq=False)
class Place:
    """A layer in a network.

    Attributes
    ----------
    name : str
    layer : Layer
        As constructed, without arrays.
    source : str
        Name of the layer whose parameters it has, usually its own.
    inputs : list of str
    shapes : list of tuple of int
        Of the inputs, without the batch axis and with the channels last.
    shape : tuple of int
        Of the output.
    arrays : dict of str to ndarray
        Parameters and running statistics in ONNX's layout, by PyTorch's names.
    reordered : bool
        Whether the features of the inputs are in another order than in ONNX.
    signal : bool
        Whether the first input is a signal (L, C), of which features are flattened as (C, L).
    output : str
        Name of the output, by default that of the layer.
    """

    name: str
    layer: Any
    source: str
    inputs: list[str]
    shapes: list[Shape]
    shape: Shape
    arrays: Mapping[str, np.ndarray]
    reordered: bool
    signal: bool = False
    output: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "output", self.output or self.name)

    def require(self, fits: bool, expected: str) -> None:
        """Raise ValueError if the layer is used in a way that is not supported."""
        if not fits:
            given = " and ".join(map(str, self.shapes))
            raise ValueError(
                f"{self.name}: {type(self.layer).__name__} must have {expected} to be exported, "
                f"got an input of shape {given}"
            )


def positions(draft: OnnxDraft, at: Place) -> None:
    """Write `Linear` of each position: a product with (C, O), and the bias."""
    matrix = draft.constant(f"{at.name}.weight", at.arrays["weight"].T)
    if "bias" not in at.arrays:
        draft.node("MatMul", [*at.inputs, matrix], at.output, name=at.name)
        return
    product = draft.node("MatMul", [*at.inputs, matrix], f"{at.name}.product")
    bias = draft.constant(f"{at.name}.bias", at.arrays["bias"])
    draft.node("Add", [product, bias], at.output, name=at.name)


def embedding(draft: OnnxDraft, at: Place) -> None:
    """Write rows of the matrix (K, C), or if the layer computes logits a product with (C, K)."""
    matrix = draft.constant(f"{at.source}.weight", at.arrays["weight"])
    if len(at.shape) == len(at.shapes[0]):  # rows have one axis more than their tokens
        columns = draft.node("Transpose", [matrix], f"{at.name}.columns", perm=[1, 0])
        if "bias" not in at.arrays:
            draft.node("MatMul", [*at.inputs, columns], at.name)
            return
        product = draft.node("MatMul", [*at.inputs, columns], f"{at.name}.product")
        bias = draft.constant(f"{at.source}.bias", at.arrays["bias"])
        draft.node("Add", [product, bias], at.name)
        return
    integer = draft.helper.np_dtype_to_tensor_dtype(np.dtype("int64"))
    tokens = draft.node("Cast", at.inputs, f"{at.name}.tokens", to=integer)
    draft.node("Gather", [matrix, tokens], at.name)


def positional_embedding(draft: OnnxDraft, at: Place) -> None:
    """Write the sum with a constant (T, C)."""
    at.require(len(at.inputs) == 1, "one input, without documents")
    constant = draft.constant(f"{at.name}.weight", at.arrays["weight"])
    draft.node("Add", [*at.inputs, constant], at.name)


def class_token(draft: OnnxDraft, at: Place) -> None:
    """Write the token (N, 1, C), with N of the input, before the sequence."""
    (x,), name = at.inputs, at.name
    token = draft.constant(f"{name}.token", at.arrays["token"].reshape(1, 1, -1))
    size = draft.node("Shape", [x], f"{name}.size", start=0, end=1)
    others = draft.constant(f"{name}.others", [1, at.shape[-1]])
    shape = draft.node("Concat", [size, others], f"{name}.shape", axis=0)
    tokens = draft.node("Expand", [token, shape], f"{name}.tokens")
    draft.node("Concat", [tokens, x], name, axis=1)


def _bias(at: Place, ahead: np.ndarray) -> np.ndarray:
    """Return what attention adds to scores (H, T, T), by positions of keys minus those of queries.

    Raises
    ------
    ValueError
        For positions of a user's own.
    """
    positions = at.layer.positions
    if isinstance(positions, LinearBiases):
        return -positions.slopes(at.layer.heads)[:, None, None] * abs(ahead)
    at.require(isinstance(positions, RelativePositions), "positions of the library's kinds")
    return at.arrays["positions"].T[:, positions.bucket(ahead)]


def attention(draft: OnnxDraft, at: Place) -> None:
    """Write ``softmax(q k' scale + mask) v`` of heads (N, heads, T, E)."""
    at.require(len(at.inputs) == 1, "one input, without lengths or documents")
    (x,), name, heads = at.inputs, at.name, at.layer.heads
    length, features = at.shape
    size = features // heads
    split = draft.constant(f"{name}.split", [0, length, 3, heads, size])
    parts = draft.node("Reshape", [x, split], f"{name}.parts")
    parts = draft.node("Transpose", [parts], f"{name}.heads", perm=[2, 0, 3, 1, 4])
    q, k, v = [
        draft.node("Gather", [parts, draft.constant(f"{name}.{i}", i)], f"{name}.{what}", axis=0)
        for i, what in enumerate("qkv")
    ]
    turned = draft.node("Transpose", [k], f"{name}.turned", perm=[0, 1, 3, 2])
    products = draft.node("MatMul", [q, turned], f"{name}.products")
    factor = 1 / sqrt(size) if at.layer.scale is None else at.layer.scale
    scale = draft.constant(f"{name}.scale", factor)
    scores = draft.node("Mul", [products, scale], f"{name}.scores")
    first, end = positions_seen(length, length, at.layer.causal, at.layer.window)[0].T[..., None]
    keys, hidden = np.arange(length), np.zeros((length, length))
    hidden[(keys < first) | (keys >= end)] = -np.inf
    if hidden.any():
        mask = draft.constant(f"{name}.later", hidden)
        scores = draft.node("Add", [scores, mask], f"{name}.masked")
    if at.layer.positions is not None:
        bias = draft.constant(f"{name}.bias", _bias(at, keys - keys[:, None]))
        scores = draft.node("Add", [scores, bias], f"{name}.placed")
    weights = draft.node("Softmax", [scores], f"{name}.weights", axis=-1)
    means = draft.node("MatMul", [weights, v], f"{name}.means")
    means = draft.node("Transpose", [means], f"{name}.joined", perm=[0, 2, 1, 3])
    draft.node("Reshape", [means, draft.constant(f"{name}.shape", [0, length, features])], name)


ROWS = {layers.LSTMLayer: (0, 3, 1, 2), layers.GRULayer: (1, 0, 2)}
"""Gates of recurrent layers in the order of ONNX: i, o, f, c of an LSTM, z, r, h of a GRU."""


def recurrent(draft: OnnxDraft, at: Place) -> None:
    """Write a direction of a recurrent layer, of sequences (T, N, C)."""
    layer, name = at.layer, at.name
    order, operator = ROWS[type(layer)], type(layer).__name__.removesuffix("Layer")

    def rows(array: np.ndarray) -> np.ndarray:
        return array.reshape(len(order), layer.features, -1)[[*order]].reshape(array.shape)

    inputs = [draft.node("Transpose", at.inputs[:1], f"{name}.steps", perm=[1, 0, 2])]
    arrays = {what: rows(array)[None] for what, array in at.arrays.items()}
    inputs += [draft.constant(f"{name}.{w}", arrays[w]) for w in ("weight_ih", "weight_hh")]
    if layer.bias:
        both = np.concatenate([arrays["bias_ih"], arrays["bias_hh"]], axis=1)
        inputs.append(draft.constant(f"{name}.bias", both))
    given = states_given(name, at.shapes, layer.features, layer.carried)
    at.require(not (given and at.reordered), "states in the order of ONNX")
    lengths, first = "", at.inputs[len(at.inputs) - given :]
    if at.inputs[1:] != first:  # lengths (N, 1)
        flat = draft.constant(f"{name}.flat", [-1])
        lengths = draft.node("Reshape", [at.inputs[1], flat], f"{name}.reshaped")
        integer = draft.helper.np_dtype_to_tensor_dtype(np.dtype("int32"))
        lengths = draft.node("Cast", [lengths], f"{name}.lengths", to=integer)
    if at.inputs[1:]:
        inputs += [*[""] * (not layer.bias), lengths]
    for i, state in enumerate(first):  # (N, H) -> (1, N, H)
        one_way = draft.constant(f"{name}.one_way", [0])
        inputs.append(draft.node("Unsqueeze", [state, one_way], f"{name}.first{i}"))
    options: dict[str, Any] = {"direction": "reverse" if layer.reverse else "forward"}
    if not layer.return_sequences and not layer.return_states:
        options["first"] = f"{name}.all"
    if operator == "GRU":
        options["linear_before_reset"] = 1
    options |= {"name": name, "hidden_size": layer.features}
    states = draft.node(operator, inputs, f"{name}.states", **options)
    last = [f"{name}.{what}" for what in "hc"[: layer.carried] if layer.return_states]
    draft.nodes[-1].output.extend(last)
    last = [draft.node("Transpose", [end], f"{end}_row", perm=[1, 0, 2]) for end in last]
    if not layer.return_sequences and last:
        draft.node("Concat", last, name, name=f"{name}.joined", axis=1)
        return
    one = draft.constant(f"{name}.one", [1 if layer.return_sequences else 0])
    if not layer.return_sequences:  # (1, N, H)
        draft.node("Squeeze", [states, one], name, name=f"{name}.last")
        return
    states = draft.node("Squeeze", [states, one], f"{name}.squeezed")  # (T, 1, N, H)
    steps = f"{name}.steps_back" if last else name
    draft.node("Transpose", [states], steps, name=f"{name}.back", perm=[1, 0, 2])
    if last:
        draft.node("Concat", [steps, *last], name, name=f"{name}.joined", axis=1)


Write = Callable[[OnnxDraft, Place], None]


def _plain(operator: str, *attributes: str) -> Write:
    """Return a function for a layer that is one operator, with attributes of the same name."""

    def write(draft: OnnxDraft, at: Place) -> None:
        values = {name: getattr(at.layer, name) for name in attributes}
        draft.node(operator, at.inputs, at.name, **values)

    return write


def _filters(operator: str, *attributes: str) -> Write:
    """Return a function for a convolution, with further attributes of the same name."""

    def write(draft: OnnxDraft, at: Place) -> None:
        layer, (image,) = at.layer, at.shapes
        draft.node(
            operator,
            [*at.inputs, *draft.named(at.name, at.arrays)],
            at.output,
            name=at.name,
            dilations=layer.dilation,
            group=layer.groups,
            **{name: getattr(layer, name) for name in attributes},
            **_window(layer, image, layer.dilation),
        )

    return write


def _window(layer: Any, image: Shape, dilation: tuple[int, ...]) -> dict[str, Any]:
    """Return the attributes of a convolution or pooling of an image (H, W, C)."""
    pairs = resolve_padding(
        layer.padding, image[:-1], layer.kernel, layer.stride, dilation, type(layer).__name__
    )
    before, after = zip(*pairs, strict=True)
    return {"kernel_shape": layer.kernel, "strides": layer.stride, "pads": [*before, *after]}


def _upsample(draft: OnnxDraft, at: Place) -> None:
    """Write pixels that are repeated, or interpolated between their centres."""
    empty = draft.constant(f"{at.name}.roi", np.zeros(0))
    scales = draft.constant(f"{at.name}.scales", [1.0, 1.0, *map(float, at.layer.factor)])
    nearest = at.layer.mode == "nearest"
    options = {"nearest_mode": "floor"} if nearest else {}
    draft.node(
        "Resize",
        [*at.inputs, empty, scales],
        at.name,
        mode="nearest" if nearest else "linear",
        coordinate_transformation_mode="asymmetric" if nearest else "half_pixel",
        **options,
    )


def _linear(draft: OnnxDraft, at: Place) -> None:
    if len(at.shapes[0]) > 1:
        _with_last(draft, at, positions)
        return
    draft.node("Gemm", [*at.inputs, *draft.named(at.name, at.arrays)], at.name, transB=1)


def _with_last(draft: OnnxDraft, at: Place, write: Write) -> None:
    """Write a layer of the last axis, with an image transposed to (N, H, W, C) and back."""
    rank = len(at.shape)
    if rank < 3:
        write(draft, at)
        return
    _turned(draft, at, write, "last", [0, *range(2, rank + 1), 1])


def _back(rank: int) -> list[int]:
    """Return the axes of (N, H, W, C) in the order (N, C, H, W)."""
    return [0, rank, *range(1, rank)]


def _with_second(draft: OnnxDraft, at: Place, write: Write) -> None:
    """Write a layer of ONNX's second axis, with a sequence transposed to (N, C, T) and back."""
    if len(at.shape) != 2:
        write(draft, at)
        return
    _turned(draft, replace(at, shape=at.shape[::-1]), write, "second", [0, 2, 1])


def _turned(draft: OnnxDraft, at: Place, write: Write, what: str, perm: list[int]) -> None:
    """Write a layer between a transposition and its inverse."""
    x = draft.node("Transpose", at.inputs, f"{at.name}.{what}", perm=perm)
    write(draft, replace(at, inputs=[x], output=f"{at.name}.made"))
    back = np.argsort(perm).tolist()
    draft.node("Transpose", [f"{at.name}.made"], at.name, name=f"{at.name}.back", perm=back)


def _batch_norm(draft: OnnxDraft, at: Place) -> None:
    names = ("weight", "bias", "running_mean", "running_var")
    constants = [draft.constant(f"{at.name}.{name}", at.arrays[name]) for name in names]
    layer = at.layer
    draft.node(
        "BatchNormalization",
        [*at.inputs, *constants],
        at.output,
        name=at.name,
        epsilon=layer.epsilon,
        momentum=1 - layer.momentum,
    )


def _layer_norm(draft: OnnxDraft, at: Place) -> None:
    """Write the norm of all axes of an image in the order of ONNX, or of the last ones here."""
    shape, axes = at.shapes[0], at.layer.axes
    if axes == len(shape):
        _last_axes(draft, at, channels_first(shape))
    else:
        _with_last(draft, at, lambda draft, at: _last_axes(draft, at, shape[-axes:]))


def _last_axes(draft: OnnxDraft, at: Place, shape: Shape) -> None:
    constants = [draft.constant(f"{at.name}.{k}", a.reshape(shape)) for k, a in at.arrays.items()]
    draft.node(
        "LayerNormalization",
        [*at.inputs, *constants],
        at.output,
        name=at.name,
        axis=-len(shape),
        epsilon=at.layer.epsilon,
    )


def _group_norm(draft: OnnxDraft, at: Place) -> None:
    """Write the norm of each group as an instance norm, and factors and terms of channels."""
    at.require(not at.reordered, "features of ONNX's order")
    layer, name = at.layer, at.name
    channels, *size = channels_first(at.shape) if len(at.shape) != 2 else at.shape
    groups = draft.constant(f"{name}.groups", [0, layer.groups, -1])
    rows = draft.node("Reshape", [*at.inputs, groups], f"{name}.rows")
    numbers = {"ones": np.ones(layer.groups), "zeros": np.zeros(layer.groups)}
    plain = draft.named(name, numbers)
    normed = draft.node(
        "InstanceNormalization", [rows, *plain], f"{name}.normed", epsilon=layer.epsilon
    )
    back = draft.constant(f"{name}.shape", [0, channels, *size])
    image = draft.node("Reshape", [normed, back], f"{name}.image")
    wide = (channels, *(1 for _ in size))
    weight, bias = (
        draft.constant(f"{name}.{k}", at.arrays[k].reshape(wide)) for k in ("weight", "bias")
    )
    scaled = draft.node("Mul", [image, weight], f"{name}.scaled")
    draft.node("Add", [scaled, bias], at.output, name=name)


def _local_response_norm(draft: OnnxDraft, at: Place) -> None:
    layer = at.layer
    at.require(layer.size % 2 == 1, "an odd size")
    at.require(len(at.shape) >= 3, "an image")
    draft.node(
        "LRN",
        at.inputs,
        at.name,
        size=layer.size,
        alpha=layer.alpha,
        beta=layer.beta,
        bias=layer.k,
    )


def _rescale(draft: OnnxDraft, at: Place) -> None:
    factor = draft.constant(f"{at.name}.value", at.layer.factor)
    draft.node("Mul", [*at.inputs, factor], at.name)


def _relu6(draft: OnnxDraft, at: Place) -> None:
    draft.node("Clip", [*at.inputs, *draft.named(at.name, {"min": 0.0, "max": 6.0})], at.name)


def _silu(draft: OnnxDraft, at: Place) -> None:
    gate = draft.node("Sigmoid", at.inputs, f"{at.name}.gate")
    draft.node("Mul", [*at.inputs, gate], at.name)


def _hard_sigmoid(draft: OnnxDraft, at: Place) -> None:
    draft.node("HardSigmoid", at.inputs, at.name, alpha=1 / 6, beta=0.5)


def _cubic(draft: OnnxDraft, at: Place) -> str:
    """Write ``x + 0.044715 x^3``."""
    (x,), name = at.inputs, at.name
    three, cubic = draft.named(name, {"three": 3.0, "cubic": 0.044715})
    cube = draft.node("Pow", [x, three], f"{name}.cube")
    term = draft.node("Mul", [cube, cubic], f"{name}.term")
    return draft.node("Add", [x, term], f"{name}.sum")


def _gelu(draft: OnnxDraft, at: Place) -> None:
    """Write ``x / 2 (1 + erf(x / sqrt(2)))``, or ``tanh(sqrt(2 / pi) (x + 0.044715 x^3))``."""
    (x,), name = at.inputs, at.name
    exact = at.layer.approximate == "none"
    numbers = {"scale": sqrt(1 / 2 if exact else 2 / pi), "one": 1.0, "half": 0.5}
    scale, one, half = draft.named(name, numbers)
    scaled = draft.node("Mul", [x if exact else _cubic(draft, at), scale], f"{name}.scaled")
    odd = draft.node("Erf" if exact else "Tanh", [scaled], f"{name}.odd")
    factor = draft.node("Add", [odd, one], f"{name}.factor")
    halved = draft.node("Mul", [x, half], f"{name}.halved")
    draft.node("Mul", [halved, factor], name)


def _softmax(draft: OnnxDraft, at: Place) -> None:
    draft.node(type(at.layer).__name__, at.inputs, at.name, axis=_axis(-1, at.shape))


def _dropout(draft: OnnxDraft, at: Place) -> None:
    """Write the operator, which does nothing in inference, so that the rate is not lost."""
    draft.node("Dropout", [*at.inputs, draft.constant(f"{at.name}.ratio", at.layer.rate)], at.name)


def _add(draft: OnnxDraft, at: Place) -> None:
    draft.node("Add" if len(at.inputs) == 2 else "Sum", at.inputs, at.name)


def _concat(draft: OnnxDraft, at: Place) -> None:
    draft.node("Concat", at.inputs, at.name, axis=_axis(at.layer.axis, at.shape))


def _axis(axis: int, shape: Shape) -> int:
    """Return the axis of a batch in ONNX for that of a sample."""
    axis %= len(shape)
    if len(shape) < 3:
        return axis + 1
    return 1 if axis == len(shape) - 1 else axis + 2


def _max_pool(draft: OnnxDraft, at: Place) -> None:
    window = _window(at.layer, at.shapes[0], (1,) * at.layer.axes)
    draft.node("MaxPool", at.inputs, at.output, name=at.name, **window)


def _avg_pool(draft: OnnxDraft, at: Place) -> None:
    draft.node(
        "AveragePool",
        at.inputs,
        at.output,
        name=at.name,
        count_include_pad=int(at.layer.count_padding),
        **_window(at.layer, at.shapes[0], (1,) * at.layer.axes),
    )


def _global_pool(draft: OnnxDraft, at: Place) -> None:
    pooled = draft.node("GlobalAveragePool", at.inputs, f"{at.name}.pooled")
    draft.node("Flatten", [pooled], at.name)


def _mean_of_positions(draft: OnnxDraft, at: Place) -> None:
    draft.node("ReduceMean", at.inputs, at.name, axes=[1], keepdims=0)


def _adaptive_pool(draft: OnnxDraft, at: Place) -> None:
    """Write a pooling, whose bins are equal."""
    *size, _ = at.shapes[0]
    if at.layer.output == (1, 1):
        draft.node("GlobalAveragePool", at.inputs, at.name)
        return
    equal = all(n % o == 0 for n, o in zip(size, at.layer.output, strict=True))
    at.require(equal, f"bins {at.layer.output} of equal sizes")
    window = [n // o for n, o in zip(size, at.layer.output, strict=True)]
    draft.node("AveragePool", at.inputs, at.name, kernel_shape=window, strides=window)


def _reshape(draft: OnnxDraft, at: Place) -> None:
    """Write features of images in the order of ONNX, and others in the order of pydtnn."""
    (source,), shape, (x,) = at.shapes, at.shape, at.inputs
    if len(shape) == 1:
        if at.signal:
            x = draft.node("Transpose", [x], f"{at.name}.second", perm=[0, 2, 1])
        draft.node("Flatten", [x], at.name)
        return
    at.require(not at.reordered, "features in the order of ONNX")
    if len(source) >= 3:
        axes = range(len(source))
        perm = [0, *(i + 2 for i in axes[:-1]), 1]
        x = draft.node("Transpose", [x], f"{at.name}.last", perm=perm)
    target = draft.constant(f"{at.name}.shape", [0, *shape])
    if len(shape) < 3:
        draft.node("Reshape", [x, target], at.name)
        return
    x = draft.node("Reshape", [x, target], f"{at.name}.reshaped")
    draft.node("Transpose", [x], at.name, perm=_back(len(shape)))


def _transpose(draft: OnnxDraft, at: Place) -> None:
    perm = [0] * (len(at.shape) + 1)
    for i, axis in enumerate(at.layer.axes):
        perm[_axis(i, at.shape)] = _axis(axis, at.shape)
    draft.node("Transpose", at.inputs, at.name, perm=perm)


def _pad(draft: OnnxDraft, at: Place) -> None:
    at.require(not at.reordered, "features in the order of ONNX")
    before, after = zip(*channels_first(at.layer.padding), strict=True)
    amounts = draft.constant(f"{at.name}.pads", [0, *before, 0, *after])
    draft.node("Pad", [*at.inputs, amounts], at.name)


def _slice(draft: OnnxDraft, at: Place) -> None:
    at.require(not at.reordered, "features in the order of ONNX")
    (source,) = at.shapes
    given = (*at.layer.slices, *(slice(None) for _ in source))
    cuts = [cut.indices(n) for cut, n in zip(given, source, strict=False)]
    starts, ends, steps = zip(*cuts, strict=True)
    axes = [_axis(axis, source) for axis in range(len(cuts))]
    columns = {"starts": starts, "ends": ends, "axes": axes, "steps": steps}
    draft.node("Slice", [*at.inputs, *draft.named(at.name, columns)], at.name)


WRITERS: Mapping[type[Layer], Write] = {
    layers.AdaptiveAvgPool2d: _adaptive_pool,
    layers.Add: _add,
    layers.ArcTan: _plain("Atan"),
    layers.AvgPool1d: lambda draft, at: _with_second(draft, at, _avg_pool),
    layers.AvgPool2d: _avg_pool,
    layers.AvgPool3d: _avg_pool,
    layers.BatchNorm: lambda draft, at: _with_second(draft, at, _batch_norm),
    layers.ClassToken: class_token,
    layers.Concat: _concat,
    layers.Conv1d: lambda draft, at: _with_second(draft, at, _filters("Conv")),
    layers.Conv2d: _filters("Conv"),
    layers.Conv3d: _filters("Conv"),
    layers.ConvTranspose2d: _filters("ConvTranspose", "output_padding"),
    layers.DotProductAttention: attention,
    layers.Dropout: _dropout,
    layers.ELU: _plain("Elu", "alpha"),
    layers.Embedding: embedding,
    layers.GRULayer: recurrent,
    layers.LSTMLayer: recurrent,
    layers.Flatten: _reshape,
    layers.GELU: _gelu,
    layers.GlobalAvgPool1d: _mean_of_positions,
    layers.GlobalAvgPool2d: _global_pool,
    layers.GlobalAvgPool3d: _global_pool,
    layers.GroupNorm: lambda draft, at: _with_second(draft, at, _group_norm),
    layers.HardSigmoid: _hard_sigmoid,
    layers.HardSwish: _plain("HardSwish"),
    layers.Identity: _plain("Identity"),
    layers.LayerNorm: _layer_norm,
    layers.LeakyReLU: _plain("LeakyRelu", "alpha"),
    layers.Linear: _linear,
    layers.LocalResponseNorm: _local_response_norm,
    layers.Log: _plain("Log"),
    layers.LogSoftmax: _softmax,
    layers.MaxPool1d: lambda draft, at: _with_second(draft, at, _max_pool),
    layers.MaxPool2d: _max_pool,
    layers.MaxPool3d: _max_pool,
    layers.Multiply: _plain("Mul"),
    layers.Pad: _pad,
    layers.PositionalEmbedding: positional_embedding,
    layers.ReLU6: _relu6,
    layers.ReLU: _plain("Relu"),
    layers.Rescale: _rescale,
    layers.Reshape: _reshape,
    layers.SiLU: _silu,
    layers.Sigmoid: _plain("Sigmoid"),
    layers.Slice: _slice,
    layers.Softmax: _softmax,
    layers.Softplus: _plain("Softplus"),
    layers.Tanh: _plain("Tanh"),
    layers.Transpose: _transpose,
    layers.Upsample: _upsample,
}
"""Functions that write a layer; others cannot be exported."""
