"""Training passes that are recorded once as a list of calls of kernels, and then repeated.

The loops (`pydtnn.model.execution`) run a pass of each shape first, and are recorded the second
time: the kernels with their arrays, the layers with their names, and buckets that are complete. A
repetition gives the calls its inputs instead of those of the recording, reserves the memory of the
other arrays, and makes the calls, without Python's work on layers. It computes the same bytes.

What is recorded is forgotten when the epoch, an attribute of a layer, the parameters' arrays or the
wrappers of kernels change. Whatever cannot be repeated is run by the loops: `Replays.why_not` is
the reason.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pydtnn.kernels.dtypes import arithmetic
from pydtnn.kernels.recorded import Call, KernelRecorder, MovedInput
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Layer, LayerType, Saved, StepContext
from pydtnn.layers.parameters import Bucket
from pydtnn.model.execution import Communicate
from pydtnn.model.graph import Node
from pydtnn.model.model import Model
from pydtnn.utils.observer import Kind, Observer, combine

_recording = threading.Lock()  # the wrappers of kernels are those of one thread


@dataclass
class Calls(Observer):
    """The calls of a pass; an observer, to be given the layers while it is recorded.

    Attributes
    ----------
    plain, reported : list of Call
        Without and with those that report the layers to an observer.
    inputs : list of MovedInput
        Where a repetition is given arrays.
    outputs : tuple of Array
        What it returns.
    """

    plain: list[Call] = field(default_factory=list)
    reported: list[Call] = field(default_factory=list)
    inputs: list[MovedInput] = field(default_factory=list)
    outputs: tuple[Array | None, ...] = ()
    observer: Observer | None = None
    on_ready: Callable[[Bucket, int], None] | None = None
    after_node: Callable[[Node], None] | None = None

    def add(self, call: Call) -> None:
        """Record a call."""
        self.plain.append(call)
        self.reported.append(call)

    def begin(self, kind: Kind, name: str, *, nbytes: int = 0, bucket: int = -1) -> None:
        """Record that a layer begins."""
        self.reported.append((self._begin, (kind, name), {}))

    def end(self) -> None:
        """Record that it ends."""
        self.reported.append((self._end, (), {}))

    def _begin(self, kind: Kind, name: str) -> None:
        assert self.observer is not None
        self.observer.begin(kind, name)

    def _end(self) -> None:
        assert self.observer is not None
        self.observer.end()

    def ready(self, bucket: Bucket, shard: int) -> None:
        """Report a bucket in this pass, and record that."""
        self.add((self._ready, (bucket, shard), {}))
        self._ready(bucket, shard)

    def _ready(self, bucket: Bucket, shard: int) -> None:
        if self.on_ready is not None:
            self.on_ready(bucket, shard)

    def after(self, node: Node) -> None:
        """Call what follows a node in this pass, and record that."""
        self.add((self._after, (node,), {}))
        self._after(node)

    def _after(self, node: Node) -> None:
        if self.after_node is not None:
            self.after_node(node)

    def take(self, values: Sequence[Array], memory: Any) -> None:
        """Give the calls the inputs of a repetition, by aliases of a pool."""
        for given, value in zip(self.inputs, values, strict=True):
            higher = value.ctypes.data - given.start
            for alias in given.aliases:
                memory.move(alias, higher)
            given.start += higher

    def repeat(self, observer: Observer | None) -> None:
        """Make the calls."""
        self.observer = observer
        for function, args, options in self.plain if observer is None else self.reported:
            function(*args, **options)

    def result(self) -> Any:
        """Return copies of the results: an array, or several."""
        results = tuple(None if y is None else y.copy() for y in self.outputs)
        return results if len(results) > 1 else results[0]


@dataclass
class PassRecording:
    """A forward and a backward pass of a shape.

    Attributes
    ----------
    recorder : Recorder
    forward, backward : Calls
    spans : list of (int, int)
        The memory of arrays, the first and last address of each part.
    """

    recorder: KernelRecorder
    forward: Calls
    backward: Calls = field(default_factory=Calls)
    spans: list[tuple[int, int]] = field(default_factory=list)


class Replays:
    """The training passes of a model, one shard after the other.

    Parameters
    ----------
    model : Model

    Attributes
    ----------
    why_not : str
        Why passes are not repeated; empty if they are, or nothing speaks against it so far.
    repeated : int
        Forward passes that were repetitions.
    """

    def __init__(self, model: Model) -> None:
        self.model, self.backend = model, model.backend
        self._wide = arithmetic(model.dtype)
        self.why_not = _why_not(model)
        self.repeated = 0
        self._seen: set[Any] = set()  # shapes that the loops have run
        self._recordings: dict[Any, PassRecording] = {}
        self._state: tuple[Any, ...] = ()
        self._current: PassRecording | None = None  # whose backward pass is to come
        self._recorded = False  # whether it is recorded now
        self._inputs: Sequence[Array] = ()  # of its forward pass
        self._claimed: list[int] = []
        self._accumulates = False  # whether backward adds to gradients of the same step

    def forward_shards(
        self,
        xs: Sequence[Any],
        contexts: Sequence[StepContext],
        *,
        communicate: Communicate,
        joint: bool,
    ) -> list[Any]:
        """Run a forward pass: see `Model.forward_shards`."""
        if len(xs) == 1 and not joint:
            result = self._forward(xs[0], contexts[0], accumulate=self._accumulates)
            if result is not None:
                return [result]
        return self.model.forward_shards(xs, contexts, communicate=communicate, joint=joint)

    def backward_shards(
        self,
        dys: Sequence[Any],
        residuals: Sequence[list[Saved]],
        *,
        accumulate: bool,
        slots: Sequence[int] | None,
        on_ready: Callable[[Bucket, int], None] | None,
        after_node: Callable[[Node], None] | None,
        shared: bool,
        **options: Any,
    ) -> list[Any]:
        """Run the backward pass: see `Model.backward_shards`."""
        common: dict[str, Any] = {
            "on_ready": on_ready,
            "after_node": after_node,
            "accumulate": accumulate,
            "shared": shared,
        }
        self._accumulates = True
        if self._current is not None:
            return self._backward(dys[0], residuals[0], **common)
        return self.model.backward_shards(dys, residuals, slots=slots, **common, **options)

    def end_step(self) -> None:
        """Release memory that an error has left reserved; the next gradients are new."""
        self.finish()
        self._accumulates = False

    def _forward(
        self, x: Array | tuple[Array, ...], context: StepContext, *, accumulate: bool
    ) -> tuple[Any, list[Saved]] | None:
        """Run the forward pass of a shard; return None if the loops must.

        `accumulate` is whether backward will add to the gradients.
        """
        self.finish()
        model, given = self.model, (x if isinstance(x, tuple) else (x,))
        self._forget_if_changed(context)
        if self.why_not or model.graph.hooks or context.samples is None:
            return None
        inputs = (*self._as_kernels_require(given), np.require(context.samples, None, ("C", "A")))
        key = accumulate, *((a.shape, a.dtype) for a in inputs)
        recording = self._recordings.get(key)
        if recording is not None and self._claim(recording):
            self._current, self._inputs = recording, inputs
            recording.forward.take(inputs, self.backend.memory)
            model.refresh()
            self.repeated += 1
            with self.backend.recycling():
                recording.forward.repeat(model.observer)
            return recording.forward.result(), []
        if recording is not None or key not in self._seen or not _recording.acquire(blocking=False):
            self._seen.add(key)
            return None
        self._recorded = True
        calls = Calls()
        recorder = KernelRecorder(self.backend, calls.add)
        self._inputs, calls.inputs = recorder.inputs(inputs)
        *own, samples = self._inputs
        self._current = PassRecording(recorder, calls)
        with self._watched(calls), recorder.recording():
            ((y, saved),) = model.forward_shards([tuple(own)], [replace(context, samples=samples)])
        ys = y if isinstance(y, tuple) else (y,)
        calls.outputs = tuple(map(recorder.fixed, ys))
        self._recordings[key] = self._current
        return calls.result(), saved

    def _backward(
        self,
        dy: Array | tuple[Array, ...],
        residuals: list[Saved],
        *,
        on_ready: Callable[[Bucket, int], None] | None,
        after_node: Callable[[Node], None] | None,
        accumulate: bool,
        shared: bool,
    ) -> list[Any]:
        """Run the backward pass after `_forward`."""
        recording, self._current = self._current, None
        assert recording is not None
        calls = recording.backward
        dys = self._as_kernels_require(dy if isinstance(dy, tuple) else (dy,))
        calls.on_ready, calls.after_node = on_ready, after_node
        if not self._recorded:
            calls.take(dys, self.backend.memory)
            with self.backend.recycling():
                calls.repeat(self.model.observer)
            dxs = calls.result()
            self.finish()
            return [dxs]
        recorder = recording.recorder
        recorder.record = calls.add
        own, calls.inputs = recorder.inputs(dys)
        with self._watched(calls), recorder.recording():
            (dx,) = self.model.backward_shards(
                [tuple(own)],
                [residuals],
                on_ready=recorder.outside(calls.ready),
                after_node=recorder.outside(calls.after),
                accumulate=accumulate,
                shared=shared,
            )
        calls.outputs = tuple(map(recorder.fixed, dx if isinstance(dx, tuple) else (dx,)))
        result = calls.result()
        del dx
        recording.spans, self.why_not = recorder.spans(), recorder.why_not
        self.finish()
        return [result]

    def _as_kernels_require(self, arrays: Sequence[Array]) -> list[Array]:
        """Return arrays aligned, in C order and of a type that kernels convert, if of another."""
        own = self.model.dtype
        kinds = [array.dtype if array.dtype == self._wide else own for array in arrays]
        return [np.require(a, kind, ("C", "A")) for a, kind in zip(arrays, kinds, strict=True)]

    def forget(self) -> None:
        """Record again: kernels may have been replaced."""
        self._recordings.clear()

    def finish(self) -> None:
        """Release the memory of a pass, and end a recording."""
        while self._claimed:
            self.backend.memory.release(self._claimed.pop())
        if self._recorded:
            self._recorded = False
            _recording.release()
        self._inputs = ()
        for recording in self._recordings.values():  # functions that refer to the batch
            recording.backward.on_ready = recording.backward.after_node = None
        if self._current is not None:  # without a backward pass
            self._recordings.clear()
            self._current = None

    def _claim(self, recording: PassRecording) -> bool:
        for first, last in recording.spans:
            if not self.backend.memory.claim(first, last):
                self.finish()
                return False
            self._claimed.append(first)
        return True

    def _forget_if_changed(self, context: StepContext) -> None:
        model, kernels = self.model, self.backend.conv.forward  # if they are wrapped
        context, places = replace(context, samples=None), [b.places for b in model.buffers]
        state = context, LayerType.assignments, model.buffers, places, model.segments, kernels
        if state != self._state:
            self._recordings.clear()
            self._state = state
            self.why_not = self.why_not or _why_not(model)

    @contextmanager
    def _watched(self, calls: Calls) -> Iterator[None]:
        """Context in which the layers that run are recorded too."""
        before = self.model.observer
        self.model.observer = combine([calls, *filter(None, [before])])
        try:
            yield
        finally:
            self.model.observer = before


def _why_not(model: Model) -> str:
    """Return the reason why no pass of a model can be repeated."""
    if not hasattr(model.backend.memory, "claim"):
        return f"the backend {model.backend.name} has no pool of memory on the host"
    if model.mesh is not None or model.pipeline is not None:
        return "the network is distributed over ranks"
    if model.penalised or model.graph.hooks:
        return "layers add losses or round at random"
    for layer in model.layers:
        if not layer.can_replay():
            return (
                f'{layer.name}: {type(layer).__name__} does not declare that it supports "replay"'
            )
        if _is_patched(layer):
            return f"{layer.name}: a pass of {type(layer).__name__} was replaced"
    return ""


def _is_patched(layer: Layer) -> bool:
    """Return whether a pass is not one of the layer's class or of the library."""
    known = "pydtnn", type(layer).__module__.partition(".")[0]
    passes = (layer.forward, layer.backward)
    return any(getattr(one, "__module__", "").partition(".")[0] not in known for one in passes)
