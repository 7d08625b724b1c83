"""A network on a device: parameters in flat arrays, one forward loop and one backward loop."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pydtnn.kernels import Backend, create_backend, recycled
from pydtnn.kernels.dtypes import name_of
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Saved, Shape, StepContext
from pydtnn.layers.blocks import Net
from pydtnn.layers.conv import Conv2d
from pydtnn.layers.fused_norm import NormAddReLU
from pydtnn.layers.node import Node, nodes
from pydtnn.layers.parameters import DEFAULT_BUCKET_BYTES, Bucket, Parameter, ParameterBuffer
from pydtnn.layers.statistics import RUNNING, RunningStatistics
from pydtnn.model.copying import rebuild_model, take_apart
from pydtnn.model.description import Layers, describe
from pydtnn.model.execution import (
    Communicate,
    backward_loop,
    backward_node,
    forward_loop,
    forward_node,
    run_together,
)
from pydtnn.model.formats import Formats, Rounder, read_formats
from pydtnn.model.full_arrays import FullArrays
from pydtnn.model.fusion import fuse as fuse_graph
from pydtnn.model.graph import Graph, layers_ahead, shapes_of
from pydtnn.model.halves import FirstHalf, SecondHalf, second_half, suffix
from pydtnn.model.load_report import LoadReport, checksum
from pydtnn.model.partition.exchange import Exchange
from pydtnn.model.parts import GraphPart
from pydtnn.model.passes import BucketReporter, Reports, compose
from pydtnn.model.pieces import Piece, part_piece
from pydtnn.model.pipeline.schedules import Schedule, find, placement
from pydtnn.model.placement import freeze_statistics, place_parameters
from pydtnn.model.prediction import Predictor
from pydtnn.model.recompute import DroppedSegment, Dropping, Restoring, cut
from pydtnn.model.recompute_choice import Recompute, check_recompute, find_cuts
from pydtnn.model.stage import Pipeline, create_pipeline
from pydtnn.model.summary import represent_model, summarize
from pydtnn.utils.arguments import StoresArguments
from pydtnn.utils.names import NotCallable, select
from pydtnn.utils.observer import Observer
from pydtnn.utils.validate import check_int

if TYPE_CHECKING:
    from pydtnn.layers.communicating import MeshLike
    from pydtnn.model.partition.plan import Plan


def example_inputs(model: Model, batch: int, rng: np.random.Generator) -> tuple[Array, ...]:
    """Return random samples for each input of a model, see `example_input`.

    Those of inputs that are read by other stages of a pipeline only are any numbers.
    """
    nodes = dict(enumerate(model.graph.inputs))
    if model.pipeline is not None:
        parts = zip(model.pipeline.stages, model.graph.parts, strict=True)
        nodes = {i: n for own, part in parts for i, n in zip(own.reads, part.inputs, strict=False)}
    return tuple(
        example_input(nodes[i], shape, batch, rng)
        if i in nodes
        else rng.standard_normal((batch, *shape), np.float32)
        for i, shape in enumerate(model.input_shapes)
    )


def example_input(node: Node, shape: Shape, batch: int, rng: np.random.Generator) -> Array:
    """Return random samples for an input of a network, on the host.

    Parameters
    ----------
    node : Node
        Of the input.
    shape : tuple of int
        Of one sample.
    batch : int
    rng : numpy.random.Generator

    Returns
    -------
    Array of float32, shape (batch, *shape)
        As the first layer that reads the input requires them, see `Layer.example`.
    """
    first = node.consumers[0] if node.consumers else node
    while isinstance(first.layer, Exchange) and first.consumers:  # whose samples are divided
        first = first.consumers[0]
    return first.layer.example((batch, *shape), rng)


COLOURS = (1, 3, 4)
"""Numbers of channels of images."""

MIN_IMAGE_HEIGHT = 24
"""Height of the smallest usual images, in pixels: smaller shapes may be feature maps."""


def warn_of_channels_first(inputs: Sequence[Node]) -> None:
    """Warn if a convolution reads an input of shape (C, H, W), as other libraries store images.

    That is, one whose first axis is a number of colours, followed by two equal ones of the size of
    an image.
    """
    for node in inputs:
        if len(node.shape) != 3 or not any(isinstance(n.layer, Conv2d) for n in node.consumers):
            continue
        c, h, w = node.shape
        if c in COLOURS and h == w >= MIN_IMAGE_HEIGHT:
            warnings.warn(
                f"Model: input_shape {node.shape} means an image of {c} x {h} pixels and {w} "
                f"channels; if it has {c} channels, use {(h, w, c)}, and "
                "ArrayDataset(x, y, channels_first=True) for arrays (n, C, H, W)",
                stacklevel=3,
            )


class Model(NotCallable, StoresArguments, Predictor):
    """A network built for an input shape, a backend and a dtype.

    Parameters
    ----------
    net : Layer or Block
        Usually a `Sequential`.
    input_shape : tuple of int, or tuple of such tuples
        Shape of one sample, ``(H, W, C)`` for images; one shape per input if there are several.
    backend : Backend or str
    dtype : str
        "float32", "float64", "bfloat16" or "float16": of activations and their gradients. With 16
        bits, matrices are multiplied by 16-bit copies of the weights; parameters, their gradients
        and the model's outputs are float32. A "cpu" backend has compiled kernels for bfloat16; for
        float16 it uses the slow reference.
    seed : int
        Seed of the initial weights, which are a function of it and of each parameter's name.
    bucket_bytes : int, optional
        Size of the messages in which gradients are exchanged. By default 1 MiB, unless a trainer
        with ranks on several hosts selects another (`choose_buckets`).
    input_gradient : bool
        Whether `backward` computes the gradient of the model's inputs too.
    fuse : bool
        Whether batch norms, additions and ReLUs are fused into convolutions
        (`pydtnn.model.fusion`); results are equal within rounding.
    plan : Plan, mapping or str, optional
        How the network is cut over the ranks of the mesh: see `Plan` and docs/parallelism.md. By
        default each axis of the mesh is used for the strategy of its name.
    mesh : Mesh, optional
        The ranks. Each constructs the model, with its part of the parameters; all ranks at the same
        position of the axis "data" pass the same samples, and receive the same outputs.
    pipeline_schedule : Schedule or str
        The schedule of a pipeline, see `pydtnn.Trainer`: its actions determine the stages of each
        rank along the axis "pipeline".
    recompute : int, str or sequence of str, optional
        Which values forward drops and backward computes again, with the same bytes: all but those
        at the borders of this number of parts; those between layers or blocks of these names; or
        "auto", the choice with the least memory, or with the least computation if there is a
        `memory_limit`. See docs/parallelism.md.
    memory_limit : int, optional
        With "auto": B by which the process may grow, as predicted by `summary`. `Trainer.fit`
        chooses for its batch size; other loops call `choose_segments`.
    formats : Formats or str, optional
        Formats of fewer bits to which activations, weights, gradients and the state of the
        optimizer are rounded, in a float32 model: see `Formats` and docs/formats.md.

    Attributes
    ----------
    graph : Graph
    output_shapes : tuple of tuple of int
        Of the outputs of one sample.
    parameters : dict of str to Parameter
    buffers : tuple of ParameterBuffer
        The flat arrays of trainable parameters, one set per reduction group.
    frozen_buffers : tuple of ParameterBuffer
        Those of frozen parameters; another tuple after `freeze` and `thaw`, like `buffers`.
    buckets : tuple of Bucket
        In the order in which backward completes them.
    statistics : RunningStatistics
    pipeline : Pipeline or None
        The stages of this rank, if the mesh has an axis "pipeline".
    schedule : Schedule
        The order of micro-batches in its stages.
    description : Description
        The layers as they were constructed, before fusion.
    inputs : Inputs or None
        The samples on which the model was trained: their normalisation and range, and the names of
        the classes. Set by `Trainer.fit` and `pydtnn.load`; None if they are not known.
    loaded : str or None
        Checksum of all arrays after the last `load`, which ranks compare; None once they train
        together.
    given : dict of str to ndarray
        If ranks have parts of parameters, the whole arrays of the last `load`, until ranks train
        together.
    cut_outputs : bool
        Whether outputs that ranks have cut by channels or positions remain so in training
        (`StepContext.cut_outputs`); set by a trainer whose losses and metrics take parts of them.
    looks_ahead : tuple of str
        For each input the first layer, on any rank, by which outputs depend on its later positions;
        empty if none is known.
    penalised : bool
        Whether a layer of the network, on any rank, adds a loss in training
        (`StepContext.penalties`).
    observer : Observer or None
        Receives the forward and backward pass of each layer; set by a trainer with observers.
    """

    cut_outputs = False
    observer: Observer | None = None
    graph: Graph
    pipeline: Pipeline | None
    buffers: tuple[ParameterBuffer, ...]
    formats: Formats | None

    def __init__(
        self,
        net: Net,
        input_shape: Shape | Sequence[Shape],
        *,
        backend: Backend | str = "cpu",
        dtype: str = "float32",
        seed: int = 0,
        bucket_bytes: int | None = None,
        input_gradient: bool = False,
        fuse: bool = True,
        plan: Plan | Mapping[str, Any] | str | None = None,
        mesh: MeshLike | None = None,
        pipeline_schedule: str | Schedule = "1f1b",
        recompute: Recompute = None,
        memory_limit: int | None = None,
        formats: Formats | str | None = None,
    ) -> None:
        dtype = name_of(dtype)
        self.backend = create_backend(backend) if isinstance(backend, str) else backend
        self.dtype = np.dtype(dtype)
        self.seed = check_int("Model", "seed", seed, at_least=0)
        if bucket_bytes is not None:
            bucket_bytes = check_int("Model", "bucket_bytes", bucket_bytes, at_least=1)
        self._buckets_fixed = bucket_bytes is not None
        self._frozen_elsewhere: frozenset[str] = frozenset()
        self.input_shapes = shapes_of(input_shape)
        self.graph = Graph(self.input_shapes, backend=self.backend, dtype=dtype)
        self.formats = read_formats(formats, self.dtype, self.backend.name)
        outputs = nodes(self.graph.add(net, *self.graph.inputs))
        if self.formats is not None:
            rounder = Rounder(self.formats, self.graph.nodes)
            self.graph.hooks.append(rounder)
            fuse = fuse and not self.formats.products
        warn_of_channels_first(self.graph.inputs)
        self.description = describe(self.graph.inputs, self.graph.nodes, outputs, fused=fuse)
        self.looks_ahead = layers_ahead(self.graph.inputs, self.graph.nodes)
        self.penalised = any("penalties" in node.layer.supports for node in self.graph.nodes)
        self.inputs = None
        self.mesh = mesh
        self.communicate: Communicate | None = None if mesh is None else mesh.communicate
        self.schedule = find(pipeline_schedule)
        cut = None
        if mesh is not None or plan is not None:
            from pydtnn.model.partition.apply import partition  # only here: most of this package

            outputs, cut = partition(
                self.graph,
                outputs,
                plan,
                mesh,
                input_gradient=input_gradient,
                owners=partial(placement, self.schedule),
            )
        self.pipeline = create_pipeline(cut, mesh, self.backend, self.dtype, input_gradient)
        if fuse:
            outputs = fuse_graph(self.graph, outputs)
        parts = () if cut is None else cut.sizes
        if self.formats is not None:
            rounder.choose(self.graph.nodes)
        self.graph.finish(outputs, input_gradient=input_gradient, parts=parts)
        shapes = tuple(node.shape for node in outputs)
        self.output_shapes = shapes if cut is None else cut.output_shapes
        self.parameters: dict[str, Parameter] = {}
        self._place_parameters((bucket_bytes or DEFAULT_BUCKET_BYTES,))
        with self.backend.recycling():
            for p in self.parameters.values() if self.backend.has_values else ():
                p.master[...] = self.backend.asarray(p.initial_value(self.seed), p.buffer.dtype)
        self.refresh()
        self.backend.trim()  # temporary arrays of initial values
        statistics = dict.fromkeys(s for layer in self.layers for s in layer.statistics)
        self.statistics = RunningStatistics(list(statistics), self.backend)
        self.loaded: str | None = None
        self.given: dict[str, np.ndarray] = {}
        self.recompute, self.memory_limit = check_recompute(recompute, memory_limit)
        self.choose_segments()

    @property
    def layers(self) -> Layers:
        """The layers in the order they run, also by name."""
        return Layers(node.layer for node in self.graph.nodes[len(self.graph.inputs) :])

    def forward(
        self,
        x: Array | tuple[Array, ...],
        context: StepContext,
        *,
        keep: bool = True,
        after_node: Callable[[Node, Array], None] | None = None,
    ) -> tuple[Any, list[Saved]]:
        """Run every node in order.

        Parameters
        ----------
        x : Array, shape ``(N, *input_shape)``, or one per input
        context : StepContext
        keep : bool
            Whether to keep the values for backward; if not, every array is freed after its last
            use.
        after_node : callable, optional
            Called with each node and its output.

        Returns
        -------
        y : Array, shape ``(N, *output_shape)``, or a tuple of arrays
            One for each output of the model; float32 for a 16-bit model, as required by losses and
            metrics.
        residuals : list
            The values that `backward` requires.
        """
        if self.pipeline is not None:
            return self.pipeline.forward(self, x, context, keep=keep, after_node=after_node)
        return self.forward_shards([x], [context], keep=keep, after_node=after_node)[0]

    @recycled
    def forward_shards(
        self,
        xs: Sequence[Array | tuple[Array, ...]],
        contexts: Sequence[StepContext],
        *,
        communicate: Communicate | None = None,
        joint: bool = False,
        part: int | None = None,
        keep: bool = True,
        after_node: Callable[[Node, Array], None] | None = None,
        progress: Callable[[], None] | None = None,
    ) -> list[tuple[Any, list[Saved]]]:
        """Run every node in order, for several shards of a batch.

        Parameters
        ----------
        xs, contexts : sequence
            For each shard, see `forward`.
        communicate : callable, optional
            Starts the collectives that layers ask for, one for each shard; by default those of the
            model's mesh.
        joint : bool
            Whether layers that normalise over the batch do so over all shards, which run
            concurrently from one such layer to the next. Otherwise shards run one after the other.
        part : int, optional
            Run only this one of the rank's stages (`Graph.parts`), on its inputs.
        keep, after_node
            See `forward`.
        progress : callable, optional
            Called after each node, to progress messages.

        Returns
        -------
        list
            For each shard, the result of `forward`.
        """
        self.refresh()
        dropping = (Dropping(self.segments),) if keep and self.segments.parts else ()
        late = () if dropping or after_node else self.graph.late
        reports = Reports.to(self.observer, several=len(xs) > 1, late=bool(late))
        hooks = [*self.graph.hooks, *reports, *late, *dropping]
        after: list[Callable[[Node, Any], None]] = []
        if progress:
            after.append(lambda node, values: progress())
        if after_node:
            after.append(lambda node, ys: after_node(node, node.layer.array(ys[node.index])))
        loops = [
            forward_loop(
                self.graph,
                self.graph.part(part),
                self._own(x),
                context,
                compose(forward_node, hooks, "forward"),
                after,
                keep=keep,
                joint=joint,
            )
            for x, context in zip(xs, contexts, strict=True)
        ]
        return run_together(
            loops, communicate or self.communicate, [hook.begin() for hook in hooks]
        )

    def _own(self, x: Array | tuple[Array, ...]) -> tuple[Array, ...]:
        """Return this rank's parts of inputs, of which whole ones may be given."""
        given = x if isinstance(x, tuple) else (x,)
        if self.pipeline is not None or len(given) != len(self.input_shapes):
            return given
        return tuple(
            part[:, *node.part].copy() if node.part and part.shape[1:] == shape else part
            for part, node, shape in zip(given, self.graph.inputs, self.input_shapes, strict=True)
        )

    def backward(
        self,
        dy: Array | tuple[Array, ...],
        residuals: list[Saved],
        *,
        on_ready: Callable[[Bucket, int], None] | None = None,
        after_node: Callable[[Node], None] | None = None,
        accumulate: bool = False,
    ) -> Any:
        """Run every node's backward in reverse order and write gradients to the flat arrays.

        Parameters
        ----------
        dy : Array, or one per output
            Gradient of the loss with respect to the output.
        residuals : list
            The list that `forward` returned; it is emptied during backward, so that memory is freed
            as early as possible.
        on_ready : callable, optional
            Called with each bucket as soon as its gradients are complete, and with the position of
            the shard they are of: 0.
        after_node : callable, optional
            Called after each node, to progress messages.
        accumulate : bool
            Add to the existing gradients instead of overwriting them.

        Returns
        -------
        dx : Array, or one per input
            Gradient of the inputs if the model was built with ``input_gradient=True``, otherwise
            None.

        Raises
        ------
        ValueError
            If several ranks of a pipeline have the same stages: a `Trainer` adds up gradients.
        """
        run = self.backward_shards
        options: dict[str, Any] = {"on_ready": on_ready, "after_node": after_node}
        if self.pipeline is not None:
            if len(self.pipeline.owners.paths) > 1:
                raise ValueError(
                    "Model.backward: several ranks of the pipeline have the same stages, whose "
                    "gradients a Trainer adds up; use one, or a schedule such as 1f1b"
                )
            return self.pipeline.backward(run, dy, residuals, accumulate=accumulate, **options)
        return run([dy], [residuals], accumulate=accumulate, **options)[0]

    @recycled
    def backward_shards(
        self,
        dys: Sequence[Array | tuple[Array, ...]],
        residuals: Sequence[list[Saved]],
        *,
        communicate: Communicate | None = None,
        joint: bool = False,
        part: int | None = None,
        on_ready: Callable[[Bucket, int], None] | None = None,
        after_node: Callable[[Node], None] | None = None,
        accumulate: bool = False,
        slots: Sequence[int] | None = None,
        inputs_only: bool = False,
        shared: bool = False,
    ) -> list[Any]:
        """Run every node's backward in reverse, for several shards of a batch.

        Parameters
        ----------
        dys, residuals : sequence
            For each shard, see `backward`.
        communicate, joint, part
            See `forward_shards`.
        on_ready, after_node
            See `backward`.
        accumulate : bool
            Add the first shard's gradients to the existing ones; those of other shards are always
            added.
        slots : sequence of int, optional
            Set of gradient arrays (`Bucket.gradients`) for each shard. They are overwritten.
        inputs_only : bool
            Run the first half of layers that have two (`Layer.backward_inputs`). Buckets are not
            reported, and the residuals keep what `backward_parameters` requires.
        shared : bool
            Whether `on_ready` uses the gradients of each bucket up (`share_gradients`): they are
            not kept.

        Returns
        -------
        list
            For each shard, the result of `backward`.
        """
        if not shared:
            self.separate_gradients()

        def before(shard: int) -> None:
            for buffer in self.buffers:
                buffer.accumulate = slots is None and (accumulate or shard > 0)
                buffer.write_to(slots[shard] if slots else 0)

        options = {"suffix": suffix} if inputs_only else {}
        reports = Reports.to(self.observer, several=len(dys) > 1, **options)
        hooks = [*self.graph.hooks, *reports]
        again = [Restoring(hooks)] if any(DroppedSegment in map(type, r) for r in residuals) else []
        hooks = [*([FirstHalf()] if inputs_only else []), *hooks, *self.graph.late, *again]
        buckets = () if inputs_only else self.buckets_of(part)
        loops = [
            backward_loop(
                self.graph,
                self.graph.part(part),
                dy if isinstance(dy, tuple) else (dy,),
                saved,
                compose(backward_node, hooks, "backward"),
                [BucketReporter(buckets, on_ready, shard).after, *filter(None, [after_node])],
                joint=joint,
            )
            for shard, (dy, saved) in enumerate(zip(dys, residuals, strict=True))
        ]
        try:
            return run_together(
                loops, communicate or self.communicate, [*(hook.begin() for hook in hooks), before]
            )
        finally:
            for buffer in self.buffers:
                buffer.write_to(0)

    @recycled
    def backward_parameters(
        self,
        residuals: list[Saved],
        *,
        part: int | None = None,
        on_ready: Callable[[Bucket, int], None] | None = None,
        after_node: Callable[[Node], None] | None = None,
        accumulate: bool = False,
    ) -> None:
        """Run the second half of layers that have two, after `backward_shards(inputs_only=True)`.

        Parameters
        ----------
        residuals : list
            Of one shard, as the first half has left it; it is emptied.
        part
            See `forward_shards`.
        on_ready, after_node
            See `backward`.
        accumulate : bool
            Add to the existing gradients; a layer in one piece has done so in the first half.
        """
        self.separate_gradients()
        for buffer in self.buffers:
            buffer.accumulate = accumulate
        hooks = [*self.graph.hooks, *Reports.to(self.observer), SecondHalf()]
        run = compose(second_half, hooks, "parameters")
        ready = BucketReporter(self.buckets_of(part), on_ready, 0)
        after = [ready.after, *filter(None, [after_node])]
        layers = GraphPart((), self.graph.part(part).layers, ())
        loop = backward_loop(self.graph, layers, (), residuals, run, after, joint=False)
        run_together([loop], self.communicate, [hook.begin() for hook in hooks])

    def share_gradients(self) -> None:
        """Put gradients into shared memory, for passes that use each bucket up: see `Trainer`.

        Another pass separates them again.
        """
        if all(buffer.shared for buffer in self.buffers):
            return
        begins: dict[str, int] = {}
        for node in reversed(self.graph.nodes):
            for p in node.layer.parameters:
                begins.setdefault(p.name, node.index)
        for buffer in self.buffers:
            buffer.share(begins)
        self.backend.trim()

    def separate_gradients(self) -> None:
        """Give the gradients of each bucket memory of its own again, as they have by default."""
        for buffer in self.buffers:
            buffer.separate()

    def discard_gradients(self) -> None:
        """Set `Parameter.grad` to None until the next pass, as the gradients are used up."""
        for buffer in self.buffers:
            buffer.discard()

    def buckets_of(self, part: int | None) -> tuple[Bucket, ...]:
        """Return the buckets of one of the rank's stages, in order; of all by default."""
        if part is None or len(self.graph.parts) == 1:
            return self.buckets
        own = {node.index for node in self.graph.parts[part].layers}
        return tuple(bucket for bucket in self.buckets if bucket.ready_at in own)

    @property
    def output_nodes(self) -> tuple[Node, ...]:
        """Nodes of the model's outputs; none on ranks that compute other stages."""
        if self.pipeline is not None and not self.pipeline.last:
            return ()
        return self.graph.parts[-1].outputs

    @property
    def unread_outputs(self) -> tuple[bool, ...]:
        """Whether the array of each of `output_nodes` may be overwritten before backward."""
        nodes = self.output_nodes
        return tuple(nodes.count(node) == 1 and _is_unread(node) for node in nodes)

    @recycled
    def _place_parameters(self, bucket_bytes: Sequence[int]) -> None:
        """Allocate flat arrays for all parameters, with the values they have, if any."""
        self._bucket_bytes = bucket_bytes
        values = {name: p.master.copy() for name, p in self.parameters.items()}
        rounding = None if self.formats is None else self.formats.weights
        placement = place_parameters(self.graph, bucket_bytes, rounding)
        self.buffers, self.frozen_buffers = placement.buffers, placement.frozen
        self.buckets, self.parameters = placement.buckets, placement.parameters
        for name, array in values.items():
            self.parameters[name].master[...] = array

    def choose_buckets(self, choose: Callable[[int, int], Sequence[int]]) -> None:
        """Partition the parameters again if `bucket_bytes` was not set, at the first call only.

        Later an optimizer references the arrays. Values are copied to new arrays. `choose` receives
        the bytes of all gradients and the default length of buckets, and returns their lengths.
        """
        total = sum(buffer.grads.nbytes for buffer in self.buffers)
        nbytes = choose(total, DEFAULT_BUCKET_BYTES)
        if not self._buckets_fixed and set(nbytes) != {DEFAULT_BUCKET_BYTES}:
            replaced = (*self.buffers, *self.frozen_buffers)
            self._place_parameters(nbytes)
            for buffer in replaced:
                buffer.buckets = ()  # which refer to it: its arrays would not be freed
            self.refresh()
            self.backend.trim()
        self._buckets_fixed = True

    def refresh(self) -> None:
        """Round the parameters into the working copies of a 16-bit model; called by forward.

        In a step of a scheme that gathers parameters, this scheme rounds those that are trained.
        """
        trained = () if any(hook.refreshes for hook in self.graph.hooks) else self.buffers
        for buffer in (*trained, *self.frozen_buffers):
            buffer.refresh()

    def freeze(self, *patterns: str) -> None:
        """Make parameters constant, from the next `fit` on.

        A frozen parameter has no gradient, message or update, and no state in the optimizer; layers
        before which everything is frozen run no backward. Frozen batch norms use their running
        statistics in training, too, and do not change them. All ranks must freeze the same.

        Parameters
        ----------
        *patterns : str
            Names of blocks, layers or parameters, such as "stage1" or "head.fc.b", with wildcards:
            "*.bn?", and "*" for all.

        Raises
        ------
        ValueError
            If a pattern matches no parameter.
        """
        self.set_frozen({*self.frozen, *self._select("Model.freeze", patterns)})

    def thaw(self, *patterns: str) -> None:
        """Train frozen parameters again: see `freeze`. The optimizer's state for them is 0."""
        self.set_frozen({*self.frozen} - {*self._select("Model.thaw", patterns)})

    def _select(self, who: str, patterns: tuple[str, ...]) -> tuple[str, ...]:
        if not patterns:
            raise ValueError(f'{who}: expected names of layers, got none; "*" means all')
        return select(who, patterns, self.parameter_names)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of the parameters of the network: of all stages, if it is cut into several."""
        if self.pipeline is None:
            return tuple(self.parameters)
        return tuple(n for n in self.pipeline.shapes if n.rpartition(".")[2] not in RUNNING)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the frozen parameters."""
        own = {name for name, p in self.parameters.items() if p.frozen} | self._frozen_elsewhere
        return tuple(name for name in self.parameter_names if name in own)

    def set_frozen(self, names: Collection[str]) -> None:
        """Freeze these parameters and thaw all others."""
        if {*names} == {*self.frozen}:
            return
        self._frozen_elsewhere = frozenset(names) - self.parameters.keys()
        for name, p in self.parameters.items():
            p.frozen = name in names
        freeze_statistics(self.statistics.statistics, self.parameters.values())
        self.graph.find_trained()
        self.choose_segments()
        self._place_parameters(self._bucket_bytes)
        self.refresh()
        self.backend.trim()

    def choose_segments(
        self, batch: int | None = None, *, slots: int = 0, in_flight: int = 1
    ) -> None:
        """Choose what is recomputed for a batch size: see `find_cuts`."""
        self.cut(self.find_cuts(batch, slots=slots, in_flight=in_flight))

    def find_cuts(
        self, batch: int | None = None, *, slots: int = 0, in_flight: int = 1
    ) -> tuple[int, ...]:
        """Return the cuts for a batch size: nodes before which segments begin or end.

        Parameters
        ----------
        batch : int, optional
            Samples per pass. If it is not known, `memory_limit` is ignored.
        slots : int
            Slots of the optimizer, for the memory.
        in_flight : int
            Micro-batches whose saved values exist at a time, in a stage of a pipeline. If there are
            several, the last part of the stage is recomputed too.

        Raises
        ------
        ValueError
            If a name matches no layer, there are too few layers for the parts, or no choice of
            segments needs at most `memory_limit`.
        """
        names = [part.name for part in self.description.parts]
        options = self.recompute, self.memory_limit
        return find_cuts(self, *options, names, batch, slots, in_flight)

    def cut(self, cuts: Sequence[int]) -> None:
        """Recompute the segments between cuts, and nothing if there are none."""
        inside = [part.layers[0].index for part in self.graph.parts if part.layers]
        inside = [i for i in inside if cuts and cuts[0] < i < cuts[-1]]
        self.cuts = tuple(sorted({*cuts, *inside}))
        self.segments = cut(self.graph.nodes, self.graph.trained, self.cuts)
        self.graph.find_overwrites(self.segments.checkpoints)

    @property
    def whole(self) -> FullArrays:
        """Conversion of this rank's arrays to those of the whole network."""
        others = None if self.pipeline is None else self.pipeline.shapes
        return FullArrays(self.mesh, self.parameters.values(), self.statistics.statistics, others)

    def own_state(self) -> dict[str, np.ndarray]:
        """Return what `state` does of this rank's parts alone."""
        values = {name: self.backend.to_numpy(p.master) for name, p in self.parameters.items()}
        return values | self.statistics.state()

    def state(self) -> dict[str, np.ndarray]:
        """Return parameters and running statistics by name; on a CPU these may be views.

        On a mesh they are those of the whole network, and the call is collective: all ranks call
        it.
        """
        return self.whole.gather(self.own_state())

    def pieces(self) -> list[Piece]:
        """Return this rank's elements of parameters and running statistics, as views."""
        place = {} if self.mesh is None else self.mesh.position
        own = [part_piece(name, p.master, p.part, place) for name, p in self.parameters.items()]
        for s in self.statistics.statistics:
            for what, values in zip(RUNNING, (s.mean, s.variance), strict=True):
                own.append(part_piece(f"{s.name}.{what}", values, s.part, place))
        return own

    def load(self, state: Mapping[str, np.ndarray], *, strict: bool = True) -> LoadReport:
        """Load parameters and running statistics returned by `state`.

        If not `strict`, the arrays that fit are loaded, and the report lists the others. On a mesh
        each rank takes its parts.

        Raises
        ------
        ValueError
            If nothing fits, or, if `strict`, not everything does; nothing is changed.
        """
        whole = self.whole
        report = whole.compare(state)
        report.check(strict=strict)
        given = {name: state[name] for name in report.loaded}
        own = self.own_state() | whole.take(given)
        for name, p in self.parameters.items():
            p.master[...] = self.backend.asarray(own[name], p.buffer.dtype)
        self.statistics.load(own)
        self.refresh()
        self.given = given if whole.distributed else {}
        self.loaded = checksum((self.given or self.own_state()).values())
        return report

    def replaced(self) -> None:
        """Called after the values of `pieces` have been replaced, by those of all ranks alike."""
        self.statistics.samples = 0.0
        self.refresh()
        self.loaded, self.given = None, {}

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_model, (take_apart(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return rebuild_model(copy.deepcopy(take_apart(self), memo), self.backend)

    def __repr__(self) -> str:
        return represent_model(self, self.description)

    def summary(self, batch: int = 1, *, slots: int = 0) -> str:
        """Describe the model in a table: see `pydtnn.model.summary.summarize`."""
        return summarize(self, batch, slots=slots)


def _is_unread(node: Node) -> bool:
    """Return whether backward does not need the array of an output, so that its loss may write it.

    An exchange that gathers parts may pass that of this rank on.
    """
    passes = isinstance(node.layer, Exchange) and node.layer.optional
    sources = (node, *node.inputs) if passes else (node,)
    return not any(
        "output" not in source.layer.new_results
        or "output" in source.layer.saves
        or isinstance(source.layer, NormAddReLU)  # which keeps the values of an output
        or len(source.consumers) > (source is not node)
        or source.layer.backend.keeps_values
        for source in sources
    )
