"""Operators of ATen, of which exported modules of PyTorch consist, as operators of ONNX.

A function writes one operator; its options are those of ATen, with their defaults.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod, sqrt
from typing import Any, NamedTuple

import numpy as np

from pydtnn.layers import GRULayer, LSTMLayer
from pydtnn.tools.interchange.onnx.functions import ACTIVATION
from pydtnn.tools.interchange.onnx.graph import ANY_BATCH, Names, OnnxNode
from pydtnn.tools.interchange.onnx.operators import ROWS
from pydtnn.tools.interchange.onnx.sequence_readers import MAX_MASKED_SCORE

VIEWS = frozenset(
    {
        *("alias", "chunk", "contiguous", "detach", "dropout", "expand", "flatten", "getitem"),
        *("movedim", "narrow", "permute", "reshape", "select", "slice", "split", "to"),
        *("split_with_sizes", "squeeze", "t", "transpose", "unbind", "unflatten", "unsqueeze"),
        *("view", "view_as", "reshape_as", "expand_as", "type_as", "numpy_T"),
    }
)
"""Operators whose results may share memory with their inputs."""


class AtenDraft:
    """Operators of ONNX that a module is written as.

    Parameters
    ----------
    leaves : collection of str
        Names of submodules without submodules.
    given : dict of str to ndarray
        Values of parameters and buffers.
    trained : collection of str
        Parameters that require gradients.
    training : bool
        Whether the module was exported in training mode.

    Attributes
    ----------
    nodes : list of OnnxNode
    constants : dict of str to ndarray
    refused : Counter
        What no operator of ONNX is written for, with the submodule.
    values : dict
        For each node of the exported graph, a tensor that is known, the name of a value, a list of
        several, or None behind what is refused.
    """

    def __init__(
        self,
        leaves: Collection[str],
        given: Mapping[str, np.ndarray],
        trained: Collection[str],
        training: bool,
    ) -> None:
        self.leaves, self.given = leaves, given
        self.trained, self.training = trained, training
        self.nodes: list[OnnxNode] = []
        self.constants: dict[str, np.ndarray] = {}
        self.refused: Counter[str] = Counter()
        self.values: dict[Any, Any] = {}
        self._names = Names(())
        self._aliases: dict[Any, set[Any]] = {}
        self._masks: dict[Any, Any] = {}  # inputs of integers, of what is computed of them alone

    def parameter(self, node: Any, target: str, array: np.ndarray) -> None:
        """Add a parameter or buffer of floating-point numbers by its name in the module."""
        self.constants[target] = self.values[node] = array

    def output(self, node: Any) -> str:
        """Return the name of an output.

        Raises
        ------
        ValueError
            If it is a constant, or an operator has been refused: all of them are listed.
        """
        if self.refused:
            found = [f"{count} x {what}" for what, count in self.refused.most_common()]
            raise ValueError(f"no layer does what these operators do: {'; '.join(found)}")
        value = self.values.get(node)
        if not isinstance(value, str):
            raise ValueError(f"output {node} must be computed by layers, got a constant or a mask")
        return value

    def value(self, node: Any, wanted: str = "") -> str:
        """Return the name of a value, a tensor as a constant, an omitted one as ''."""
        if node is None:
            return ""
        given = self.values.get(node, node) if is_node(node) else node
        if isinstance(given, str):
            return given
        if isinstance(given, FromMask):
            return self.padding(node, given)
        for name, array in self.constants.items():
            if array is given:
                return name
        name = self._names.free(f"{wanted or node}.constant")
        self.constants[name] = np.asarray(given)
        return name

    def call(self, node: Any) -> None:
        """Write an operator, or compute it if all of its inputs are constants."""
        name, self._masks[node] = name_of(node), self._mask_of(node)
        try:
            self._check_alias(node, name)
            self.values[node] = self._call(node, name)
        except NotWritten as error:
            if source := self._masks[node]:
                self.values[node] = FromMask(source, error)
                return
            self.refused[f"{error} ({path_of(node) or 'the module itself'})"] += 1
            self.values[node] = None

    def _call(self, node: Any, name: str) -> Any:
        if node.target is operator.getitem:
            parts = self.values[node.args[0]]
            if parts is None:
                return None
            if parts[node.args[1]] is None:
                raise NotWritten(f"output {node.args[1]} of {name_of(node.args[0])}")
            return parts[node.args[1]]
        given = [self.values[x] for x in node.all_input_nodes]
        if any(x is None for x in given):
            return None  # behind one that is refused
        if self._masks[node] and any(isinstance(x, FromMask) for x in given):
            raise NotWritten(name)
        if name.startswith("_assert"):
            return None
        if not hasattr(node.target, "_schema"):
            raise NotWritten(name)
        if not any(
            isinstance(x, str) or (isinstance(x, list) and str in map(type, x)) for x in given
        ):
            return self._constant(node, name)
        if name not in OPERATORS:
            raise NotWritten(name)
        return OPERATORS[name](AtenCall(self, node, name))

    def _mask_of(self, node: Any) -> Any:
        """Return the input of integers that a node is computed of alone, if it is no token."""
        computed = [x for x in node.all_input_nodes if not isinstance(self.values[x], np.ndarray)]
        found = {x if x.op == "placeholder" else self._masks.get(x) for x in computed}
        source = found.pop() if len(found) == 1 else None
        if source is None or source.meta["val"].is_floating_point():
            return None
        tokens = any(name_of(user) == "embedding" for user in source.users)
        return None if tokens or len(source.meta["val"].shape) != 2 else source

    def padding(self, node: Any, given: FromMask, hidden: bool = False) -> str:
        """Write a mask of keys behind the length of each sample, after all lengths were tried.

        A mask with other holes has a length that is no whole number, which the layer refuses.

        Parameters
        ----------
        node : torch.fx.Node
        given : FromMask
            Its value.
        hidden : bool
            Whether true elements are those that are hidden.
        """
        import torch

        source, (batch, keys) = given.source, given.source.meta["val"].shape

        def terms(x: Any) -> Any:
            if x is source or isinstance(self.values[x], np.ndarray):
                return torch.tensor(tried if x is source else self.values[x])
            known: Any = torch.fx.node.map_arg(bound(x), terms)
            return x.target(**{key: wide(value) for key, value in known.items()})

        for exists in (True, False):
            fits, first = True, None
            for longest in range(keys, 0, -batch):
                there = np.arange(keys) < np.maximum(longest - np.arange(batch), 1)[:, None]
                tried = (there == exists).astype(str(source.meta["val"].dtype).split(".")[1])
                mask = terms(node).numpy()
                mask = np.where(mask != hidden, 0.0, -np.inf) if mask.dtype == bool else mask
                low = np.where(mask > MAX_MASKED_SCORE, mask, -np.inf)
                first = low[:1] if first is None else first
                there = there.repeat(len(low) // batch, 0).reshape(-1, *[1] * (low.ndim - 2), keys)
                fits &= np.array_equal(low, np.where(there, first, -np.inf))
            if fits:
                break
        else:
            raise given.error
        at, one = AtenCall(self, node, "padding"), 0.5 ** keys.bit_length()
        m = at.write("Gather", np.array([[1.0 - exists], [exists]]), self.values[source], axis=0)
        m = at.write("Reshape", m, np.array([batch, keys]))
        cuts = [[np.array([n]) for n in cut] for cut in ((1, keys, 1), (0, keys - 1, 1))]
        both = at.write(
            "Concat", m, at.write("Mul", *(at.write("Slice", m, *c) for c in cuts)), axis=1
        )
        weights = [1 - one, *[1 + one] * (keys - 1), *[-one] * (keys - 1)]
        lengths = at.write("linear", both, np.array([weights]), np.array([one]))
        return at.write("padding", lengths, first)

    def _constant(self, node: Any, name: str) -> Any:
        """Compute an operator of constants."""
        import torch

        if torch.Tag.nondeterministic_seeded in node.target.tags:
            raise NotWritten(f"{name}, which is random,")

        def known(x: Any) -> Any:
            value = self.values[x]
            return torch.tensor(value) if isinstance(value, np.ndarray) else value  # a copy

        if name == "embedding" and np.ptp(self.values[node.args[1]]) == 0:  # one row, everywhere
            row = self.values[node.args[0]][self.values[node.args[1]].flat[0]]
            return row.reshape([1] * (len(node.meta["val"].shape) - 1) + [-1])

        def array(x: Any) -> Any:
            return x.numpy() if isinstance(x, torch.Tensor) else x

        try:
            arguments: Any = torch.fx.node.map_arg(bound(node), known)
            result = node.target(**{key: wide(x) for key, x in arguments.items()})
        except Exception as error:  # of any type: an operator of PyTorch
            raise NotWritten(f"{name} of constants") from error
        return [*map(array, result)] if isinstance(result, (list, tuple)) else array(result)

    def _check_alias(self, node: Any, name: str) -> None:
        """Raise NotWritten if an array is changed that is read later under another name."""
        source = node.args[0] if node.args else None
        if not is_node(source):
            return
        others = self._aliases.get(source, {source})
        if name in VIEWS or is_inplace(node):
            others.add(node)
            self._aliases[source] = self._aliases[node] = others
        if not is_inplace(node) or isinstance(self.values[source], np.ndarray):
            return
        later = set()
        rest = node.next
        while rest.op != "root":
            later.add(rest)
            rest = rest.next
        if any(user in later for x in others - {node} for user in x.users):
            raise NotWritten(f"{name}_, which changes an array that is read later,")


class NotWritten(ValueError):
    """An operator that cannot be written, or its options: the message names it."""


class FromMask(NamedTuple):
    """What is computed of an input of integers alone: a mask of attention, or else an error."""

    source: Any
    error: NotWritten


def listed(x: Any) -> list[Any]:
    """Return states of recurrent layers, which are one or several, as a list."""
    return [*x] if isinstance(x, (list, tuple)) else [x]


def is_node(x: Any) -> bool:
    """Return whether an argument is what a node computes."""
    from torch.fx import Node

    return isinstance(x, Node)


def name_of(node: Any) -> str:
    """Return the name of an operator, without that it writes over its input."""
    if node.target is operator.getitem:
        return "getitem"
    name = str(getattr(node.target, "_opname", getattr(node.target, "__name__", "?")))
    return name.rstrip("_") if is_inplace(node) else name


def is_inplace(node: Any) -> bool:
    """Return whether an operator writes over its first input."""
    name = getattr(node.target, "_opname", "")
    return name.endswith("_") and not name.startswith("_")


def path_of(node: Any) -> str:
    """Return the name of the submodule that has called an operator."""
    stack = [*node.meta.get("nn_module_stack", {}).values()]
    return str(stack[-1][0]) if stack else ""


def wide(x: Any) -> Any:
    """Return float64 in place of a type of floating-point numbers; others as they are."""
    import torch

    floats = isinstance(x, torch.dtype) and x.is_floating_point
    return torch.float64 if floats else x


def bound(node: Any) -> dict[str, Any]:
    """Return the arguments of an operator by name, with the defaults of the others."""
    arguments = node.target._schema.arguments
    given = {a.name: x for a, x in zip(arguments, node.args, strict=False)} | node.kwargs
    return {
        a.name: given.get(a.name, a.default_value if a.has_default_value() else None)
        for a in arguments
    }


def smallest_step(node: Any) -> float:
    """Return the distance of 1 to the next number of the type of a result: a default of norms."""
    import torch

    return float(torch.finfo(node.meta["val"].dtype).eps)


class AtenCall:
    """An operator of ATen with its arguments.

    Parameters
    ----------
    draft : AtenDraft
    node : torch.fx.Node
    name : str
    """

    def __init__(self, draft: AtenDraft, node: Any, name: str) -> None:
        self.draft, self.node, self.operator = draft, node, name
        self.arguments = bound(node)
        self._written = 0

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def has(self, name: str) -> bool:
        """Return whether the operator has an argument."""
        return name in self.arguments

    def fail(self, problem: str) -> NotWritten:
        """Return an error about an option."""
        return NotWritten(f"{self.operator} with {problem}")

    def require(self, name: str, *values: Any) -> None:
        """Raise NotWritten if an argument that exists has another value."""
        if self.has(name) and self[name] not in values:
            raise self.fail(f"{name}={self[name]}")

    def value(self, name: str) -> str:
        """Return the name of an argument's value."""
        return self.draft.value(self[name], self.label)

    def array(self, name: str) -> np.ndarray | None:
        """Return an argument that is a constant, or None if it is omitted."""
        given = self[name]
        if given is None:
            return None
        value = self.draft.values[given]
        if not isinstance(value, np.ndarray):
            raise self.fail(f"{name} that is computed")
        return value

    def is_constant(self, name: str) -> bool:
        """Return whether an argument is a number or a tensor that is known."""
        given = self[name]
        return not is_node(given) or isinstance(self.draft.values[given], np.ndarray)

    def shape(self, name: str = "") -> list[int]:
        """Return the shape of an argument, or that of the result."""
        return [*(self[name] if name else self.node).meta["val"].shape]

    @property
    def label(self) -> str:
        """Name of the layer: that of the submodule, or of its parameter."""
        weight: Any = self.arguments.get("weight")
        if is_node(weight):
            name = self.draft.value(weight)
            if weight.op == "placeholder":
                return name.rpartition(".")[0] or self.node.name
        path = path_of(self.node)
        if path and path in self.draft.leaves:
            return path
        return f"{path}.{self.node.name}" if path else self.node.name

    def write(
        self, operator: str, *inputs: Any, label: str = "", outputs: int = 1, **attributes: Any
    ) -> Any:
        """Add an operator of ONNX; return the name of its output, or a list of several.

        Inputs are names, or numbers and tensors that become constants.
        """
        label = label or self.label
        names = [x if isinstance(x, str) else self.draft.value(x, label) for x in inputs]
        made = [f"{self.node.name}:{self._written}.{i}" for i in range(outputs)]
        self._written += 1
        layer = self.draft._names.free(label)
        node = OnnxNode(layer, operator, tuple(names), tuple(made), attributes)
        self.draft.nodes.append(node)
        return made if outputs > 1 else made[0]


