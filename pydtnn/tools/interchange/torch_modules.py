"""Modules of PyTorch as models, through `torch.export`.

An exported module is a graph of the operators of ATen with the module's options. `torch_operators`
writes them as operators of ONNX, in memory, from which `NodeNetwork` makes layers: both ways into
the library share their readers. Which parameter an array of the model is made of is found by
reading the same graph with numbers in place of the parameters: see `find_origins`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from pydtnn.kernels import Backend, create_backend
from pydtnn.layers import StepContext
from pydtnn.layers.statistics import RUNNING
from pydtnn.model import Model
from pydtnn.model.graph import Graph
from pydtnn.tools.interchange.onnx.functions import with_activations
from pydtnn.tools.interchange.onnx.graph import NodeGraph, OnnxInput, contributing_nodes
from pydtnn.tools.interchange.onnx.importing import (
    NodeNetwork,
    channels_last,
    check_operators,
    create_model,
    like,
)
from pydtnn.tools.interchange.onnx.rewriting import joined
from pydtnn.tools.interchange.torch_operators import (
    AtenDraft,
    bound,
    listed,
    name_of,
    run_in_double,
)
from pydtnn.utils.imports import import_optional
from pydtnn.utils.validate import check_bool

OPSET = 17
"""Of ONNX, whose operators are written."""

MAX_SAMPLES = 16
"""Of an example: batch norms of few samples with one position enlarge errors of rounding."""

FIRST = 2**24
"""Number of the first element of a parameter, above the constants of networks."""

NO_RATE = "\0rate"
"""Name of a constant of 0, as no value of a module has."""

TOLERANCES = {"evaluation": 1e-8, "training": 1e-5}
"""Largest differences from the module in float64, relative to the largest number of an array."""


def from_torch(
    module: Any,
    example: Any,
    *,
    backend: Backend | str = "cpu",
    dtype: str = "float32",
    verify: bool = True,
) -> Model:
    """Make a model of a module of PyTorch, with its weights and options.

    The model consists of layers of the library: it can be trained on any number of ranks, and
    saved. Images are ``(N, H, W, C)`` here. Names of layers are those of the submodules. Parameters
    that do not require gradients, and buffers that are added or multiplied, are frozen.

    Parameters
    ----------
    module : torch.nn.Module
        It is exported in the mode that it is in: give it in training mode if it has outputs, or
        dropout of the weights of attention, in that mode only.
    example : torch.Tensor or tuple of torch.Tensor
        Inputs: images ``(N, C, H, W)``, sequences ``(N, T, C)``, tokens ``(N, T)`` of integers or
        features ``(N, C)``. The model has samples of this size, and batches of any. Inputs and
        outputs ``(T, N, C)`` or ``(D, N, H)`` of recurrent layers, and tuples of these, are
        ``(N, T, C)`` and ``(N, D, H)`` here, one after the other.
    backend : Backend or str
    dtype : str
        See `Model`.
    verify : bool
        Whether to compare a model in float64 with the module: outputs in evaluation and in training
        without dropout, and the running statistics of batch norm after that.

    Returns
    -------
    Model

    Raises
    ------
    ImportError
        If PyTorch is not installed.
    ValueError
        If no layer does what a part of the module does: the message lists all such operators with
        their submodules. Also if outputs differ, with `verify`.

    Examples
    --------
    >>> import torch  # doctest: +SKIP
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())  # doctest: +SKIP
    >>> from_torch(net, torch.zeros(1, 4)).parameter_names  # doctest: +SKIP
    ('0.w', '0.b')
    """
    check_bool("from_torch", "verify", verify)
    traced = Traced.of("from_torch", module, example)
    origins = find_origins(traced)
    if verify:
        _verify(traced, origins)
    model = traced.model(backend, dtype)
    traced.freeze(model, origins)
    return model


def to_torch(model: Model, module: Any, example: Any) -> None:
    """Copy the weights of a model into the module of PyTorch that it has been made of.

    Parameters
    ----------
    model : Model
        Of `from_torch`, perhaps trained, or saved and loaded since.
    module : torch.nn.Module
        Of the same structure; parameters and running statistics are replaced.
    example : torch.Tensor or tuple of torch.Tensor
        As of `from_torch`.

    Raises
    ------
    ValueError
        If the model has other arrays than one that `from_torch` makes of the module; nothing has
        been copied then.
    """
    traced = Traced.of("to_torch", module, example)
    origins, state = find_origins(traced), model.state()
    shapes = {name: origin.numbers.shape for name, origin in origins.items()}
    given = {name: array.shape for name, array in state.items()}
    if other := sorted({*shapes.items()} ^ {*given.items()}):
        raise ValueError(
            "to_torch: the model must be one that from_torch makes of the module, got "
            f"{other[0][0]}, which only one of the two has, or in another shape"
        )
    flat = np.concatenate([np.zeros(0), *(a.reshape(-1) for a in traced.arrays.values())])
    for name, origin in origins.items():
        if origin.parameters:
            flat[origin.places] = state[name].reshape(-1)
    sizes = [array.size for array in traced.arrays.values()]
    torch: Any = import_optional("torch", "torch", "to_torch")
    with torch.no_grad():
        parts = np.split(flat, np.cumsum(sizes)[:-1])
        for (name, array), values in zip(traced.arrays.items(), parts, strict=True):
            traced.tensors[name].copy_(torch.from_numpy(values.reshape(array.shape)))


@dataclass(frozen=True, eq=False)
class Traced:
    """An exported module.

    Attributes
    ----------
    who : str
        First words of errors.
    program : torch.export.ExportedProgram
    module : torch.nn.Module
    example : tuple of torch.Tensor
        Inputs of 2 to `MAX_SAMPLES` samples.
    tensors : dict of str to torch.Tensor
        Parameters, and buffers that are vectors of floating-point numbers, that are read, by their
        names in the module; shared ones once. Other buffers are constants.
    arrays : dict of str to ndarray
        Their values in float64.
    names : dict of str to str
        The name in `tensors` of each such input of the exported graph.
    axes : tuple of int
        Of the batch in the inputs.
    """

    who: str
    program: Any
    module: Any
    example: tuple[Any, ...]
    tensors: dict[str, Any]
    arrays: dict[str, np.ndarray]
    names: dict[str, str]
    axes: tuple[int, ...]

    @classmethod
    def of(cls, who: str, module: Any, example: Any) -> Traced:
        """Export a module; see `from_torch`."""
        torch: Any = import_optional("torch", "torch", who)
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"{who}: module must be a torch.nn.Module, got {module!r:.100}")
        example = example if isinstance(example, tuple) else (example,)
        given, structure = torch.utils._pytree.tree_flatten(example)
        recurrent = any(isinstance(part, torch.nn.RNNBase) for part in module.modules())
        are_tensors = all(isinstance(x, torch.Tensor) and 2 <= x.ndim <= 5 for x in given)
        axes = [0] * len(given)
        if are_tensors and recurrent:
            axes = _axes_of_batch(_exported(who, module, example))
        sizes = {x.shape[axis] for x, axis in zip(given, axes, strict=True)} if are_tensors else {0}
        if len(sizes) != 1 or 0 in sizes:
            shapes = [tuple(getattr(x, "shape", (type(x).__name__,))) for x in given]
            raise ValueError(
                f"{who}: example must be a tensor, or a tuple of tensors of equally many samples, "
                f"of shape (N, C, H, W), (N, C, D, H, W), (N, T, C) or (N, C), got {shapes!s:.100}"
            )
        samples = torch.arange(min(max(*sizes, 2), MAX_SAMPLES)) % sizes.pop()
        given = [x.index_select(a, samples.to(x.device)) for x, a in zip(given, axes, strict=True)]
        for name, part in module.named_modules():
            if hasattr(part, "running_mean") and getattr(part, "momentum", 0) is None:
                raise ValueError(
                    f"{who}: no layer does what batch_norm with momentum=None does ({name})"
                )
        program = _exported(who, module, torch.utils._pytree.tree_unflatten(given, structure))
        program.graph.eliminate_dead_code()
        targets = _targets(program)
        first: dict[int, str] = {}
        tensors, names = {}, {}
        for node in program.graph.nodes:
            if node.name in targets and node.users:
                tensor = attrgetter(targets[node.name])(module)
                buffer = node.name in program.graph_signature.inputs_to_buffers
                if tensor.is_floating_point() and not (buffer and tensor.ndim > 1):
                    names[node.name] = first.setdefault(id(tensor), targets[node.name])
                    tensors[names[node.name]] = tensor
        arrays = {name: _array(tensor.double()) for name, tensor in tensors.items()}
        return cls(who, program, module, tuple(given), tensors, arrays, names, tuple(axes))

    def graph(self, arrays: Mapping[str, np.ndarray]) -> NodeGraph:
        """Return the graph as operators of ONNX, with arrays in place of the module's."""
        leaves = {name for name, part in self.module.named_modules() if not [*part.children()]}
        trained = {name for name, tensor in self.tensors.items() if tensor.requires_grad}
        draft = AtenDraft(leaves, self.arrays, trained, self.module.training)
        targets = _targets(self.program)
        lifted = self.program.graph_signature.inputs_to_lifted_tensor_constants
        inputs: dict[str, OnnxInput] = {}
        places = zip(self.example, self.axes, strict=True)
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                draft.call(node)
            elif node.op == "get_attr":
                draft.values[node] = None  # a part of the graph, which an operator runs
            elif node.op != "placeholder":
                continue
            elif node.name in self.names:
                name = self.names[node.name]
                draft.parameter(node, name, arrays[name])
            elif node.name in targets:
                draft.values[node] = _array(attrgetter(targets[node.name])(self.module))
            elif node.name in lifted:
                draft.values[node] = _array(self.program.constants[lifted[node.name]])
            else:
                x, axis = next(places)
                batch, *sizes = x.movedim(axis, 0).shape
                integer = not x.is_floating_point()
                inputs[node.name] = OnnxInput(tuple(sizes), batch, integer, axis)
                draft.values[node] = node.name
        *_, last = self.program.graph.nodes
        outputs = [draft.output(node) for node in last.args[0]]
        nodes = contributing_nodes(draft.nodes, outputs)
        graph = NodeGraph(inputs, outputs, nodes, draft.constants, OPSET, frozenset(self.arrays))
        graph = with_activations(joined(graph))
        check_operators(graph)
        return graph

    def model(
        self, backend: Backend | str = "cpu", dtype: str = "float64", *, dropout: bool = True
    ) -> Model:
        """Return the model, with the module's weights."""
        try:
            graph = self.graph(self.arrays)
            if not dropout:
                nodes = [
                    replace(n, inputs=(n.inputs[0], NO_RATE)) if n.operator == "Dropout" else n
                    for n in graph.nodes
                ]
                constants = {**graph.constants, NO_RATE: np.zeros(())}
                graph = replace(graph, nodes=nodes, constants=constants)
            return create_model(graph, backend, dtype)
        except ValueError as error:
            raise ValueError(f"{self.who}: {error}") from error

    def freeze(self, model: Model, origins: Mapping[str, Origin]) -> None:
        """Freeze what the module does not train."""
        if frozen := [name for name in model.parameter_names if not origins[name].trained]:
            model.freeze(*frozen)


