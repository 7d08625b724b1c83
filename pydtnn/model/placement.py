"""The flat arrays of a model's parameters: trainable ones in buckets, and frozen ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pydtnn.kernels.dtypes import arithmetic
from pydtnn.kernels.number_format import Rounding
from pydtnn.layers.parameters import Bucket, Parameter, ParameterBuffer
from pydtnn.layers.statistics import Statistic
from pydtnn.model.description import Parameters
from pydtnn.model.graph import Graph


class FlatArrays(NamedTuple):
    """The flat arrays of a model, and its parameters in the order backward completes them."""

    buffers: tuple[ParameterBuffer, ...]
    frozen: tuple[ParameterBuffer, ...]
    buckets: tuple[Bucket, ...]
    parameters: dict[str, Parameter]


def place_parameters(
    graph: Graph, bucket_bytes: Sequence[int], rounding: Rounding | None
) -> FlatArrays:
    """Allocate the flat arrays of all parameters, without values.

    Parameters
    ----------
    graph : Graph
    bucket_bytes : sequence of int
        Lengths of buckets, see `ParameterBuffer`.
    rounding : Rounding, optional
        Of the copies of weights that layers multiply by.
    """
    ready = completed(graph)
    options: dict[str, Any] = {"dtype": arithmetic(graph.dtype), "working": graph.dtype}
    options["rounding"] = rounding
    buffers: list[ParameterBuffer] = []
    # the largest of a node last, so that its small ones are in the same bucket
    trained = sorted((one for one in ready if not one[0].frozen), key=lambda p: (-p[1], p[0].size))
    part = {node.index: i for i, part in enumerate(graph.parts) for node in part.layers}
    for kind in dict.fromkeys((part[node], _kind(p)) for p, node in trained):
        buffers.append(
            ParameterBuffer(
                [(p, node) for p, node in trained if (part[node], _kind(p)) == kind],
                backend=graph.backend,
                bucket_bytes=bucket_bytes,
                first_index=sum(len(b.buckets) for b in buffers),
                **options,
            )
        )
    constant = [(p, node) for p, node in ready if p.frozen]
    if constant:  # layers that are trained in part write the gradients of the rest, too
        options["gradients"] = any(node in graph.trained for _, node in constant)
    frozen = [ParameterBuffer(constant, backend=graph.backend, **options)] if constant else []
    buckets = (bucket for buffer in buffers for bucket in buffer.buckets)
    return FlatArrays(
        tuple(buffers),
        tuple(frozen),
        tuple(sorted(buckets, key=lambda b: -b.ready_at)),
        Parameters({p.name: p for p, _ in ready}),
    )


def _kind(parameter: Parameter) -> tuple[str, tuple[str, ...]]:
    """Return what the parameters of a buffer have in common: reduction group and axes of parts.

    Whole parameters are then at the same positions on all ranks, and are summed in the same order.
    """
    return parameter.group, () if parameter.part is None else parameter.part.axes


def completed(graph: Graph) -> list[tuple[Parameter, int]]:
    """Return the parameters in the order backward completes them, each with the node that does."""
    ready: dict[Parameter, int] = {}
    for node in reversed(graph.nodes):
        for p in node.layer.parameters:
            ready.pop(p.source, None)  # completed by the first layer that uses it
            ready[p.source] = node.index
    return list(ready.items())


def freeze_statistics(statistics: Iterable[Statistic], parameters: Iterable[Parameter]) -> None:
    """Make running statistics constant if all parameters of their layer are."""
    frozen: dict[str, bool] = {}
    for p in parameters:
        layer = p.name.rpartition(".")[0]
        frozen[layer] = frozen.get(layer, True) and p.frozen
    for s in statistics:
        s.frozen = frozen.get(s.name, False)