Write = Callable[[AtenCall], Any]


def _plain(operator: str, argument: str = "self", **attributes: Any) -> Write:
    """Return a function for an operator of one input that ONNX has, too."""
    return lambda at: at.write(operator, at.value(argument), **attributes)


def _same(at: AtenCall) -> str:
    """Write nothing."""
    return at.value("input" if at.has("input") else "self")


def _pair(value: Any, axes: int) -> list[int]:
    """Return a number for each axis."""
    numbers = [*value] if isinstance(value, Sequence) else [value]
    return numbers * axes if len(numbers) == 1 else numbers


# -- layers with parameters


def _conv(at: AtenCall) -> str:
    axes = len(at.shape("weight")) - 2
    padding: dict[str, Any] = {}
    if isinstance(at["padding"], str):
        padding["auto_pad"] = {"same": "SAME_UPPER", "valid": "VALID"}[at["padding"]]
    else:
        padding["pads"] = _pair(at["padding"], axes) * 2
    options: dict[str, Any] = {
        "strides": _pair(at["stride"], axes),
        "dilations": _pair(at["dilation"], axes),
    }
    operator = "Conv"
    if at.has("output_padding"):
        operator, options["output_padding"] = "ConvTranspose", _pair(at["output_padding"], axes)
    inputs = [at.value(name) for name in ("input", "weight", "bias")]
    return at.write(operator, *inputs, group=at["groups"], **options, **padding)