def _exported(who: str, module: Any, example: tuple[Any, ...]) -> Any:
    import torch

    try:
        return torch.export.export(module, example)
    except Exception as error:  # of any type: it runs the module
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(f"{who}: torch.export cannot export the module ({reason})") from error


def _axes_of_batch(program: Any) -> list[int]:
    """Return the axis of the batch in each input: that of states and of steps may be the second."""
    calls = [bound(node) for node in program.graph.nodes if name_of(node) in ("gru", "lstm")]
    turned = [x for call in calls for x in listed(call["hx"])]
    turned += [call["input"] for call in calls if not call["batch_first"]]
    names = {x.name for x in turned}
    return [int(name in names) for name in program.graph_signature.user_inputs]


def _array(tensor: Any) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def _targets(program: Any) -> dict[str, str]:
    """Return the names in the module of parameters and buffers, by those of the graph."""
    signature = program.graph_signature
    return {**signature.inputs_to_parameters, **signature.inputs_to_buffers}


# -- parameters


class Origin(NamedTuple):
    """Where the elements of an array of a model come from.

    Attributes
    ----------
    numbers : ndarray
        For each element, `FIRST` plus its place among those of all arrays of the module.
    parameters : frozenset of str
        Names of these arrays; none for constants.
    trained : bool
        Whether they require gradients.
    """

    numbers: np.ndarray
    parameters: frozenset[str]
    trained: bool

    @property
    def places(self) -> np.ndarray:
        """Places of the elements among those of all arrays of the module."""
        return self.numbers.reshape(-1).astype(np.int64) - FIRST


