"""How each kind of layer is partitioned: strategies, and layers that follow their inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any, cast

from pydtnn.layers.activation import Activation
from pydtnn.layers.attention import CrossAttention, DotProductAttention
from pydtnn.layers.base import Layer, computes_like
from pydtnn.layers.communicating import Communicating, Follower, TwoPhase
from pydtnn.layers.conv import Conv2d
from pydtnn.layers.conv_transpose import ConvTranspose2d
from pydtnn.layers.dropout import Dropout
from pydtnn.layers.embedding import Embedding
from pydtnn.layers.experts import Experts
from pydtnn.layers.fused_conv import FusedConv2d
from pydtnn.layers.linear import Linear
from pydtnn.layers.merge import Add, Concat, Multiply
from pydtnn.layers.norm import BatchNorm, LayerNorm, LocalResponseNorm, RMSNorm
from pydtnn.layers.parameters import Cut
from pydtnn.layers.pool import AdaptiveAvgPool2d, AvgPool2d, GlobalAvgPool2d, MaxPool2d
from pydtnn.layers.recurrent import GRULayer, LSTMLayer
from pydtnn.layers.rescale import Rescale
from pydtnn.layers.reshape import Flatten, Identity, Pad, Slice
from pydtnn.layers.rotary import Rotary
from pydtnn.layers.sequence import ClassToken, PositionalEmbedding, TakesDocuments
from pydtnn.layers.signal import AvgPool1d, Conv1d, GlobalAvgPool1d, MaxPool1d
from pydtnn.layers.upsample import Upsample
from pydtnn.layers.volume import AvgPool3d, Conv3d, GlobalAvgPool3d, MaxPool3d
from pydtnn.model.partition.draft import Draft, Layout, PlanError, also_cut, cut_of
from pydtnn.model.partition.exchange import SAMPLES, Spread
from pydtnn.model.partition.exchanged_experts import ExchangedExperts
from pydtnn.model.partition.ring_attention import RingAttention, RingCrossAttention
from pydtnn.model.partition.striped_conv import StripedConv2d, readers_of
from pydtnn.model.partition.stripes import HaloExchange, window_rows
from pydtnn.utils.validate import check_bool

WHOLE, PARTIAL = Spread.WHOLE, Spread.PARTIAL

Windowed = Conv2d | MaxPool2d | AvgPool2d


def kind_of(layer: Layer) -> type[Layer] | None:
    """Return the library's class whose computation a layer has; None for custom ones."""
    kinds = () if isinstance(layer, Follower) else (*STRATEGIES, *FOLLOWERS)
    return next((k for k in kinds if isinstance(layer, k) and computes_like(layer, k)), None)


# -- strategies -----------------------------------------------------------------------------------