def _linear(at: AtenCall) -> str:
    return at.write("linear", at.value("input"), at.value("weight"), at.value("bias"))


def _addmm(at: AtenCall) -> str:
    """Write the product with a matrix (I, O), and the bias."""
    at.require("beta", 1)
    at.require("alpha", 1)
    matrix = at.array("mat2")
    assert matrix is not None
    owner = at.value("mat2").rpartition(".")[0] if at["mat2"].op == "placeholder" else ""
    return at.write("linear", at.value("mat1"), matrix.T, at.value("self"), label=owner)


def _matmul(at: AtenCall) -> str:
    a, b = [name for name in ("self", "mat2", "other") if at.has(name)]
    if at.is_constant(b) and len(at.shape(b)) == 2:
        matrix = at.array(b)
        assert matrix is not None
        return at.write("linear", at.value(a), matrix.T)
    return at.write("MatMul", at.value(a), at.value(b))


def _einsum(at: AtenCall) -> str:
    """Write the sum over axes of two operands: a product with a matrix, or a part of attention."""
    before, _, result = at["equation"].replace(" ", "").partition("->")
    names, operands = before.split(","), [*at["tensors"]]
    if len(names) == 2 and not isinstance(at.draft.values[operands[0]], str):
        names, operands = names[::-1], operands[::-1]
    shapes = [[*x.meta["val"].shape] for x in operands]
    wide = max(len(s) - len(n.replace("...", "")) for s, n in zip(shapes, names, strict=True))
    *names, result = (n.replace("...", "ABCDEFGH"[:wide]) for n in (*names, result))
    both, known = {*names[0]} & {*names[-1]}, at.draft.values[operands[-1]]
    batch = [n for n in result if n in both]
    left, right = (
        [n for n in result if n in part and n not in both] for part in (names[0], names[-1])
    )
    summed = [n for n in names[0] if n in both and n not in result]
    orders = [[*batch, *left, *summed], [*batch, *summed, *right]]
    pairs = {pair for n, s in zip(names, shapes, strict=True) for pair in zip(n, s, strict=False)}
    fits = [sorted(n) for n in names] == [sorted(order) for order in orders]
    fits &= len(pairs) == len(dict(pairs)) and (isinstance(known, str) or not batch)
    if not fits or not summed:
        raise at.fail(f"the equation {at['equation']}")
    size = dict(pairs).__getitem__
    outer, made = [*map(size, batch)], [*batch, *left, *right]
    rows, inner, columns = (prod(map(size, part)) for part in (left, summed, right))
    perms = [[n.index(i) for i in order] for n, order in zip(names, orders, strict=True)]

    def view(x: str, before: Sequence[int], after: Sequence[int]) -> str:
        return x if before == after else at.write("Reshape", x, np.array(after))

    def turned(x: str, perm: list[int]) -> str:
        return x if perm == sorted(perm) else at.write("Transpose", x, perm=perm)

    x = turned(at.draft.value(operands[0]), perms[0])
    x = view(x, [*map(size, orders[0])], [*outer, rows, inner])
    if isinstance(known, str):
        y = view(turned(known, perms[1]), [*map(size, orders[1])], [*outer, inner, columns])
        y = at.write("MatMul", x, y)
    else:
        y = at.write("linear", x, known.transpose(perms[1]).reshape(inner, columns).T)
    y = view(y, [*outer, rows, columns], [*map(size, made)])
    return turned(y, [made.index(n) for n in result])