def find_origins(traced: Traced) -> dict[str, Origin]:
    """Return the origin of each array of the model of a module.

    The network is read with a number for each element of the parameters, and the numbers are found
    in its arrays.

    Raises
    ------
    ValueError
        If the module computes with a parameter, or reads one twice where no layer shares it.
    """
    starts = np.cumsum([FIRST, *(array.size for array in traced.arrays.values())])
    numbers = {
        name: np.arange(start, start + array.size, dtype="float64").reshape(array.shape)
        for start, (name, array) in zip(starts.tolist(), traced.arrays.items(), strict=False)
    }
    try:
        graph = traced.graph(numbers)
        net = NodeNetwork(graph)
        shapes = [entry.shape for entry in graph.inputs.values()]
        built = Graph(shapes, backend=create_backend("cpu"), dtype="float64")
        built.add(net, *built.inputs)
        readers = np.zeros(starts[-1] - FIRST, np.int64)  # a number for each element that is read
        count, origins = 0, {}
        for name, array in net.arrays.items():
            origins[name] = origin = _origin(traced, name, array, starts)
            if origin.parameters:
                places, before, count = origin.places, count, count + array.size
                marks = np.arange(before + 1, count + 1)
                again = readers[places].any()
                readers[places] = marks
                if again or (readers[places] != marks).any():
                    raise ValueError(
                        f"{_listed(origin.parameters)} must be read once, or be the matrix of "
                        "tokens and that of their logits"
                    )
        for name, start, stop in zip(traced.arrays, starts, starts[1:], strict=False):
            if not readers[start - FIRST : stop - FIRST].any():  # of positions, the first are read
                raise ValueError(f"{name} must be an array of a layer, not computed with")
    except ValueError as error:
        raise ValueError(f"{traced.who}: {error}") from error
    return origins


