"""Operators of ONNX as layers.

A function reads one node: it returns the value of its output, or those of several outputs, and has
added the layers that compute them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from pydtnn import layers
from pydtnn.interchange.onnx.folding import axes_of, slices_of
from pydtnn.interchange.onnx.functions import decimal, erf, extended, solid
from pydtnn.interchange.onnx.graph import MAX_ELEMENTS, Node, NodeGraph
from pydtnn.interchange.onnx.views import ANY_BATCH, Atom, Source, Value, Wiring, size_of
from pydtnn.layers import Layer

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Repeated:
    """A constant (1, ...) that is the same for each sample, with as many rows as a batch."""

    array: Array


@dataclass(frozen=True, eq=False)
class Reading:
    """A node that is read.

    Attributes
    ----------
    node : Node
    graph : NodeGraph
    net : Wiring
    inputs : list
        A `Value`, a constant, a constant that is `Repeated`, or None for an omitted input.
    values : dict
        Those of the graph so far, by name.
    """

    node: Node
    graph: NodeGraph
    net: Wiring
    inputs: list[Any]
    values: dict[str, Any]

    def value(self, place: int = 0) -> Value:
        """Return an input that is computed, by layers."""
        return solid(self.net, self.lazy(place))

    def lazy(self, place: int = 0) -> Value:
        """Return an input that is computed, perhaps by a function that has no layers yet."""
        given = self.inputs[place] if place < len(self.inputs) else None
        if not isinstance(given, Value):
            raise self.fail(f"input {place} must be computed, got a constant or none")
        if given.integer:
            raise self.fail(f"input {place} must be of floating point, got integers")
        made = given.function is not None and given.function.made
        return solid(self.net, given) if made else given

    def constant(self, place: int) -> Array | None:
        """Return the constant that is an input; None if it is omitted.

        Raises
        ------
        ValueError
            If it is computed.
        """
        given = self.inputs[place] if place < len(self.inputs) else None
        if given is not None and not isinstance(given, np.ndarray):
            name = self.node.inputs[place]
            raise self.fail(f"input {place} must be a constant, got {name}, which is computed")
        return given

    def required(self, place: int) -> Array:
        """Return the constant that is an input; ValueError if it is omitted or computed."""
        value = self.constant(place)
        if value is None:
            raise self.fail(f"input {place} must be a constant, got none")
        return value

    def numbers(self, place: int) -> list[int]:
        """Return the integers of a constant."""
        value = self.required(place)
        if value.dtype.kind not in "iu" or value.ndim > 1:
            raise self.fail(f"input {place} must be a list of integers, got {value.dtype}")
        return [int(n) for n in value.reshape(-1)]

    def get(self, attribute: str, default: Any) -> Any:
        """Return an attribute; numbers of float32 as the shortest decimals."""
        return self.node.get(attribute, default)

    def fail(self, problem: str) -> ValueError:
        """Return an error that names the node and its operator."""
        return self.node.fail(problem)

    def layer(self, layer: Layer, x: Value) -> Value:
        """Return the value of a layer that computes each element of an array."""
        return replace(x, source=self.applied(layer, x.source))

    def applied(self, layer: Layer, *sources: Source) -> Source:
        """Return the output of a layer without parameters."""
        nodes = [source.node for source in sources]
        return Source(self.net.add(self.node.name, layer, *nodes))

    def image(self, layer: Layer, x: Value, **arrays: Array) -> Value:
        """Return the value of a layer of an image or volume."""
        node, _ = self.net.channels_last(x)
        made = self.net.add(self.node.name, layer, node, arrays=arrays)
        return self.net.image(made, x.batch, self.node.name)


Read = Callable[[Reading], Any]


def _plain(make: Callable[[Reading], Layer]) -> Read:
    """Return a function for an operator that computes each element."""
    return lambda at: at.layer(make(at), at.value())


# -- convolutions and pooling


def _window(at: Reading, size: Sequence[int], kernel: Sequence[int]) -> dict[str, Any]:
    """Return stride, dilation and padding of a convolution or pooling of an image."""
    axes, automatic = len(size), at.get("auto_pad", "NOTSET")
    stride = tuple(at.get("strides", (1,) * axes))
    dilation = tuple(at.get("dilations", (1,) * axes))
    pads = list(at.get("pads", (0,) * (2 * axes)))
    if axes not in (2, 3) or automatic not in ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"):
        raise at.fail(
            f"expected images or volumes, and auto_pad of NOTSET, VALID, SAME_UPPER or SAME_LOWER, "
            f"got a kernel of shape {tuple(kernel)} and auto_pad {automatic}"
        )
    if not len(kernel) == len(stride) == len(dilation) == len(pads) / 2 == axes:
        raise at.fail(
            f"kernel, strides, dilations and pads must be those of {axes} axes, got "
            f"{tuple(kernel)}, {stride}, {dilation} and {tuple(pads)}"
        )
    if min(*kernel, *stride, *dilation) < 1 or min(pads) < 0:
        raise at.fail(
            "kernel, strides and dilations must be positive and pads not negative, got "
            f"{tuple(kernel)}, {stride}, {dilation} and {tuple(pads)}"
        )
    if automatic != "NOTSET" and any(pads):
        raise at.fail(f"pads must be omitted with auto_pad {automatic}, got {tuple(pads)}")
    pairs = [*zip(pads[:axes], pads[axes:], strict=True)]
    if automatic.startswith("SAME"):
        pairs = []
        for n, k, s, d in zip(size, kernel, stride, dilation, strict=True):
            total = max((-(-n // s) - 1) * s + d * (k - 1) + 1 - n, 0)
            less, more = total // 2, total - total // 2
            pairs.append((less, more) if automatic == "SAME_UPPER" else (more, less))
    return {"stride": stride, "dilation": dilation, "padding": tuple(pairs)}


def _filters(at: Reading) -> tuple[Array, dict[str, Array]]:
    """Return the filters of a convolution, channels last, and its arrays."""
    weight, bias = at.required(1), at.constant(2)
    kernel = tuple(at.get("kernel_shape", weight.shape[2:]))
    if weight.ndim not in (4, 5):
        raise at.fail(f"filters must be (O, C, kh, kw) or (O, C, kd, kh, kw), got {weight.shape}")
    if kernel != weight.shape[2:]:
        raise at.fail(f"kernel_shape must be that of the weights {weight.shape}, got {kernel}")
    arrays = {"w": np.moveaxis(weight, 1, -1)}
    return weight, arrays if bias is None else arrays | {"b": bias}


def _conv(at: Reading) -> Value:
    x, (weight, arrays) = at.value(), _filters(at)
    groups = at.get("group", 1)
    node, order = at.net.channels_last(x, any_order=groups == 1)
    bias = at.constant(2) is not None
    options = _window(at, node.shape[:-1], weight.shape[2:])
    if order is not None:
        if arrays["w"].shape[-1] != len(order):
            raise at.fail(f"filters {weight.shape} must have the channels of {x.given}")
        arrays["w"] = arrays["w"][..., order]
    kind = layers.Conv2d if weight.ndim == 4 else layers.Conv3d
    layer = kind(len(weight), weight.shape[2:], groups=groups, bias=bias, **options)
    made = at.net.add(at.node.name, layer, node, arrays=arrays)
    return at.net.image(made, x.batch, at.node.name)


def _conv_transpose(at: Reading) -> Value:
    x, (weight, arrays) = at.value(), _filters(at)
    automatic, groups = at.get("auto_pad", "NOTSET"), at.get("group", 1)
    if (
        weight.ndim != 4
        or automatic not in ("NOTSET", "VALID")
        or "output_shape" in at.node.attributes
    ):
        raise at.fail(
            "expected images, pads, and no output_shape, got filters of shape "
            f"{weight.shape} and auto_pad {automatic}"
        )
    options = _window(at, x.shape[2:], weight.shape[2:])
    layer = layers.ConvTranspose2d(
        weight.shape[1] * groups,
        weight.shape[2:],
        output_padding=tuple(at.get("output_padding", (0, 0))),
        groups=groups,
        bias="b" in arrays,
        **options,
    )
    return at.image(layer, x, **arrays)


POOLS: dict[tuple[str, int], Any] = {
    ("MaxPool", 2): layers.MaxPool2d,
    ("MaxPool", 3): layers.MaxPool3d,
    ("AveragePool", 2): layers.AvgPool2d,
    ("AveragePool", 3): layers.AvgPool3d,
}


def _pool(at: Reading) -> Value:
    x, kernel = at.value(), tuple(at.get("kernel_shape", ()))
    size = x.shape[2:]
    options = _window(at, size, kernel)
    if {*options.pop("dilation")} != {1}:
        raise at.fail(f"dilations must be 1, got {at.get('dilations', ())}")
    if at.node.operator == "AveragePool":
        options["count_padding"] = bool(at.get("count_include_pad", 0))
    if at.get("ceil_mode", 0) and at.get("auto_pad", "NOTSET") in ("NOTSET", "VALID"):
        _reach_the_end(at, size, kernel, options)
    return at.image(POOLS[at.node.operator, len(kernel)](kernel, **options), x)


def _reach_the_end(
    at: Reading, size: Sequence[int], kernel: Sequence[int], options: dict[str, Any]
) -> None:
    """Extend the padding to the end of a last window, which starts within the image."""
    pairs, given = [], options["padding"]
    for n, k, s, (before, after) in zip(size, kernel, options["stride"], given, strict=True):
        more = (k - n - before - after) % s
        pairs.append((before, after + more if after + more < k else after))
    if tuple(pairs) == given:
        return
    if options.get("count_padding") and any(map(any, given)):
        raise at.fail("ceil_mode must be 0 if pads count and windows do not divide the input")
    options["padding"] = tuple(pairs)
    if "count_padding" in options:
        options["count_padding"] = False


def _global_average(at: Reading) -> Value:
    x = at.value()
    return _means(at, x, range(2, len(x.axes)), keep=True)


def _reduce_mean(at: Reading) -> Value:
    x, axes = at.value(), axes_of(at.node, at.inputs)
    if not axes and at.get("noop_with_empty_axes", 0):
        return x
    return _means(at, x, axes or range(len(x.axes)), keep=bool(at.get("keepdims", 1)))


def _means(at: Reading, x: Value, axes: Sequence[int], *, keep: bool) -> Value:
    """Return means over positions of an image, or of a sequence."""
    reduced = {x.sample_axis(axis) for axis in axes}
    gone = [atom in {a for axis in reduced for a in x.axes[axis]} for atom in x.atoms]
    others = tuple(atom for atom, out in zip(x.atoms, gone, strict=True) if not out)
    source = x.source
    if any(gone):
        first, count = gone.index(True), sum(gone)
        size, before = prod(x.shape[axis] for axis in reduced), size_of(x.atoms[:first])
        after = size_of(others) // before
        node = source.node
        pooled = _pooled_axis(node.shape, before, size, after)
        if pooled is not None:
            layer: Layer = layers.AdaptiveAvgPool2d(pooled)
        elif not all(gone[first : first + count]):
            order = sorted(x.atoms, key=lambda atom: atom in others)
            before, after = 1, size_of(others)
            node = at.net.arrange(x, order, (size, 1, after))
        elif before > 1 or len(node.shape) not in (3, 4) or node.shape[-1] != after:
            shape = (before, size, after) if before > 1 else (size, 1, after)
            node = at.net.reshape(node, shape, f"{at.node.name}.positions")
        if pooled is None:
            whole = layers.GlobalAvgPool2d if len(node.shape) == 3 else layers.GlobalAvgPool3d
            layer = whole() if before == 1 else layers.AdaptiveAvgPool2d((before, 1))
        source = Source(at.net.add(at.node.name, layer, node))
    kept = [(i, axis) for i, axis in enumerate(x.axes) if keep or i not in reduced]
    made = tuple(() if i in reduced else axis for i, axis in kept)
    return replace(x, source=source, atoms=others, axes=made, name=at.node.name)


def _pooled_axis(
    shape: tuple[int, ...], before: int, size: int, after: int
) -> tuple[int, int] | None:
    """Return the bins of an image of which one of two axes is averaged, None for other arrays."""
    if len(shape) != 3 or 1 in shape[:2]:
        return None
    height, width, channels = shape
    if (before, size, after) == (1, height, width * channels):
        return 1, width
    return (height, 1) if (before, size, after) == shape else None


def _global_max(at: Reading) -> Value:
    x = at.value()
    kernel = x.shape[2:]
    if len(kernel) not in (2, 3):
        raise at.fail(f"expected an image or volume, got an input of shape {x.given}")
    return at.image(POOLS["MaxPool", len(kernel)](kernel), x)


def _resize(at: Reading) -> Value:
    x = at.value()
    x.check_samples()
    first = 1 if at.graph.opset < 11 else 2
    scales = at.constant(first)
    sizes = at.constant(3) if at.graph.opset >= 11 else None
    axes = [x.axis(axis) for axis in at.get("axes", range(len(x.axes)))]
    factors = [1.0] * len(x.axes)
    given = scales if scales is not None and scales.size else sizes
    if given is None or given.size != len(axes):
        raise at.fail("expected scales or sizes of all axes")
    for axis, number in zip(axes, given.reshape(-1).tolist(), strict=True):
        factors[axis] = number if given is scales else number / x.shape[axis]
    whole = [round(number) if np.isfinite(number) else 0 for number in factors]
    if len(x.axes) != 4 or whole != factors or whole[:2] != [1, 1] or min(whole) < 1:
        raise at.fail(f"expected an image that is enlarged by integers, got factors {factors}")
    mode, where = at.get("mode", "nearest"), "coordinate_transformation_mode"
    place = at.get(where, "half_pixel") if at.graph.opset >= 11 else "asymmetric"
    rounding = at.get("nearest_mode", "round_prefer_floor" if at.graph.opset >= 11 else "floor")
    centres = place in ("half_pixel", "pytorch_half_pixel")
    repeats = (place == "asymmetric" and rounding == "floor") or (
        centres and rounding in ("round_prefer_floor", "round_prefer_ceil")
    )
    if not ((mode == "nearest" and repeats) or (mode == "linear" and centres)) or at.get(
        "antialias", 0
    ):
        raise at.fail(
            "expected nearest pixels of whole blocks, or linear interpolation of pixels with "
            f"half_pixel, got mode {mode}, {where} {place} and nearest_mode {rounding}"
        )
    factor = (whole[2], whole[3])
    if factor == (1, 1):
        return x
    if prod(x.shape[1:]) * prod(factor) > MAX_ELEMENTS:  # before the layer makes filters
        raise at.fail(f"outputs of samples must have at most {MAX_ELEMENTS} elements")
    return at.image(layers.Upsample(factor, "nearest" if mode == "nearest" else "bilinear"), x)


# -- products with matrices


def _gemm(at: Reading) -> Value:
    if at.get("transA", 0):
        raise at.fail("transA must be 0, got 1")
    weight, bias = at.required(1), at.constant(2)
    if weight.ndim != 2:
        raise at.fail(f"expected a matrix, got {weight.shape}")
    weight = weight if at.get("transB", 0) else weight.T
    alpha, beta = at.get("alpha", 1.0), at.get("beta", 1.0)
    if alpha != 1:
        weight = weight * weight.dtype.type(alpha)
    if bias is not None:
        bias = _vector(at, bias, len(weight))
        bias = bias if beta == 1 else bias * bias.dtype.type(beta)
    x = at.value()
    if len(x.axes) != 2:
        raise at.fail(f"expected features (N, C), got an input of shape {x.given}")
    return linear(at, x, weight, bias, at.node.name)


def _vector(at: Reading, bias: Array, features: int) -> Array:
    """Return a bias of each feature."""
    if bias.shape not in ((), (1,), (features,), (1, 1), (1, features)):
        raise at.fail(
            f"the bias must have a number for each of the {features} outputs, got {bias.shape}"
        )
    return np.broadcast_to(bias.reshape(-1), (features,))


def linear(at: Reading, x: Value, weight: Array, bias: Array | None, name: str) -> Value:
    """Return the product of the last axis with a matrix (O, I)."""
    last = x.axes[x.sample_axis(-1)]
    if size_of(last) != weight.shape[1]:
        raise at.fail(f"the matrix {weight.shape} must fit an input of shape {x.given}")
    node, atoms, order = at.net.last(x, last)
    arrays = {"w": weight if order is None else weight[:, order]}
    if bias is not None:
        arrays["b"] = bias
    layer = layers.Linear(len(weight), bias=bias is not None)
    made = at.net.add(name, layer, node, arrays=arrays)
    before = atoms[: len(atoms) - len(last)]
    return at.net.features(made, replace(x, name=name), before, x.axes[:-1])


# -- norms


def _batch_norm(at: Reading) -> Value:
    if at.get("training_mode", 0) or any(at.node.outputs[1:]):
        raise at.fail("expected a network for inference, got training mode; export it again")
    if at.get("spatial", 1) != 1:
        raise at.fail("spatial must be 1, got 0")
    x = at.value()
    x.check_samples()
    channels = x.axes[x.sample_axis(1)]
    node, atoms, order = at.net.last(x, channels)
    names = ("gamma", "beta", "running_mean", "running_variance")
    arrays = {name: at.required(place) for place, name in enumerate(names, start=1)}
    _check_vectors(at, size_of(channels), *arrays.values())
    momentum = round(1 - at.get("momentum", 0.9), 7)
    layer = layers.BatchNorm(epsilon=at.get("epsilon", 1e-5), momentum=momentum or 0.1)
    arrays = {name: _ordered(array, order) for name, array in arrays.items()}
    made = at.net.add(at.node.name, layer, node, arrays=arrays)
    return replace(x, source=Source(made), atoms=atoms, name=at.node.name)


def _check_vectors(at: Reading, size: int, *arrays: Array) -> None:
    for array in arrays:
        if array.shape != (size,):
            raise at.fail(f"expected vectors of {size} numbers, got {array.shape}")


def _ordered(array: Array, order: Array | None) -> Array:
    return array if order is None else array[order]


def _layer_norm(at: Reading) -> Value:
    x = at.value()
    first = x.sample_axis(at.get("axis", -1))
    normed = [atom for axis in x.axes[first:] for atom in axis]
    if x.batch in normed:
        raise at.fail("the axes must not contain that of the batch")
    node, atoms, order = at.net.last(x, normed)
    size, wanted = size_of(normed), x.shape[first:]
    count = next(
        (m for m in range(1, len(node.shape) + 1) if prod(node.shape[-m:]) == size),
        1,
    )
    gamma, beta = at.required(1), at.constant(2)
    beta = np.zeros_like(gamma) if beta is None else beta
    full = []
    for array in (gamma, beta):
        try:
            full.append(_ordered(np.broadcast_to(array, wanted).reshape(-1), order))
        except ValueError as error:
            raise at.fail(f"the scale must have the shape {wanted}, got {array.shape}") from error
    layer = layers.LayerNorm(axes=count, epsilon=at.get("epsilon", 1e-5))
    made = at.net.add(at.node.name, layer, node, arrays={"gamma": full[0], "beta": full[1]})
    return replace(x, source=Source(made), atoms=atoms, name=at.node.name)


def _instance_norm(at: Reading) -> Value:
    """Read a group norm of groups of one channel, or one that is written with reshaped groups."""
    x, gamma, beta = at.value(), at.required(1), at.required(2)
    x.check_samples()
    groups, *rest = x.axes[1:]
    _check_vectors(at, size_of(groups), gamma, beta)
    inner = [atom for axis in rest for atom in axis]
    found = _affine_of_channels(at)
    if found is None:
        node, atoms, order = at.net.last(x, groups)
        arrays = {"gamma": _ordered(gamma, order), "beta": _ordered(beta, order)}
        layer = layers.GroupNorm(size_of(groups), epsilon=at.get("epsilon", 1e-5))
        made = at.net.add(at.node.name, layer, node, arrays=arrays)
        return replace(x, source=Source(made), atoms=atoms, name=at.node.name)
    # (N, groups, channels of a group, positions) becomes (N, C, positions), with factors and terms
    chain, shape, scale, shift = found
    last = chain[-1]
    view = at.net.reshaped(x, shape)
    channels = size_of(view.axes[1])
    if (
        channels % size_of(groups)
        or view.axes[1][: len(groups)] != groups
        or set(inner) & set(groups)
    ):
        raise at.fail("expected groups of channels that are reshaped from (N, C, ...) and back")
    node, atoms, order = at.net.last(view, view.axes[1], any_order=False)
    each = channels // size_of(groups)
    full_gamma, full_beta = (np.repeat(array, each) for array in (gamma, beta))
    _check_vectors(at, channels, scale, shift)
    arrays = {"gamma": full_gamma * scale, "beta": full_beta * scale + shift}
    layer = layers.GroupNorm(size_of(groups), epsilon=at.get("epsilon", 1e-5))
    made = at.net.add(last.name, layer, node, arrays=arrays)
    y = replace(view, source=Source(made), atoms=atoms, name=last.name)
    at.values.update((node.outputs[0], y) for node in chain)
    return y


def _affine_of_channels(at: Reading) -> tuple[list[Node], list[int], Array, Array] | None:
    """Return the nodes that follow a reshaped norm, the shape, factors and terms of channels."""
    reshape = at.graph.follower(at.node, "Reshape")
    product = reshape and at.graph.follower(reshape, "Mul")
    total = product and at.graph.follower(product, "Add")
    if not (reshape and product and total):
        return None
    target = at.values.get(reshape.inputs[1])
    given = [at.values.get(name) for n in (product, total) for name in n.inputs]
    arrays = [array for array in given if isinstance(array, np.ndarray)]
    if not isinstance(target, np.ndarray) or len(arrays) != 2:
        return None
    x = at.value()
    shape = resolved(at, x, [int(n) for n in target.reshape(-1)])
    scale, shift = arrays
    for array in (scale, shift):
        wide = (1,) * (len(shape) - array.ndim) + array.shape
        if len(wide) != len(shape) or prod(wide) != wide[1:2][0]:
            return None
    return [reshape, product, total], shape, scale.reshape(-1), shift.reshape(-1)


def _group_norm(at: Reading) -> Value:
    x, groups = at.value(), at.get("num_groups", 1)
    x.check_samples()
    channels = x.axes[x.sample_axis(1)]
    node, atoms, _ = at.net.last(x, channels, any_order=False)
    gamma, beta = at.required(1), at.required(2)
    if at.graph.opset < 21 and groups and size_of(channels) % groups == 0:
        _check_vectors(at, groups, gamma, beta)
        gamma, beta = (np.repeat(array, size_of(channels) // groups) for array in (gamma, beta))
    layer = layers.GroupNorm(groups, epsilon=at.get("epsilon", 1e-5))
    made = at.net.add(at.node.name, layer, node, arrays={"gamma": gamma, "beta": beta})
    return replace(x, source=Source(made), atoms=atoms, name=at.node.name)


def _local_response(at: Reading) -> Value:
    size = at.get("size", 0)
    if size % 2 == 0:
        raise at.fail(f"size must be odd, got {size}")
    layer = layers.LocalResponseNorm(
        size, alpha=at.get("alpha", 1e-4), beta=at.get("beta", 0.75), k=at.get("bias", 1.0)
    )
    return at.image(layer, at.value())


def _softmax(at: Reading) -> Value:
    x = at.value()
    axis = x.sample_axis(at.get("axis", -1 if at.graph.opset >= 13 else 1))
    if at.graph.opset < 13 and prod(x.shape[axis:]) != x.shape[axis]:
        raise at.fail(
            f"expected an axis whose following ones have a size of 1, before opset 13, got {axis} "
            f"of {x.given}"
        )
    node, atoms, _ = at.net.last(x, x.axes[axis])
    if not x.axes[axis]:
        raise at.fail(f"the axis must have a size above 1, got {axis} of {x.given}")
    made = at.net.add(at.node.name, layers.Softmax(), node)
    return replace(x, source=Source(made), atoms=atoms, name=at.node.name)


# -- functions of each element


def _function(
    compute: Callable[..., Array],
    layer: Callable[[], Layer] | None = None,
    *,
    saturates: bool = False,
) -> Read:
    """Return a function for an operator that may be a part of an activation."""

    def read(at: Reading) -> Value:
        if layer is not None and not _in_activation(at):
            return at.layer(layer(), at.value())
        last = _last(at, layer)
        return extended(at.net, (at.lazy(),), compute, last, at.node.name, saturates=saturates)

    return read


def _in_activation(at: Reading) -> bool:
    """Return whether a function may be a part of an activation that several nodes compute."""
    if any(isinstance(x, Value) and x.function is not None for x in at.inputs):
        return True
    return at.node.operator in ("Sigmoid", "HardSigmoid") and any(
        reader.operator == "Mul"
        and not any(isinstance(at.values.get(name), np.ndarray) for name in reader.inputs)
        for reader in at.graph.readers.get(at.node.outputs[0], ())
    )


def _last(at: Reading, layer: Callable[[], Layer] | None) -> Callable[..., Source]:
    def last(*sources: Source) -> Source:
        if layer is None:
            raise at.fail("expected a part of an activation that pydtnn has, got another function")
        return at.applied(layer(), *sources)

    return last


def _clip(at: Reading) -> Value:
    bounds = [at.constant(place) for place in (1, 2)]
    low, high = [
        at.get(name, None) if bound is None else decimal(_scalar(at, bound))
        for name, bound in zip(("min", "max"), bounds, strict=True)
    ]
    return _clipped(at, at.lazy(), low, high)


def _clipped(at: Reading, x: Value, low: float | None, high: float | None) -> Value:
    infinite = np.finfo("float32").max  # the default bounds of opset 6
    low = None if low is not None and low <= -infinite else low
    high = None if high is not None and high >= infinite else high
    bounds = (-np.inf if low is None else low, np.inf if high is None else high)

    def layer() -> Layer:
        if low != 0 or high not in (None, 6):
            raise at.fail(f"bounds must be 0 and 6, or 0 alone, got {low} and {high}")
        return layers.ReLU() if high is None else layers.ReLU6()

    if not _in_activation(at):
        return at.layer(layer(), solid(at.net, x))
    return extended(
        at.net,
        (x,),
        lambda v: np.minimum(np.maximum(v, bounds[0]), bounds[1]),
        _last(at, layer),
        at.node.name,
        saturates=True,
    )


def _scalar(at: Reading, array: Array) -> float:
    if array.size != 1:
        raise at.fail(f"expected one number, got an array of shape {array.shape}")
    return float(array.reshape(()))


def _extreme(at: Reading) -> Value:
    """Read Max or Min of a value and a number."""
    constants = [c for c in at.inputs if isinstance(c, np.ndarray)]
    values = [i for i, x in enumerate(at.inputs) if isinstance(x, Value)]
    if len(constants) != 1 or len(values) != 1:
        raise at.fail("expected an input and a number")
    number = decimal(_scalar(at, constants[0]))
    pair = (number, None) if at.node.operator == "Max" else (None, number)
    return _clipped(at, at.lazy(values[0]), *pair)


def _power(at: Reading) -> Value:
    exponent = _scalar(at, at.required(1))
    last = _last(at, None)
    return extended(at.net, (at.lazy(),), lambda v: v**exponent, last, at.node.name)


def _arithmetic(at: Reading) -> Value:
    """Read Add, Sub, Mul and Div of two inputs."""
    a, b, *more = at.inputs
    if more:
        raise at.fail(f"expected two inputs, got {len(at.inputs)}")
    if isinstance(a, Value) and isinstance(b, Value):
        return _of_two(at, at.lazy(0), at.lazy(1))
    place = 0 if isinstance(a, Value) else 1
    constant, x = at.required(1 - place), at.lazy(place)
    operator = at.node.operator
    if constant.dtype.kind not in "fiu":
        raise at.fail(f"the constant must consist of numbers, got {constant.dtype}")
    if constant.size == 1 and constant.ndim <= len(x.axes):
        return _with_number(at, x, float(constant.reshape(())), first=place == 1)
    if operator == "Sub" and place == 1:
        x, operator = _with_number(at, x, -1.0, first=False, operator="Mul"), "Add"
    elif operator == "Sub":
        constant, operator = -constant, "Add"
    elif operator == "Div" and place == 0:
        with np.errstate(all="ignore"):
            constant, operator = (1 / constant.astype("float64")), "Mul"
    if operator == "Div":
        raise at.fail("expected a computed dividend, got a constant that is divided")
    return with_constant(at, solid(at.net, x), constant, operator)


NUMERIC: dict[str, Callable[..., Array]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
}


def _with_number(
    at: Reading, x: Value, number: float, *, first: bool, operator: str | None = None
) -> Value:
    """Return a function of each element and a number, which is the first operand or the second."""
    operator = operator or at.node.operator
    compute = NUMERIC[operator]

    def function(v: Array) -> Array:
        return compute(number, v) if first else compute(v, number)

    def last(source: Source) -> Source:
        if operator in ("Add", "Sub"):
            sign = -1.0 if operator == "Sub" and first else 1.0
            term = -number if operator == "Sub" and not first else number
            size = (source.node.shape[-1],)
            return _scaled(at, source, np.full(size, sign), np.full(size, term))
        factor = 1 / number if operator == "Div" and number else number
        if operator == "Div" and (first or not number):
            raise at.fail(f"expected a divisor other than 0, got a quotient with {number}")
        return at.applied(layers.Rescale(decimal(factor)), source)

    return extended(at.net, (x,), function, last, at.node.name)


def _of_two(at: Reading, a: Value, b: Value) -> Value:
    operator, compute = at.node.operator, NUMERIC[at.node.operator]
    if a.source is b.source and a.axes == b.axes and a.atoms == b.atoms:

        def last(x: Source, y: Source) -> Source:
            if operator == "Div":
                raise at.fail("expected a constant divisor, got a computed one")
            if operator == "Sub":
                y = Source(at.net.add(f"{at.node.name}.minus", layers.Rescale(-1.0), y.node))
            return at.applied(layers.Multiply() if operator == "Mul" else layers.Add(), x, y)

        return extended(at.net, (a, b), compute, last, at.node.name)
    a, b = solid(at.net, a), solid(at.net, b)
    if operator == "Div":
        raise at.fail("expected a constant divisor, got a computed one")
    if operator == "Mul":
        return _product(at, a, b)
    if operator == "Sub":
        b = replace(
            b,
            source=Source(at.net.add(f"{at.node.name}.minus", layers.Rescale(-1.0), b.source.node)),
        )
    return _total(at, a, b)


def _total(at: Reading, *values: Value) -> Value:
    first, *others = values
    for other in others:
        first, *_ = at.net.aligned(first, other)
    nodes = [first.source.node] + [at.net.aligned(first, other)[2] for other in others]
    made = at.net.add(at.node.name, layers.Add(), *nodes)
    return replace(first, source=Source(made), name=at.node.name)


def _sum(at: Reading) -> Value:
    values = [at.value(place) for place in range(len(at.inputs))]
    return replace(values[0], name=at.node.name) if len(values) == 1 else _total(at, *values)


def _product(at: Reading, a: Value, b: Value) -> Value:
    if a.shape == b.shape:
        x, *nodes = at.net.aligned(a, b)
        made = at.net.add(at.node.name, layers.Multiply(), *nodes)
        return replace(x, source=Source(made), name=at.node.name)
    if len(a.axes) != len(b.axes):
        raise at.fail(f"inputs must have equally many axes, got {a.given} and {b.given}")
    if prod(b.shape) > prod(a.shape):
        a, b = b, a
    if len(a.axes) > 3:
        made = at.net.add(
            at.node.name, layers.Multiply(), *(at.net.channels_last(x)[0] for x in (a, b))
        )
        return at.net.image(made, a.batch, at.node.name)
    x, y = at.net.plain(a), at.net.plain(b)
    made = at.net.add(at.node.name, layers.Multiply(), x.source.node, y.source.node)
    return replace(x, source=Source(made), name=at.node.name)


def with_constant(at: Reading, x: Value, constant: Array, operator: str) -> Value:
    """Return the product with a factor of each channel, or the sum with terms of positions."""
    rank = len(x.axes)
    wide = (1,) * (rank - constant.ndim) + constant.shape
    if len(wide) != rank or any(
        n not in (1, size) or (n > 1 and x.batch in axis)
        for n, size, axis in zip(wide, x.shape, x.axes, strict=True)
    ):
        raise at.fail(f"the constant {constant.shape} must fit an input of shape {x.given}")
    constant = constant.reshape(wide)
    along = [axis for axis, n in enumerate(wide) if n > 1]
    if len(along) == 1:
        axis = along[0]
        node, atoms, order = at.net.last(x, x.axes[axis])
        vector = _ordered(constant.reshape(-1), order)
        one = np.ones_like(vector)
        pair = (vector, None) if operator == "Mul" else (one, vector)
        source = _scaled(at, Source(node), *pair)
        return replace(x, source=source, atoms=atoms, name=at.node.name)
    if operator == "Mul":
        raise at.fail(
            f"expected a number or a factor of each channel, got a constant of shape {wide}"
        )
    view = at.net.plain(x)
    terms = np.broadcast_to(constant, (1, *view.shape[1:])).reshape(-1, view.shape[-1])
    node = at.net.reshape(view.source.node, terms.shape, view.name)
    made = at.net.add(at.node.name, layers.PositionalEmbedding(), node, arrays={"w": terms})
    return replace(view, source=Source(made), name=at.node.name)


def _scaled(at: Reading, source: Source, factors: Array, terms: Array | None) -> Source:
    """Return factors and terms of the last axis: a depthwise convolution of pixels."""
    node, channels = source.node, len(factors)
    before = prod(node.shape) // channels
    shape = node.shape if len(node.shape) == 3 else (before, 1, channels)
    layer = layers.Conv2d(channels, 1, groups=channels, bias=terms is not None)
    arrays = {"w": factors.reshape(channels, 1, 1, 1)}
    if terms is not None:
        arrays["b"] = terms
    wide = at.net.reshape(node, shape, f"{at.node.name}.pixels")
    return Source(at.net.add(at.node.name, layer, wide, arrays=arrays))


def _prelu(at: Reading) -> Value:
    slope = at.required(1)
    slopes = np.unique(slope)
    if len(slopes) != 1 or not slopes[0] > 0:
        raise at.fail("the slope must be one positive number, got several or another one")
    return at.layer(layers.LeakyReLU(decimal(float(slopes[0]))), at.value())


def _gelu(at: Reading) -> Layer:
    return layers.GELU(at.get("approximate", "none"))


def _hard_sigmoid(at: Reading) -> Value:
    alpha, beta = at.get("alpha", 0.2), at.get("beta", 0.5)

    def layer() -> Layer:
        if abs(alpha - 1 / 6) > 1e-6 or beta != 0.5:
            raise at.fail(f"alpha and beta must be 1/6 and 1/2, got {alpha} and {beta}")
        return layers.HardSigmoid()

    if not _in_activation(at):
        return at.layer(layer(), at.value())
    return extended(
        at.net,
        (at.lazy(),),
        lambda v: np.clip(alpha * v + beta, 0, 1),
        _last(at, layer),
        at.node.name,
        saturates=True,
    )


def _sigmoid(v: Array) -> Array:
    return 1 / (1 + np.exp(-v))


def _dropout(at: Reading) -> Value:
    training = at.constant(2)
    if any(at.node.outputs[1:2]) and at.node.outputs[1] in at.graph.readers:
        raise at.fail("expected a network that does not read the mask")
    if training is not None and training.any():
        raise at.fail("expected a network for inference, got training_mode=True; export it again")
    rate = at.constant(1)
    ratio = at.get("ratio", 0.5) if rate is None else decimal(_scalar(at, rate))
    return at.layer(layers.Dropout(ratio), at.value())


# -- views


def _view(function: Callable[[Reading, Value], Value]) -> Read:
    """Return a function for an operator that only changes the axes of its input."""

    def read(at: Reading) -> Value:
        x = at.inputs[0]
        if not isinstance(x, Value):
            raise at.fail("input 0 must be computed, got a constant or none")
        return replace(function(at, x), name=at.node.name)

    return read


def _flatten(at: Reading, x: Value) -> Value:
    axis = at.get("axis", 1)
    if axis != len(x.axes):
        axis = x.axis(axis)
    return at.net.reshaped(_solid_if_needed(at, x), [prod(x.shape[:axis]), prod(x.shape[axis:])])


def _solid_if_needed(at: Reading, x: Value) -> Value:
    return solid(at.net, x) if x.function is not None else x


def _reshape(at: Reading, x: Value) -> Value:
    return at.net.reshaped(_solid_if_needed(at, x), resolved(at, x, at.numbers(1)))


def resolved(at: Reading, x: Value, target: list[int]) -> list[int]:
    """Return a shape without 0 and -1."""
    zeros = at.get("allowzero", 0) and 0 in target
    if zeros or min(target, default=0) < -1 or target.count(-1) > 1:
        raise at.fail(f"expected positive sizes, 0 or one -1, got {target}")
    if any(n == 0 and i >= len(x.axes) for i, n in enumerate(target)):
        raise at.fail(f"sizes of 0 must be those of axes of {x.given}, got {target}")
    sizes = [x.shape[i] if n == 0 else n for i, n in enumerate(target)]
    known, total = prod(n for n in sizes if n != -1), prod(x.shape)
    if total % known or (-1 not in sizes and total != known):
        raise at.fail(f"expected a shape of as many elements as {x.given}, got {target}")
    return [total // known if n == -1 else n for n in sizes]


def _transpose(at: Reading, x: Value) -> Value:
    return x.transposed(at.get("perm", [*range(len(x.axes))][::-1]))


def _squeeze(at: Reading, x: Value) -> Value:
    given = axes_of(at.node, at.inputs)
    if given is None:
        given = [i for i, axis in enumerate(x.axes) if size_of(axis) == 1]
    axes = {x.axis(axis) for axis in given}
    if any(x.axes[axis] for axis in axes):
        raise at.fail(f"axes must have a size of 1 and not be that of the batch, got {given}")
    return replace(x, axes=tuple(axis for i, axis in enumerate(x.axes) if i not in axes))


def _unsqueeze(at: Reading, x: Value) -> Value:
    axes = axes_of(at.node, at.inputs) or []
    rank = len(x.axes) + len(axes)
    places = {axis % rank for axis in axes if -rank <= axis < rank}
    if len(places) != len(axes):
        raise at.fail(f"axes must be different ones of {rank}, got {axes}")
    rest = iter(x.axes)
    return replace(x, axes=tuple(() if i in places else next(rest) for i in range(rank)))


def _cast(at: Reading, x: Value) -> Value:
    from onnx.helper import tensor_dtype_to_np_dtype  # installed: it has parsed the file

    kind = tensor_dtype_to_np_dtype(at.get("to", 1))
    if kind.kind == "f" and kind.itemsize >= 4:
        return replace(x, integer=False)
    if kind.kind != "i" or kind.itemsize < 4 or not x.integer:
        raise at.fail(f"expected float32 or float64, or integers that stay ones, got {kind}")
    return x


# -- parts and sums of parts


def _slice(at: Reading) -> Value:
    x = _any(at)
    constants = [at.constant(place) for place in range(1, len(at.inputs))]
    if any(c is not None and c.dtype.kind not in "iu" for c in constants):
        raise at.fail("starts, ends, axes and steps must be integers")
    for axis, start, stop, step in zip(*slices_of(at.node, constants), strict=True):
        place = x.axis(axis)
        size = x.shape[place]
        if step < 1:
            raise at.fail(f"steps must be positive, got {step}")
        start, stop, _ = slice(start, stop, step).indices(size)
        if x.batch in x.axes[place] or (place == 0 and x.axes[0] == x.batch_axis):
            if (start, stop, step) != (0, size, 1):
                raise at.fail("the axis must not be that of the batch")
            continue
        x = at.net.part(x, place, start, stop, step)
    return replace(x, name=at.node.name)


def _any(at: Reading) -> Value:
    """Return a computed input of any type."""
    given = at.inputs[0]
    return given if isinstance(given, Value) and given.integer else at.value()


def _split(at: Reading) -> list[Value]:
    x = at.value()
    axis, outputs = x.sample_axis(at.get("axis", 0)), len(at.node.outputs)
    size = x.shape[axis]
    given = at.get("split", None) if at.graph.opset < 13 else at.constant(1)
    if given is None:
        each = -(-size // outputs)
        sizes = [min(each, size - i * each) for i in range(outputs)]
    else:
        sizes = [int(n) for n in np.asarray(given).reshape(-1)]
    if len(sizes) != outputs or sum(sizes) != size or min(sizes) < 1:
        raise at.fail(f"expected parts of the axis of size {size}, got {sizes}")
    stops = np.cumsum(sizes).tolist()
    return [
        replace(at.net.part(replace(x, name=at.node.name), axis, stop - n, stop), name=at.node.name)
        for n, stop in zip(sizes, stops, strict=True)
    ]


def _concat(at: Reading) -> Value:
    constants = [x for x in at.inputs if not isinstance(x, Value)]
    if constants:
        return _class_token(at)
    values = [at.value(place) for place in range(len(at.inputs))]
    first = values[0]
    if len(values) == 1:
        return first
    if len({len(x.axes) for x in values}) > 1:
        raise at.fail(
            f"inputs must have equally many axes, got {' and '.join(x.given for x in values)}"
        )
    axis = first.sample_axis(at.get("axis", 1))
    if len(first.axes) > 3:
        nodes = [at.net.channels_last(x)[0] for x in values]
        ours = len(nodes[0].shape) - 1 if axis == 1 else axis - 2
        made = at.net.add(at.node.name, layers.Concat(ours), *nodes)
        return at.net.image(made, first.batch, at.node.name)
    plain = [at.net.plain(x) for x in values]
    made = at.net.add(at.node.name, layers.Concat(axis - 1), *(x.source.node for x in plain))
    axes = tuple((Atom(n),) if n > 1 else () for n in made.shape)
    atoms = tuple(atom for pair in axes for atom in pair)
    return Value(Source(made), atoms, (first.batch_axis, *axes), first.batch, at.node.name)


def _class_token(at: Reading) -> Value:
    """Read a constant position before a sequence."""
    token, x = at.inputs if len(at.inputs) == 2 else (None, None)
    fixed = isinstance(x, Value) and x.batch.size == 1
    array = token.array if isinstance(token, Repeated) else token if fixed else None
    if array is None or not isinstance(x, Value) or len(x.axes) != 3:
        raise at.fail(
            "expected computed inputs, or a constant position before a sequence (N, T, C)"
        )
    x = at.net.plain(at.value(1))
    _, length, features = x.shape
    if x.sample_axis(at.get("axis", 1)) != 1 or array.shape != (1, 1, features):
        raise at.fail(
            f"expected a constant position (1, 1, {features}) before a sequence, got {array.shape}"
        )
    node = at.net.reshape(x.source.node, (length, features), x.name)
    arrays = {"token": array.reshape(-1)}
    made = at.net.add(at.node.name, layers.ClassToken(), node, arrays=arrays)
    first = (Atom(length + 1),)
    return at.net.features(made, replace(x, name=at.node.name), first, (x.axes[0], first))


def _pad(at: Reading) -> Value:
    given = at.numbers(1) if at.graph.opset >= 11 else list(at.get("pads", ()))
    value = at.constant(2) if at.graph.opset >= 11 else at.get("value", 0.0)
    axes = at.constant(3)
    if at.get("mode", "constant") != "constant":
        raise at.fail(f"mode must be constant, got {at.get('mode', 'constant')}")
    if value is not None and np.any(np.asarray(value)):
        raise at.fail(f"the value must be 0, got {value}")
    x = at.value()
    x.check_samples()
    places = [*range(len(x.axes))] if axes is None else [x.axis(int(a)) for a in axes.reshape(-1)]
    if len(given) != 2 * len(places) or min(given, default=0) < 0:
        raise at.fail(f"pads must be pairs of axes that are not negative, got {given}")
    pairs = [(0, 0)] * len(x.axes)
    for i, place in enumerate(places):
        pairs[place] = (given[i], given[i + len(places)])
    if pairs[0] != (0, 0):
        raise at.fail(f"pads must be those of samples, got {pairs[0]} for the batch")
    if prod(n + sum(pair) for n, pair in zip(x.shape[1:], pairs[1:], strict=True)) > MAX_ELEMENTS:
        raise at.fail(f"outputs of samples must have at most {MAX_ELEMENTS} elements")
    _, *sample = pairs
    if set(sample) <= {(0, 0)}:
        return x
    if len(x.axes) > 3:
        return at.image(layers.Pad((*sample[1:], sample[0])), x)
    plain = at.net.plain(x)
    made = at.net.add(at.node.name, layers.Pad(tuple(sample)), plain.source.node)
    axes_made = tuple((Atom(n),) if n > 1 else () for n in made.shape)
    atoms = tuple(atom for pair in axes_made for atom in pair)
    return Value(Source(made), atoms, (x.axes[0], *axes_made), x.batch, at.node.name)


def expand(at: Reading) -> Value | Repeated:
    """Read an expansion of a constant to as many rows as a batch, or one that changes nothing."""
    shape, given = at.numbers(1), at.inputs[0]
    if isinstance(given, Value):
        wanted = (1,) * (len(given.axes) - len(shape)) + tuple(shape)
        same = len(wanted) == len(given.axes) and all(
            n in (1, size) for n, size in zip(wanted, given.shape, strict=True)
        )
        if not same:
            raise at.fail(f"expected a constant, or the shape {given.given}, got {shape}")
        return given
    array = at.required(0)
    array = array.reshape((1,) * (len(shape) - array.ndim) + array.shape)
    if array.shape[0] != 1 or tuple(shape[1:]) != array.shape[1:] or shape[0] != ANY_BATCH:
        raise at.fail(f"expected a row for each sample, got the shape {shape}")
    return Repeated(array)


ELEMENTWISE: Mapping[str, Read] = {
    "Add": _arithmetic,
    "Atan": _plain(lambda at: layers.ArcTan()),
    "Clip": _clip,
    "Div": _arithmetic,
    "Dropout": _dropout,
    "Elu": _plain(lambda at: layers.ELU(at.get("alpha", 1.0))),
    "Erf": _function(erf, saturates=True),
    "Gelu": _plain(_gelu),
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _plain(lambda at: layers.HardSwish()),
    "LeakyRelu": _plain(lambda at: layers.LeakyReLU(at.get("alpha", 0.01))),
    "Log": _plain(lambda at: layers.Log()),
    "Max": _extreme,
    "Min": _extreme,
    "Mul": _arithmetic,
    "Neg": _function(np.negative),
    "PRelu": _prelu,
    "Pow": _power,
    "Relu": _plain(lambda at: layers.ReLU()),
    "Sigmoid": _function(_sigmoid, layers.Sigmoid, saturates=True),
    "Sub": _arithmetic,
    "Sum": _sum,
    "Tanh": _function(np.tanh, layers.Tanh, saturates=True),
}

OPERATORS: Mapping[str, Read] = {
    **ELEMENTWISE,
    "AveragePool": _pool,
    "BatchNormalization": _batch_norm,
    "Cast": _view(_cast),
    "Concat": _concat,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Expand": expand,
    "Flatten": _view(_flatten),
    "Gemm": _gemm,
    "GlobalAveragePool": _global_average,
    "GlobalMaxPool": _global_max,
    "GroupNormalization": _group_norm,
    "Identity": _view(lambda at, x: x),
    "InstanceNormalization": _instance_norm,
    "LRN": _local_response,
    "LayerNormalization": _layer_norm,
    "MaxPool": _pool,
    "Pad": _pad,
    "ReduceMean": _reduce_mean,
    "Reshape": _view(_reshape),
    "Resize": _resize,
    "Slice": _slice,
    "Softmax": _softmax,
    "Split": _split,
    "Squeeze": _view(_squeeze),
    "Transpose": _view(_transpose),
    "Unsqueeze": _view(_unsqueeze),
}
"""Functions that read an operator of images, features and positions."""