def _baddbmm(at: AtenCall) -> str:
    at.require("beta", 1)
    at.require("alpha", 1)
    product = at.write(
        "MatMul", at.value("batch1"), at.value("batch2"), label=f"{at.label}.product"
    )
    return at.write("Add", product, at.value("self"))


def _batch_norm(at: AtenCall) -> str:
    arrays = [at.array(name) for name in ("weight", "bias", "running_mean", "running_var")]
    if any(array is None for array in arrays):
        raise at.fail("affine=False or track_running_stats=False")
    trained = at.value("weight") in at.draft.trained
    if at.draft.training and at["training"] != trained:
        raise at.fail(f"training={at['training']} and requires_grad={trained}")
    return at.write(
        "BatchNormalization",
        at.value("input"),
        *arrays,
        epsilon=at["eps"],
        momentum=1 - at["momentum"],
    )


def _layer_norm(at: AtenCall) -> str:
    shape = at["normalized_shape"]
    arrays = [at.value("weight") if at["weight"] else np.ones(shape), at.value("bias")]
    options = {"axis": -len(shape), "epsilon": at["eps"]}
    return at.write("LayerNormalization", at.value("input"), *arrays, **options)


def _rms_norm(at: AtenCall) -> str:
    shape = at["normalized_shape"]
    if len(shape) != 1:
        raise at.fail(f"normalized_shape={shape}")
    weight = at.value("weight") if at["weight"] else np.ones(shape)
    epsilon = smallest_step(at.node) if at["eps"] is None else at["eps"]
    return at.write("rms_norm", at.value("input"), weight, epsilon=epsilon)


def _group_norm(at: AtenCall) -> str:
    size = at.shape("input")[1]
    arrays = [
        at.value(name) if at[name] else make(size)
        for name, make in (("weight", np.ones), ("bias", np.zeros))
    ]
    if at.has("use_input_stats"):
        at.require("running_mean", None)
        return at.write("InstanceNormalization", at.value("input"), *arrays, epsilon=at["eps"])
    options = {"num_groups": at["num_groups"], "epsilon": at["eps"]}
    return at.write("GroupNormalization", at.value("input"), *arrays, **options)


def _embedding(at: AtenCall) -> str:
    """Write vectors of tokens; that of padding, which is 0, is multiplied by 0 to remain so."""
    at.require("scale_grad_by_freq", False)
    name, tokens, padding = at.value("weight"), at.value("indices"), at["padding_idx"]
    vectors = at.write("Gather", name, tokens, axis=0)
    if padding < 0 or name not in at.draft.trained:
        return vectors
    matrix = at.draft.given[name]
    if matrix[padding].any() or len(at["weight"].users) > 1:
        raise at.fail(
            f"padding_idx={padding} of a matrix that has further uses, or a vector there that is "
            "not 0: set padding_idx to None to train it"
        )
    exists = np.ones((len(matrix), 1))
    exists[padding] = 0
    label = f"{at.label}.padding"
    exists = at.write("Gather", exists, tokens, axis=0, label=label)
    return at.write("Mul", vectors, exists, label=f"{label}.product")