def filters(draft: Draft, axis: str) -> None:
    """Cut the filters of a convolution, or the features of a linear layer.

    The input is whole, and its gradient partial; the output is cut by channels. Groups of a
    convolution are cut together with their input channels, without any exchange.
    """
    layer: Any = draft.layer
    last = len(draft.whole.output_shape) - 1
    if isinstance(layer, Linear):
        heads, blocks = _heads_read(draft)
        size = cast(Linear, draft.whole).features // blocks
        what = "heads" if heads else "features"
        cut = draft.even(last, axis, size, what, size // heads if heads else 1, blocks)
        layer.features = draft.own(cut)
    elif layer.groups > 1:
        unit, channels = layer.filters // layer.groups, draft.whole.input_shapes[0][-1]
        cut = draft.even(last, axis, layer.filters, "groups", unit)
        inner = channels // layer.groups
        bounds = tuple(bound // unit * inner for bound in cut.bounds)
        draft.require(axis, Cut(last, axis, bounds))
        layer.filters, layer.groups = draft.own(cut), draft.own(cut) // unit
    else:
        cut = draft.even(last, axis, layer.filters, "filters")
        layer.filters = draft.own(cut)
    if axis not in draft.inputs[0]:
        draft.require(axis, PARTIAL)
    draft.cut_parameters(0, cut, "w", "b")
    draft.output[axis] = cut


def _heads_read(draft: Draft) -> tuple[int, int]:
    """Return the heads of the attention that alone reads a layer's output, 0 otherwise, and blocks.

    These are the queries, keys and values, or some of them; one of them before `Rotary`, with the
    heads that share keys together.
    """
    readers = draft.node.consumers
    layer = readers[0].layer if len(readers) == 1 else None
    kind = None if layer is None else kind_of(layer)
    if kind is Rotary:
        return cast(Rotary, layer).groups, 1
    if kind not in OPERANDS:
        return 0, 1
    blocks = OPERANDS[kind][readers[0].inputs.index(draft.node) :]
    return (cast(DotProductAttention, layer).heads, blocks[0]) if blocks else (0, 1)


OPERANDS: dict[type[Layer] | None, tuple[int, ...]] = {
    DotProductAttention: (3,),
    CrossAttention: (1, 2),
}
"""How many of queries, keys and values each input of attention has; others say which exist."""


def channels(draft: Draft, axis: str, layouts: Sequence[Layout]) -> None:
    """Cut the input channels of a convolution, or the input features of a linear layer.

    The input is cut by channels, as it is already if so; the output is partial. The bias is added
    on the first rank.
    """
    layer: Any = draft.layer
    if not isinstance(layer, Linear) and layer.groups > 1:
        filters(draft, axis)  # groups have input channels of their own
        return
    last = len(draft.whole.input_shapes[0]) - 1
    cut = draft.even(last, axis, draft.whole.input_shapes[0][-1], "input channels")
    given = cut_of(layouts, axis)
    cut = given if given is not None and given.dim == last else cut
    draft.require(axis, cut)
    draft.cut_parameters(1 if isinstance(layer, Linear) else layer.axes + 1, cut, "w")
    layer.adds_bias = layer.adds_bias and draft.mesh.position[axis] == 0
    draft.output[axis] = PARTIAL


def alternate(draft: Draft, axis: str, layouts: Sequence[Layout]) -> None:
    """Cut the input channels if the input is cut by channels already, otherwise the filters."""
    cut = cut_of(layouts, axis)
    last = len(draft.whole.input_shapes[0]) - 1
    if cut is not None and cut.dim == last:
        channels(draft, axis, layouts)
    else:
        filters(draft, axis)


def stripes(draft: Draft, axis: str, dim: int) -> None:
    """Cut input and output maps along the height (`dim` 0) or width (1).

    Each rank computes even parts of the output's rows; the rows that its windows read from other
    stripes are the halo.
    """
    layer = cast(Windowed, draft.layer)
    window = cast(Windowed, draft.whole).geometry
    rows, into = window.output[dim], window.size[dim]
    what = ("height", "width")[dim]
    source = draft.even(dim, axis, into, f"the {what} of the input")
    target = draft.even(dim, axis, rows, f"the {what} of the output")
    dilation = layer.dilation[dim] if isinstance(layer, Conv2d) else 1
    fixed = into, layer.kernel[dim], layer.stride[dim], dilation, window.padding[dim][0]
    found = (window_rows(own, *fixed) for own in pairwise(target.bounds))
    needed, around = zip(*found, strict=True)
    if any(start >= stop for start, stop in needed):
        raise draft.refuse(axis, f"a window lies in the padding, with {into} rows of input")
    options: Any = layer
    padding = list(options.padding if draft.halos else window.padding)
    padding[dim] = around[draft.mesh.position[axis]]
    options.padding = tuple(padding)
    draft.same(axis, source)
    draft.output[axis] = target
    _extend(draft, source, needed)
    if isinstance(layer, Conv2d):
        draft.summed.append(axis)


def with_halo(draft: Draft) -> FusedConv2d | None:
    """Return a convolution that exchanges its halo itself, if there is one halo."""
    layer, whole = draft.layer, draft.whole
    if len(draft.halos) != 1 or not draft.halos[0].changes or not isinstance(layer, Conv2d):
        return None
    if type(layer).backward is not Conv2d.backward:
        return None
    window, own = cast(Conv2d, whole).geometry, draft.halos[0].halo
    cut = draft.output[own.cut.axis]
    assert isinstance(cut, Cut)
    readers = readers_of(window, own, cut)
    return None if readers is None else StripedConv2d(layer, own, *readers)


def _extend(draft: Draft, cut: Cut, needed: Sequence[tuple[int, int]]) -> None:
    draft.halos.append(HaloExchange(cut, needed, position=draft.mesh.position))


def vocabulary(draft: Draft, axis: str) -> None:
    """Cut the tokens of an embedding: vectors are partial, logits are cut by tokens."""
    layer = cast(Embedding, draft.layer)
    cut = draft.even(len(draft.whole.output_shape) - 1, axis, layer.tokens, "tokens")
    if layer.own is not None:
        raise draft.refuse(axis, "its tokens are cut along another axis")
    layer.own = cut.range(draft.mesh.position)
    draft.cut_parameters(0, cut, "w", *(["b"] if layer.bias else []))
    draft.require(axis, PARTIAL if layer.gives_logits else WHOLE)
    draft.output[axis] = cut if layer.gives_logits else PARTIAL


def context(draft: Draft, axis: str) -> None:
    """Cut the positions of a sequence: a layer follows as if its input was cut by positions."""
    shape, kind = draft.whole.output_shape, kind_of(draft.whole)
    if len(shape) != 2 or kind is None:
        raise draft.refuse(axis, f"its output of shape {shape} is not a sequence (T, D)")
    FOLLOWERS[kind](draft, draft.even(0, axis, shape[0], "positions"))


def samples(draft: Draft, axis: str) -> None:
    """Cut the batch: data parallelism along an axis of the model."""
    draft.same(axis, Cut(SAMPLES, axis, ()))
    draft.summed.append(axis)
    if isinstance(draft.layer, BatchNorm):
        draft.layer.sum_axes = (*draft.layer.sum_axes, axis)


def experts(draft: Draft, axis: str) -> None:
    """Divide the experts, and the samples of which tokens travel to them; others have samples."""
    layer = draft.layer
    if not isinstance(layer, Experts):
        samples(draft, axis)
        return
    cut = draft.even(0, axis, cast(Experts, draft.whole).experts, "experts")
    draft.layer = ExchangedExperts(layer, cut)
    draft.cut_parameters(0, cut, "up", "gate", "down", "up_bias", "down_bias")
    draft.same(axis, Cut(SAMPLES, axis, ()))


STRATEGIES: dict[type[Layer], tuple[str, ...]] = {
    Conv2d: ("filter", "channel", "alternate", "spatial", "width", "expert", "data"),
    Conv1d: ("filter", "channel", "alternate", "expert", "data"),
    Conv3d: ("filter", "channel", "alternate", "data"),
    Linear: ("filter", "channel", "alternate", "context", "expert", "data"),
    Embedding: ("filter", "alternate", "context", "expert", "data"),
    Experts: ("expert",),
    PositionalEmbedding: ("context",),
    MaxPool2d: ("spatial", "width", "data"),
    AvgPool2d: ("spatial", "width", "data"),
    ConvTranspose2d: ("data",),
    MaxPool1d: ("data",),
    AvgPool1d: ("data",),
    MaxPool3d: ("data",),
    AvgPool3d: ("data",),
}
"""The strategies of each kind of layer; all others follow their inputs."""


def apply_strategy(name: str, draft: Draft, axis: str, layouts: Sequence[Layout]) -> None:
    """Partition a layer with a strategy that it has."""
    if isinstance(draft.layer, Embedding) and name in ("filter", "alternate"):
        vocabulary(draft, axis)
        return
    rules: dict[str, Callable[[], None]] = {
        "filter": lambda: filters(draft, axis),
        "channel": lambda: channels(draft, axis, layouts),
        "alternate": lambda: alternate(draft, axis, layouts),
        "spatial": lambda: stripes(draft, axis, 0),
        "width": lambda: stripes(draft, axis, 1),
        "context": lambda: context(draft, axis),
        "expert": lambda: experts(draft, axis),
        "data": lambda: samples(draft, axis),
    }
    rules[name]()


# -- layers that follow the layouts of their inputs -----------------------------------------------


def follow(draft: Draft, axis: str, layouts: Sequence[Layout]) -> None:
    """Choose the layout of a layer without a strategy along an axis, from those of its inputs.

    The layout of the first input that is cut, if the layer supports it; for a partial input, a cut
    by channels, or by the positions of a sequence between the layers of a transformer, so that the
    work that follows is divided; otherwise the inputs become whole. So do those that are cut in the
    same way along another axis.
    """
    kind = kind_of(draft.whole)
    cut = cut_of(layouts, axis)
    others = draft.inputs if cut is not None else [*draft.inputs, *layouts]
    if cut is None and any(layout.get(axis) is PARTIAL for layout in layouts):
        shape = draft.whole.input_shapes[0]
        dim = len(shape) - 1
        if kind in BETWEEN and len(shape) == 2 and shape[0] >= draft.ranks(axis):
            dim = 0
        cut = draft.even(dim, axis, shape[dim], "") if shape[dim] >= draft.ranks(axis) else None
    if cut is not None and any(also_cut(layout, cut) for layout in others):
        cut = None
    follower = FOLLOWERS.get(kind) if kind else _own_rule(draft, axis)
    if cut is None or follower is None:
        draft.same(axis, WHOLE)
    elif cut.dim == SAMPLES and kind:
        samples(draft, axis)
    elif not follower(draft, cut):
        draft.same(axis, WHOLE)


BETWEEN = (Add, Dropout, LayerNorm, PositionalEmbedding, RMSNorm)
"""Layers between those of a transformer that multiply matrices: a partial sequence is cut by
positions there (Korthikanti et al., "Reducing activation recomputation in large transformer
models", 2022, section 4.2.2)."""

Rule = Callable[[Draft, Cut], bool]
"""Partitions a layer whose input is cut; returns whether it can."""


def _own_rule(draft: Draft, axis: str) -> Rule | None:
    """Return the rule of a custom layer, None if it has none.

    Raises
    ------
    PlanError
        If the layer exchanges arrays, but does not state of which parts.
    """
    own = draft.whole
    if isinstance(own, Communicating) and not isinstance(own, Follower | TwoPhase):
        raise PlanError(
            f"{own.name}: {type(own).__name__} communicates, so it must state along the axis {axis}"
            f"={draft.ranks(axis)} which parts of arrays it takes; define follow(self, draft, cut),"
            " which returns False for whole arrays"
        )
    return _follow_own_rule if isinstance(own, Follower) else None


def _follow_own_rule(draft: Draft, cut: Cut) -> bool:
    layer, who = cast(Follower, draft.layer), f"{type(draft.layer).__name__}.follow"
    follows = check_bool(who, "its result", layer.follow(draft, cut))
    if follows and any(cut.axis not in layout for layout in (*draft.inputs, draft.output)):
        raise PlanError(
            f"{draft.whole.name}: {who} must set the layouts of inputs and "
            f"output along the axis {cut.axis} if it returns True; use draft.same(cut.axis, cut)"
        )
    return follows


def _each(draft: Draft, cut: Cut) -> bool:
    """Element by element."""
    draft.same(cut.axis, cut)
    return True


def _last(draft: Draft, cut: Cut) -> bool:
    return cut.dim == len(draft.whole.input_shapes[0]) - 1


def _positions(draft: Draft, cut: Cut) -> bool:
    """Normalise own positions, with all of their channels."""
    return not _last(draft, cut) and _each(draft, cut)


def _layer_norm(draft: Draft, cut: Cut) -> bool:
    """Normalise own positions."""
    norm = cast(LayerNorm, draft.layer)
    if cut.dim >= len(draft.whole.input_shapes[0]) - norm.axes:
        return False
    draft.summed.append(cut.axis)
    return _each(draft, cut)


def _positional_embedding(draft: Draft, cut: Cut) -> bool:
    """Add the vectors of own positions, or own features of all vectors."""
    if cut.dim == 0 and len(draft.inputs) > 1:  # a document may begin on another rank
        draft.summed.append(cut.axis)
        return _own_places(draft, cut)
    draft.cut_parameters(cut.dim, cut, "w")
    return _own_places(draft, cut)


def _own_places(draft: Draft, cut: Cut) -> bool:
    """Compute own positions or features, with the documents of all positions."""
    layer = cast(TakesDocuments, draft.layer)
    if cut.dim == 0:
        layer.own_positions = cut.range(draft.mesh.position)
    _each(draft, cut)
    for layout in draft.inputs[layer.sequences :]:
        layout[cut.axis] = WHOLE
    return True


def _multiply(draft: Draft, cut: Cut) -> bool:
    return not cast(Multiply, draft.whole).repeated and _each(draft, cut)


def _concat(draft: Draft, cut: Cut) -> bool:
    axes = len(draft.whole.output_shape)
    axis = cast(Concat, draft.layer).axis % axes
    return axis != cut.dim and _each(draft, cut)


def _batch_norm(draft: Draft, cut: Cut) -> bool:
    """Normalise own channels, or all channels with the sums of all stripes."""
    if _last(draft, cut):
        draft.cut_parameters(0, cut, "gamma", "beta", "channels")
    else:
        norm = cast(BatchNorm, draft.layer)
        norm.sum_axes = (*norm.sum_axes, cut.axis)
        draft.summed.append(cut.axis)
    return _each(draft, cut)


def _rows(draft: Draft, cut: Cut) -> bool:
    """Normalise or multiply own rows; features are cut by a strategy only."""
    if _last(draft, cut):
        return False
    draft.summed.append(cut.axis)
    return _each(draft, cut)


def _embedding(draft: Draft, cut: Cut) -> bool:
    """Look up the vectors of own positions, or compute the logits of their tokens."""
    if cast(Embedding, draft.layer).gives_logits:
        return _rows(draft, cut)
    draft.summed.append(cut.axis)
    return _each(draft, cut)


def _window(draft: Draft, cut: Cut) -> bool:
    """Pool own channels, or own rows."""
    if _last(draft, cut):
        return _each(draft, cut)
    try:
        stripes(draft, cut.axis, cut.dim)
    except PlanError:
        return False
    return True


def _channelwise(draft: Draft, cut: Cut) -> bool:
    """Pool or enlarge own channels."""
    return _last(draft, cut) and _each(draft, cut)


def _convolution(draft: Draft, cut: Cut) -> bool:
    """Convolve groups with own channels."""
    layer = cast(Conv2d, draft.layer)
    if not _last(draft, cut) or layer.groups == 1:
        return False
    try:
        filters(draft, cut.axis)
    except PlanError:
        return False
    return True


def _global_pool(draft: Draft, cut: Cut) -> bool:
    """Average own channels, or sum the weighted means of stripes."""
    pool = cast(GlobalAvgPool2d, draft.layer)
    if _last(draft, cut):
        draft.same(cut.axis, cut)
        draft.output[cut.axis] = Cut(len(draft.whole.output_shape) - 1, cut.axis, cut.bounds)
        return True
    if any(n != 1 for n in pool.output):
        return False
    pool.share *= draft.own(cut) / draft.whole.input_shapes[0][cut.dim]
    draft.require(cut.axis, cut)
    draft.output[cut.axis] = PARTIAL
    return True


def _dropout(draft: Draft, cut: Cut) -> bool:
    """Apply this rank's part of the mask of the whole array."""
    layer, shape = cast(Dropout, draft.layer), draft.whole.output_shape
    part = list(layer.part or [slice(None)] * len(shape))
    part[cut.dim] = cut.range(draft.mesh.position)
    layer.whole_shape, layer.part = shape, tuple(part)
    return _each(draft, cut)


def _flatten(draft: Draft, cut: Cut) -> bool:
    shape = draft.whole.input_shapes[0]
    if not _last(draft, cut) or any(n != 1 for n in shape[:-1]):
        return False
    draft.require(cut.axis, cut)
    draft.output[cut.axis] = Cut(0, cut.axis, cut.bounds)
    return True


def _pad(draft: Draft, cut: Cut) -> bool:
    return cast(Pad, draft.layer).padding[cut.dim] == (0, 0) and _each(draft, cut)


def _slice(draft: Draft, cut: Cut) -> bool:
    """Take parts along other axes, or rows with a step: like windows of one row."""
    layer = cast(Slice, draft.layer)
    if cut.dim >= len(layer.slices):
        return _each(draft, cut)
    size = draft.whole.input_shapes[0][cut.dim]
    start, _, step = layer.slices[cut.dim].indices(size)
    rows = draft.whole.output_shape[cut.dim]
    if rows < draft.ranks(cut.axis):
        return False
    target = draft.even(cut.dim, cut.axis, rows, "")
    needed = [window_rows(own, size, 1, step, 1, -start)[0] for own in pairwise(target.bounds)]
    slices = list(layer.slices)
    slices[cut.dim] = slice(0, None, step)
    layer.slices = tuple(slices)
    draft.require(cut.axis, cut)
    draft.output[cut.axis] = target
    _extend(draft, cut, needed)
    return True


def _attention(draft: Draft, cut: Cut) -> bool:
    """Compute own heads of all positions, or own positions if there are fewer heads than ranks."""
    layer, whole = (cast(DotProductAttention, own) for own in (draft.layer, draft.whole))
    width = (features := whole.output_shape[-1]) // whole.heads
    operands = OPERANDS[kind_of(whole)]
    others = [s for s in draft.inputs[0].values() if isinstance(s, Cut) and s.dim == 1]
    # Some ranks have more heads than others along these axes, and all must decide alike.
    if whole.heads // prod(len(s.bounds) - 1 for s in others) < draft.ranks(cut.axis):
        return cut.dim == 0 and _ring(draft, cut)
    if others:
        return False
    fits = cut.dim == 1 and cut.blocks in operands and cut.bounds[-1] == features
    fits = fits and not any(bound % width for bound in cut.bounds)
    output = replace(cut, blocks=1) if fits else draft.even(1, cut.axis, features, "heads", width)
    for layout, blocks in zip(draft.inputs, operands, strict=False):
        layout[cut.axis] = replace(output, blocks=blocks)
    draft.output[cut.axis] = output
    heads = tuple(bound // width for bound in output.bounds)
    draft.cut_parameters(1, replace(output, bounds=heads), "positions")
    layer.first_head += output.range(draft.mesh.position).start // width
    layer.heads = draft.own(output) // width
    return True


def _ring(draft: Draft, cut: Cut) -> bool:
    """Compute own positions; keys and values of other ranks travel."""
    layer = cast(DotProductAttention, draft.layer)
    lengths = [shape[0] for shape in draft.whole.input_shapes[:2]]
    if isinstance(layer, CrossAttention) and min(lengths) < draft.ranks(cut.axis):
        return False
    draft.summed.append(cut.axis)
    if not isinstance(layer, CrossAttention):
        draft.layer = RingAttention(layer, cut)
        draft.inputs[0][cut.axis] = draft.output[cut.axis] = cut
        return True
    queries, keys = (draft.even(0, cut.axis, length, "positions") for length in lengths)
    draft.layer = RingCrossAttention(layer, queries, keys)
    draft.inputs[0][cut.axis] = draft.output[cut.axis] = queries
    draft.inputs[1][cut.axis] = keys
    return True


def _rotary(draft: Draft, cut: Cut) -> bool:
    """Rotate own heads, of whole groups, or all heads of own positions."""
    layer, whole = cast(Rotary, draft.layer), cast(Rotary, draft.whole)
    if cut.dim == 0:
        return _own_places(draft, cut)
    if whole.groups < draft.ranks(cut.axis):
        return False
    for layout, (_, features) in zip(draft.inputs[:3], whole.input_shapes[:3], strict=True):
        unit = features // whole.groups
        layout[cut.axis] = draft.even(1, cut.axis, features, "groups of heads", unit)
    queries = cast(Cut, draft.inputs[0][cut.axis])
    draft.output[cut.axis] = replace(queries, blocks=3)
    layer.heads = draft.own(queries) * whole.heads // whole.input_shapes[0][1]
    return True


def _whole_samples(draft: Draft, cut: Cut) -> bool:
    """Compute own samples; a cut within samples is not followed."""
    return False


FOLLOWERS: dict[type[Layer], Rule] = {
    Activation: _each,
    Add: _each,
    BatchNorm: _batch_norm,
    ClassToken: _whole_samples,
    Concat: _concat,
    Conv2d: _convolution,
    CrossAttention: _attention,
    DotProductAttention: _attention,
    Conv1d: _convolution,
    Conv3d: _convolution,
    Dropout: _dropout,
    GRULayer: _whole_samples,
    LSTMLayer: _whole_samples,
    Flatten: _flatten,
    AdaptiveAvgPool2d: _global_pool,
    GlobalAvgPool1d: _global_pool,
    GlobalAvgPool3d: _global_pool,
    Identity: _each,
    Embedding: _embedding,
    LayerNorm: _layer_norm,
    Linear: _rows,
    LocalResponseNorm: _positions,
    MaxPool2d: _window,
    AvgPool2d: _window,
    MaxPool1d: _channelwise,
    AvgPool1d: _channelwise,
    MaxPool3d: _channelwise,
    AvgPool3d: _channelwise,
    Multiply: _multiply,
    Pad: _pad,
    PositionalEmbedding: _positional_embedding,
    RMSNorm: _rows,
    Rescale: _each,
    Rotary: _rotary,
    Slice: _slice,
    Upsample: _channelwise,
}
"""How layers follow a cut of their inputs."""
