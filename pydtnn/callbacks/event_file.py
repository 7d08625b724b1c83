"""Event files of TensorBoard: curves, histograms, the graph of layers, hyper-parameters.

An event file is a sequence of records with checksums, each a protocol buffer; tensorboardX has both
formats. Its `SummaryWriter` is not used, as it writes in a thread whose errors are lost.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.model import Model
from pydtnn.utils.files import unwritable
from pydtnn.utils.optional import import_optional

WHO = "TensorBoard"

BINS = 64
"""Bins of a histogram."""

SCALARS = (bool, int, float, str)
"""Types of hyper-parameters that TensorBoard compares; others are written as JSON."""


def require_package() -> None:
    """Raise ImportError if tensorboardX is missing."""
    _module("summary")


def _module(name: str) -> Any:
    return import_optional(f"tensorboardX.{name}", "tensorboardX", WHO)


class EventFile:
    """A new event file in a folder.

    Parameters
    ----------
    directory : Path
        Created if necessary.
    step : int
        Steps of training so far: values that other files of the folder have of later steps, written
        before training was continued from an earlier checkpoint, are not shown.

    Raises
    ------
    OSError
        If it cannot be written, like all methods.
    """

    def __init__(self, directory: Path, step: int) -> None:
        self.directory = directory
        self._summary = _module("summary")
        self._messages = _module("proto.event_pb2")
        writer = _module("event_file_writer").EventsWriter
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._writer = writer(str(directory / "events"), f".{step}")
        except OSError as error:
            raise unwritable(WHO, directory, error) from error
        start = self._messages.SessionLog(status=self._messages.SessionLog.START)
        self._write(step + 1, session_log=start)

    def _write(self, step: int, **content: Any) -> None:
        event = self._messages.Event(wall_time=time.time(), step=step, **content)
        try:
            self._writer.write_event(event)
        except OSError as error:
            raise unwritable(WHO, self.directory, error) from error

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one point of each curve."""
        for name, value in values.items():
            self._write(step, summary=self._summary.scalar(name, float(value)))

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        """Write a histogram of the finite elements of an array, if there are any."""
        finite = values[np.isfinite(values)]
        if len(finite):
            self._write(step, summary=self._summary.histogram(name, finite, BINS))

    def graph(self, model: Model) -> None:
        """Write the layers of a model and their connections."""
        self._write(0, graph_def=_graph_of(model).SerializeToString())

    def hyper_parameters(self, values: Mapping[str, Any], results: Mapping[str, float]) -> None:
        """Write hyper-parameters, and the names of the curves that are compared with them."""
        plain = {
            name: value if isinstance(value, SCALARS) else json.dumps(value, default=str)
            for name, value in values.items()
            if value is not None
        }
        for part in self._summary.hparams(plain, {**results}):
            self._write(0, summary=part)

    def flush(self) -> None:
        """Write what is buffered."""
        try:
            self._writer.flush()
        except OSError as error:
            raise unwritable(WHO, self.directory, error) from error

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _graph_of(model: Model) -> Any:
    """Return the graph of a model as TensorFlow's GraphDef: a node per layer, blocks as scopes."""
    graph, node_def = _module("proto.graph_pb2"), _module("proto.node_def_pb2")
    attributes, shapes = _module("proto.attr_value_pb2"), _module("proto.tensor_shape_pb2")
    versions = _module("proto.versions_pb2")

    def shape(sizes: tuple[int, ...]) -> Any:
        dims = [shapes.TensorShapeProto.Dim(size=size) for size in (-1, *sizes)]  # -1: the batch
        listed = attributes.AttrValue.ListValue(shape=[shapes.TensorShapeProto(dim=dims)])
        return attributes.AttrValue(list=listed)

    def text(value: str) -> Any:
        return attributes.AttrValue(s=value.encode())

    nodes = []
    for node in model.graph.nodes:
        about = {"_output_shapes": shape(node.shape), "layer": text(repr(node.layer))}
        if count := sum(p.size for p in node.layer.parameters):
            about["parameters"] = text(str(count))
        nodes.append(
            node_def.NodeDef(
                name=_scoped(node.name),
                op="Input" if node in model.graph.inputs else type(node.layer).__name__,
                input=[_scoped(source.name) for source in node.inputs],
                attr=about,
            )
        )
    return graph.GraphDef(node=nodes, versions=versions.VersionDef(producer=22))


def _scoped(name: str) -> str:
    """Return a dotted name as TensorBoard's, in which blocks are groups.

    >>> _scoped("stage1.residual0.conv2d0")
    'stage1/residual0/conv2d0'
    """
    return name.replace(".", "/")