def _recurrent(at: AtenCall) -> list[str | None]:
    """Write layers of recurrent layers, of sequences (T, N, C), and last states."""
    kind = LSTMLayer if at.operator == "lstm" else GRULayer
    firsts = [at.draft.values[state] for state in listed(at["hx"])]
    layers, directions = at["num_layers"], 1 + at["bidirectional"]
    arrays = [at.draft.values[array] for array in at["params"]]
    each = 4 if at["has_biases"] else 2
    if len(arrays) != layers * directions * each:
        raise at.fail("proj_size")
    owner = at.draft.value(at["params"][0]).rpartition(".")[0] or at.node.name
    turn: dict[str, Any] = {"perm": [1, 0, 2]}
    x = at.value("input")
    x = at.write("Transpose", x, label=f"{owner}.steps", **turn) if at["batch_first"] else x
    options: dict[str, Any] = {
        "hidden_size": arrays[1].shape[1],
        "direction": "bidirectional" if directions > 1 else "forward",
        "linear_before_reset": 1,
    }
    last: list[list[str]] = []

    def rows(array: np.ndarray) -> np.ndarray:
        order = [*ROWS[kind]]
        return array.reshape(len(order), -1, *array.shape[1:])[order].reshape(array.shape)

    for layer in range(layers):
        own = arrays[layer * directions * each : (layer + 1) * directions * each]
        parts = [own[i : i + each] for i in range(0, len(own), each)]
        given = [np.stack([rows(part[i]) for part in parts]) for i in (0, 1)]
        bias: Any = ""
        if each == 4:
            bias = np.stack([np.concatenate([rows(part[2]), rows(part[3])]) for part in parts])
        part = slice(layer * directions, (layer + 1) * directions)
        first = [
            x[part]
            if isinstance(x, np.ndarray)
            else at.write("Slice", x, [part.start], [part.stop], [0], label=f"{owner}.first")
            for x in firsts
        ]
        label = f"{owner}.{layer}" if layers > 1 else owner
        operator = kind.__name__.removesuffix("Layer")
        inputs = (x, *given, bias, "", *first)
        y, *ends = at.write(operator, *inputs, label=label, outputs=1 + len(firsts), **options)
        last.append(ends)
        y = at.write("Transpose", y, label=f"{label}.states", perm=[0, 2, 1, 3])
        length, batch = (at.shape("input")[i] for i in ((1, 0) if at["batch_first"] else (0, 1)))
        shape = [length, batch, directions * options["hidden_size"]]
        x = at.write("Reshape", y, np.array(shape), label=f"{label}.output")
        if at["dropout"] and layer < layers - 1:
            x = at.write("Dropout", x, np.array(at["dropout"]), label=f"{label}.dropout")
    if at["batch_first"]:
        x = at.write("Transpose", x, label=f"{owner}.back", **turn)
    ends = [*zip(*last, strict=True)]
    if layers > 1:
        return [x, *(at.write("Concat", *e, label=f"{owner}.last", axis=0) for e in ends)]
    return [x, *last[0]]


# -- pools and sizes


def _pool(operator: str) -> Write:
    def write(at: AtenCall) -> str:
        axes = len(at["kernel_size"])
        options: dict[str, Any] = {"ceil_mode": int(at["ceil_mode"])}
        if operator == "AveragePool":
            at.require("divisor_override", None)
            options["count_include_pad"] = int(at["count_include_pad"])
        else:
            options["dilations"] = _pair(at["dilation"], axes)
        kernel = _pair(at["kernel_size"], axes)
        options |= {"kernel_shape": kernel, "strides": _pair(at["stride"] or kernel, axes)}
        return at.write(operator, at.value("self"), pads=_pair(at["padding"], axes) * 2, **options)

    return write