def _origin(traced: Traced, name: str, array: np.ndarray, starts: np.ndarray) -> Origin:
    flat = array.reshape(-1)
    known = (flat >= FIRST) & (flat < starts[-1]) & (flat == np.floor(flat))
    if not known.any():
        return Origin(array, frozenset(), False)
    names = [*traced.arrays]
    places = np.unique(np.searchsorted(starts, flat[known], "right") - 1)
    parameters = frozenset(names[place] for place in places)
    if not known.all():
        raise ValueError(f"{_listed(parameters)} must be an array of a layer, not computed with")
    trained = {bool(traced.tensors[parameter].requires_grad) for parameter in parameters}
    if len(trained) > 1:
        raise ValueError(
            f"{_listed(parameters)} must all require gradients, or none of them: they are one "
            f"array, {name}"
        )
    return Origin(array, parameters, trained.pop())


def _listed(names: frozenset[str]) -> str:
    return " and ".join(sorted(names)[:4])


# -- comparison


def _verify(traced: Traced, origins: Mapping[str, Origin]) -> None:
    """Compare a model in float64 with the module; ValueError if they differ."""
    import torch

    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(x.shape, generator=generator, dtype=torch.float64)
        if x.is_floating_point()
        else x
        for x in traced.example
    ]
    model = traced.model(dropout=False)
    traced.freeze(model, origins)
    turned = [x.double().movedim(a, 0) for x, a in zip(inputs, traced.axes, strict=True)]
    xs = tuple(channels_last(x.numpy()) for x in turned)
    for training in (False, True):
        theirs, arrays = run_in_double(
            traced.program, traced.tensors, traced.names, inputs, training
        )
        context = StepContext(training=training, samples=np.arange(len(xs[0])))
        model.statistics.begin_step()
        y, _ = model.forward(xs if len(xs) > 1 else xs[0], context, keep=False)
        ours = y if isinstance(y, tuple) else (y,)
        mode = "training" if training else "evaluation"
        for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            what = f"output {place} in {mode}"
            _compare(traced.who, what, np.asarray(a), like(a, b), TOLERANCES[mode])
    model.statistics.fold()
    state = model.state()
    flat = np.concatenate([np.zeros(0), *(arrays[name].reshape(-1) for name in traced.arrays)])
    for name, origin in origins.items():
        if name.rpartition(".")[2] in RUNNING:
            expected_values = flat[origin.places].reshape(origin.numbers.shape)
            _compare(
                traced.who, f"{name} after a step", state[name], expected_values, TOLERANCES[mode]
            )


def _compare(who: str, what: str, a: np.ndarray, b: np.ndarray, tolerance: float) -> None:
    scale = float(np.abs(b).max(initial=1e-6))
    if a.shape != b.shape or not np.allclose(a, b, tolerance, tolerance * scale, equal_nan=True):
        error = f"by {np.abs(a - b).max():.3g} of {scale:.3g}" if a.shape == b.shape else "in shape"
        raise ValueError(
            f"{who}: {what} differs {error} from the module's; the model is wrong, please report "
            "the module"
        )