def _adaptive(at: AtenCall) -> str | list[str | None]:
    """Write means or maxima of bins: of whole maps, of equal bins, or of others."""
    wanted, x = [*at["output_size"]], at.value("self")
    size = at.shape("self")[-len(wanted) :]
    wanted = [n if out is None else out for n, out in zip(size, wanted, strict=True)]
    if {*wanted} == {1} and "max" not in at.operator:
        return at.write("GlobalAveragePool", x)
    if any(n % out for n, out in zip(size, wanted, strict=True)):
        if at.operator != "adaptive_avg_pool2d":
            raise at.fail(f"bins of several sizes: {size} to {wanted}")
        return at.write("adaptive_avg_pool2d", x, output_size=wanted)
    kernel = [n // out for n, out in zip(size, wanted, strict=True)]
    if "max" not in at.operator:
        return at.write("AveragePool", x, kernel_shape=kernel, strides=kernel)
    return [at.write("MaxPool", x, kernel_shape=kernel, strides=kernel), None]  # and places


def _resize(at: AtenCall) -> str:
    sizes, x = np.array(at.shape()), at.value("input" if at.has("input") else "self")
    if "nearest" in at.operator:
        place: dict[str, Any] = {
            "coordinate_transformation_mode": "asymmetric",
            "nearest_mode": "floor",
        }
        return at.write("Resize", x, "", "", sizes, mode="nearest", **place)
    at.require("align_corners", False)
    return at.write("Resize", x, "", "", sizes, mode="linear")


def _pad(at: AtenCall) -> str:
    at.require("mode", "constant")
    pairs = [*zip(at["pad"][::2], at["pad"][1::2], strict=True)][::-1]
    pairs = [(0, 0)] * (len(at.shape("self")) - len(pairs)) + pairs
    before, after = zip(*pairs, strict=True)
    value = float(at["value"] or 0)
    return at.write("Pad", at.value("self"), np.array([*before, *after]), np.array(value))


# -- arithmetic


def _arithmetic(operator: str) -> Write:
    def write(at: AtenCall) -> str:
        at.require("rounding_mode", None)
        a, b = at.value("self"), at.value("other")
        if at.has("alpha") and at["alpha"] != 1:
            if at.is_constant("other"):
                raise at.fail(f"alpha={at['alpha']} of a constant")
            b = at.write("Mul", b, at["alpha"], label=f"{at.label}.factor")
        return at.write(operator, a, b, **_rows(at, "other"))

    return write


def _div(at: AtenCall) -> str:
    """Write a quotient; of a computed y above 1, 1 / y = 2 sigmoid(-log(2 y - 1))."""
    y = at["other"]
    if at.is_constant("other") or name_of(y) != "add" or y.args[1] != 1 or y.kwargs:
        return _arithmetic("Div")(at)
    if name_of(y.args[0]) not in ("abs", "relu", "sigmoid", "softplus"):
        raise at.fail("a divisor that is not known to be above 1")
    y = at.write("Log", at.write("Sub", at.write("Mul", at.value("other"), 2.0), 1.0))
    y = at.write("Mul", at.write("Sigmoid", at.write("Neg", y)), 2.0)
    return at.write("Mul", at.value("self"), y)


def _abs(at: AtenCall) -> str:
    x = at.value("self")
    return at.write("Add", at.write("Relu", x), at.write("Relu", at.write("Neg", x)))


def _rsub(at: AtenCall) -> str:
    at.require("alpha", 1)
    return at.write("Sub", at.value("other"), at.value("self"))


def _power(at: AtenCall) -> str:
    return at.write("Pow", at.value("self"), at["exponent"])


def _clamp(at: AtenCall) -> str:
    low, high = (at[n] for n in (("min_val", "max_val") if at.has("min_val") else ("min", "max")))
    if (low, high) == (0, 6):
        return _activation("relu6")(at)
    if low == 0 and high is None:
        return at.write("Relu", at.value("self"))
    bounds = ["" if bound is None else bound for bound in (low, high)]
    return at.write("Clip", at.value("self"), *bounds)


def _activation(name: str) -> Write:
    return _plain(ACTIVATION, **{ACTIVATION: name})


def _softplus(at: AtenCall) -> str:
    at.require("beta", 1)
    at.require("threshold", 20)
    return at.write("Softplus", at.value("self"))


def _elu(at: AtenCall) -> str:
    if at.operator == "selu":
        return at.write("Mul", at.write("Elu", at.value("self"), alpha=SELU[0]), SELU[1])
    at.require("scale", 1)
    at.require("input_scale", 1)
    return at.write("Elu", at.value("self"), alpha=float(at["alpha"]))


SELU = (1.6732632423543772, 1.0507009873554805)
"""Slope and factor of Klambauer et al., "Self-normalizing neural networks", 2017, section 2."""


def _mish(at: AtenCall) -> str:
    x = at.value("self")
    return at.write("Mul", x, at.write("Tanh", at.write("Softplus", x)))


def _dropout(at: AtenCall) -> str:
    x, rate = at.value("input" if at.has("input") else "self"), at["p"]
    return at.write("Dropout", x, np.array(rate)) if rate else x


def _mean(at: AtenCall) -> str:
    axes, keep = at["dim"], int(at["keepdim"])
    if axes is None:
        raise at.fail("all axes")
    axes = _pair(axes, 1)
    operator = "ReduceMax" if at.operator == "amax" else "ReduceMean"
    y = at.write(operator, at.value("self"), axes=axes, keepdims=keep)
    if at.operator != "sum":
        return y
    shape = at.shape("self")
    return at.write("Mul", y, prod(shape[axis] for axis in axes), label=f"{at.label}.count")


def _softmax(operator: str) -> Write:
    return lambda at: at.write(operator, at.value("self"), axis=at["dim"])


def _attention(at: AtenCall) -> str:
    """Write attention as products, a mask, and Softmax."""
    at.require("enable_gqa", False)
    *before, length, size = at.shape("query")
    factor = 1 / sqrt(size) if at["scale"] is None else at["scale"]
    axes = [*range(len(before)), len(before) + 1, len(before)]
    label = at.label
    keys = at.write("Transpose", at.value("key"), label=f"{label}.keys", perm=axes)
    scores = at.write("MatMul", at.value("query"), keys, label=f"{label}.products")
    scores = at.write("Mul", scores, factor, label=f"{label}.scores")
    given = None if at["attn_mask"] is None else at.draft.values[at["attn_mask"]]
    mask: Any = at.value("attn_mask") if isinstance(given, FromMask) else at.array("attn_mask")
    if isinstance(mask, np.ndarray) and mask.dtype == bool:
        mask = np.where(mask, 0.0, -np.inf)
    if at["is_causal"]:
        mask = np.triu(np.full((length, at.shape("key")[-2]), -np.inf), 1)
    if mask is not None:
        rows = _rows(at, "attn_mask")
        scores = at.write("Add", scores, mask, label=f"{label}.masked", **rows)
    weights = at.write("Softmax", scores, label=f"{label}.weights", axis=-1)
    if at["dropout_p"]:
        rate = np.array(at["dropout_p"])
        weights = at.write("Dropout", weights, rate, label=f"{label}.dropped")
    return at.write("MatMul", weights, at.value("value"), label=label)


def _rows(at: AtenCall, name: str) -> dict[str, Any]:
    """Return the matrix whose rows are terms of scores, and their indices, or nothing."""
    found = [x for x in [at[name]] if is_node(x) and not isinstance(at.draft.values[x], str)]
    for x in found:
        if name_of(x) == "embedding" and x.args[0].op == "placeholder":
            return {"rows": (at.draft.value(x.args[0]), at.draft.values[x.args[1]])}
        found += [part for part in x.all_input_nodes if part not in found]
    return {}


def _masked(at: AtenCall) -> str:
    mask = at.draft.values[at["mask"]]
    if isinstance(mask, FromMask):
        if not at["value"] <= MAX_MASKED_SCORE:
            raise mask.error
        return at.write("Add", at.value("self"), at.draft.padding(at["mask"], mask, hidden=True))
    return at.write("Where", at.value("mask"), at.value("value"), at.value("self"))


# -- views and parts


def _reshape(at: AtenCall) -> str:
    return at.write("Reshape", at.value("self"), np.array(at.shape()))


def _expand(at: AtenCall) -> str:
    if at.shape() != at.shape("self"):
        raise at.fail("a computed tensor that is repeated")
    return at.value("self")


def _transpose(at: AtenCall) -> str:
    axes = [*range(len(at.shape("self")))]
    if at.has("dims"):
        axes = [axis % len(axes) for axis in at["dims"]]
    else:
        a, b = (at["dim0"], at["dim1"]) if at.has("dim0") else (-2, -1)
        axes[a], axes[b] = axes[b], axes[a]
    return at.write("Transpose", at.value("self"), perm=axes)


def _slice(at: AtenCall) -> str:
    start, end = at["start"] or 0, at["end"]
    bounds = [start, 2**62 if end is None else end, at["dim"], at["step"]]
    return at.write("Slice", at.value("self"), *(np.array([n]) for n in bounds))


def _select(at: AtenCall) -> str:
    return at.write("Gather", at.value("self"), np.array(at["index"]), axis=at["dim"])


def _split(at: AtenCall) -> list[str]:
    axis = at["dim"]
    sizes = [part.shape[axis] for part in at.node.meta["val"]]
    x = at.value("self")
    if len(sizes) == 1:
        return [x]
    return at.write("Split", x, np.array(sizes), axis=axis, outputs=len(sizes))


def _unbind(at: AtenCall) -> list[str]:
    axis, x = at["dim"], at.value("self")
    count = at.shape("self")[axis]
    return [at.write("Gather", x, np.array(i), axis=axis) for i in range(count)]


def _cat(at: AtenCall) -> str:
    parts = at["tensors"]
    axis = at["dim"]
    if at.operator == "stack":
        rank = len(at.shape())
        shape = [*at.shape()]
        shape[axis] = 1
        names = [
            at.write("Reshape", at.draft.value(x), np.array(shape), label=f"{at.label}.part")
            for x in parts
        ]
        return at.write("Concat", *names, axis=axis % rank)
    names = [_token(at, x) if i == 0 else at.draft.value(x) for i, x in enumerate(parts)]
    return at.write("Concat", *names, axis=axis)


def _token(at: AtenCall, node: Any) -> str:
    """Return the name of a value, a constant row of each sample as one row for any batch."""
    value = at.draft.values[node]
    if not isinstance(value, np.ndarray) or value.ndim < 2 or value.shape[0] != at.shape()[0]:
        return at.draft.value(node)
    shape = np.array([ANY_BATCH, *value.shape[1:]])
    if not (value == value[:1]).all():
        raise at.fail("constants that differ between samples")
    return at.write("Expand", value[:1], shape, label=f"{at.label}.rows")


def _to(at: AtenCall) -> str:
    before, after = at["self"].meta["val"].dtype, at.node.meta["val"].dtype
    if before.is_floating_point != after.is_floating_point:
        raise at.fail(f"a change of {before} to {after}")
    return at.value("self")


def _shuffle(at: AtenCall) -> str:
    factor = at["upscale_factor"]
    return at.write("DepthToSpace", at.value("self"), blocksize=factor, mode="CRD")


OPERATORS: Mapping[str, Write] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "conv_transpose2d"), _conv),
    **dict.fromkeys(("add", "add_scalar"), _arithmetic("Add")),
    **dict.fromkeys(("sub", "subtract"), _arithmetic("Sub")),
    **dict.fromkeys(("mul", "multiply"), _arithmetic("Mul")),
    **dict.fromkeys(("div", "divide", "true_divide"), _div),
    **dict.fromkeys(("matmul", "bmm", "mm"), _matmul),
    **dict.fromkeys(("max_pool1d", "max_pool2d", "max_pool3d"), _pool("MaxPool")),
    **dict.fromkeys(("avg_pool1d", "avg_pool2d", "avg_pool3d"), _pool("AveragePool")),
    **dict.fromkeys(
        ("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"), _adaptive
    ),
    **dict.fromkeys(
        ("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"), _adaptive
    ),
    **dict.fromkeys(("upsample_nearest2d", "upsample_bilinear2d"), _resize),
    **dict.fromkeys(("pad", "constant_pad_nd"), _pad),
    **dict.fromkeys(("alias", "clone", "contiguous"), _same),
    **dict.fromkeys(("lstm", "gru"), _recurrent),
    **dict.fromkeys(("clamp", "clamp_min", "hardtanh"), _clamp),
    **dict.fromkeys(("group_norm", "instance_norm"), _group_norm),
    **dict.fromkeys(("mean", "sum", "amax"), _mean),
    **dict.fromkeys(("flatten", "reshape", "reshape_as", "squeeze", "unflatten"), _reshape),
    **dict.fromkeys(("unsqueeze", "view", "view_as", "_unsafe_view"), _reshape),
    **dict.fromkeys(("expand", "expand_as"), _expand),
    **dict.fromkeys(("permute", "t", "transpose"), _transpose),
    **dict.fromkeys(("chunk", "split", "split_with_sizes"), _split),
    **dict.fromkeys(("cat", "stack"), _cat),
    **dict.fromkeys(("to", "_to_copy", "type_as"), _to),
    "abs": _abs,
    "addmm": _addmm,
    "arctan": _plain("Atan"),
    "atan": _plain("Atan"),
    "baddbmm": _baddbmm,
    "batch_norm": _batch_norm,
    "dropout": _dropout,
    "einsum": _einsum,
    **dict.fromkeys(("elu", "selu"), _elu),
    "embedding": _embedding,
    "erf": _plain("Erf"),
    "gelu": lambda at: at.write("Gelu", at.value("self"), approximate=at["approximate"]),
    "hardsigmoid": _activation("hard_sigmoid"),
    "hardswish": _plain("HardSwish"),
    "layer_norm": _layer_norm,
    "leaky_relu": lambda at: at.write(
        "LeakyRelu", at.value("self"), alpha=float(at["negative_slope"])
    ),
    "linear": _linear,
    "log": _plain("Log"),
    "log_softmax": _softmax("LogSoftmax"),
    "masked_fill": _masked,
    "mish": _mish,
    "neg": _plain("Neg"),
    "pixel_shuffle": _shuffle,
    "pow": _power,
    "prelu": lambda at: at.write("PRelu", at.value("self"), at.value("weight")),
    "relu": _plain("Relu"),
    "relu6": _activation("relu6"),
    "rsqrt": lambda at: at.write("Reciprocal", at.write("Sqrt", at.value("self"))),
    "rms_norm": _rms_norm,
    "rsub": _rsub,
    "scaled_dot_product_attention": _attention,
    "select": _select,
    "sigmoid": _plain("Sigmoid"),
    "silu": _activation("silu"),
    "slice": _slice,
    "softmax": _softmax("Softmax"),
    "softplus": _softplus,
    "sqrt": _plain("Sqrt"),
    "tanh": _plain("Tanh"),
    "unbind": _unbind,
}
"""Functions that write an operator; modules with others are refused."""


WITHOUT_DROPOUT: Mapping[str, dict[str, float]] = {
    "dropout": {"p": 0.0},
    "gru": {"dropout": 0.0},
    "lstm": {"dropout": 0.0},
    "scaled_dot_product_attention": {"dropout_p": 0.0},
}
"""Options of operators that drop nothing."""


def run_in_double(
    program: Any,
    tensors: Mapping[str, Any],
    names: Mapping[str, str],
    inputs: Sequence[Any],
    training: bool,
) -> tuple[list[Any], dict[str, Any]]:
    """Run an exported module in float64, without dropout.

    Parameters
    ----------
    program : torch.export.ExportedProgram
    tensors : dict of str to torch.Tensor
        Parameters and buffers of floating-point numbers.
    names : dict of str to str
        Their names, by those of the graph.
    inputs : sequence of torch.Tensor
    training : bool
        Whether batch norms whose parameters require gradients use the statistics of the batch.

    Returns
    -------
    outputs : list of ndarray
    arrays : dict of str to ndarray
        Parameters and buffers after that.
    """
    import torch

    def double(x: Any) -> Any:
        return x.detach().double() if x.is_floating_point() else x.detach().clone()

    trained = {name for name, tensor in tensors.items() if tensor.requires_grad}
    arrays = {name: double(tensor).clone() for name, tensor in tensors.items()}
    states, given = {**program.state_dict, **program.constants}, iter(inputs)
    values: dict[Any, Any] = {}
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if node.name in names:
            values[node] = arrays[names[node.name]]
        else:
            values[node] = double(next(given) if spec.target is None else states[spec.target])
    for node in program.graph.nodes:
        if node.op != "call_function" or name_of(node).startswith("_assert"):
            continue
        if hasattr(node.target, "_schema"):
            call = bound(node) | WITHOUT_DROPOUT.get(name_of(node), {})
            if name_of(node) == "batch_norm":
                call["training"] = training and names[call["weight"].name] in trained
            if name_of(node) == "rms_norm" and call["eps"] is None:
                call["eps"] = smallest_step(node)
            known: Any = torch.fx.node.map_arg(call, values.__getitem__)
            with torch.no_grad():
                values[node] = node.target(**{key: wide(x) for key, x in known.items()})
        else:  # a part of several outputs
            values[node] = values[node.args[0]][node.args[1]]
    *_, last = program.graph.nodes
    outputs = [values[node].numpy() for node in last.args[0]]
    return outputs, {name: tensor.numpy() for name, tensor in arrays.items()}
