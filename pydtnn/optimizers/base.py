"""Base class of optimizers: flat state, learning rate, weight decay, clipping, saving, loading.

A rule is a subclass with one method::

    class SignSGD(Optimizer):
        slots = ("velocity",)

        def update(self, w, g, velocity, *, lr, decay, step):
            velocity *= 0.9
            velocity += 0.1 * g
            w -= lr * (np.sign(velocity) + decay * w)
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from math import prod
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np

from pydtnn.kernels import Backend
from pydtnn.kernels.number_format import Rounding
from pydtnn.kernels.reference.family import Array, Number
from pydtnn.kernels.reference.random import Noise, stream
from pydtnn.layers.parameters import Bucket, BucketEntry, ParameterBuffer
from pydtnn.optimizers.groups import Groups, Options, ParameterGroup
from pydtnn.optimizers.loss_scale import LossScale
from pydtnn.optimizers.whole import WholeParameters, whole_entries
from pydtnn.schedules import Constant, Schedule
from pydtnn.utils.arguments import StoresArguments
from pydtnn.utils.names import SuggestsNames, check_names, shorten
from pydtnn.utils.observer import Observer, outside, phase
from pydtnn.utils.option import option, options_of, set_options, signature_of
from pydtnn.utils.validate import check_float, check_int

Total = Callable[[Callable[[Array], Number]], Number]


class Clipping:
    """Scale all gradients by ``min(1, limit / norm)``.

    Parameters
    ----------
    limit : float
        Largest global norm.

    References
    ----------
    Pascanu et al., "On the difficulty of training recurrent neural networks", ICML 2013,
    algorithm 1.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._square: Number | None = None  # of the norm

    def apply(
        self, backend: Backend, total: Total, grads: Sequence[Array], *, scales: bool
    ) -> Number:
        """Scale gradients in place, and return a factor that remains to be applied.

        Parameters
        ----------
        backend : Backend
        total : callable
            Adds a function's numbers of all gradients of all ranks.
        grads : sequence of Array
            The gradients that are scaled.
        scales : bool
            Whether the last factor remains; otherwise 1 does.
        """
        with np.errstate(over="ignore"):  # gradients stay as they are if it is infinite
            self._square = square = total(backend.update.squared_norm)
        factor = backend.update.clip_factor(square, self.limit)
        if scales or (isinstance(factor, float) and factor == 1):
            return factor
        for array in grads:
            backend.update.scale(array, factor)
        return 1.0

    @property
    def norm(self) -> float | None:
        """Norm of the last gradients before clipping; None before the first."""
        return None if self._square is None else float(self._square) ** 0.5


Axes = tuple[str, ...]

Place = Callable[[int], int]

SlotForm = tuple[tuple[int, ...], str | None]
"""Shape and type of a slot of a parameter; None is the type of the parameter."""


def _itself(value: Number, axes: Axes) -> Number:
    return value


@dataclass(frozen=True)
class PartSums:
    """Sums of numbers over the axes of a mesh along which parameters are cut.

    Attributes
    ----------
    axes : tuple of str
        All axes besides "data".
    stages : tuple of str
        Those along which ranks have other parameters altogether.
    add : callable
        ``add(number, axes)`` returns the sum over axes. Collective.
    same : callable
        ``same(number, axes)`` returns the number of the first rank along axes. Collective.
    mesh : Mesh, optional
        Which copies parts of parameters to the owners of the whole ones, and back.
    """

    axes: Axes = ()
    stages: Axes = ()
    add: Callable[[Number, Axes], Number] = _itself
    same: Callable[[Number, Axes], Number] = _itself
    mesh: Any = None

    def total(
        self,
        buckets: Collection[Bucket],
        square: Callable[[Bucket], Number],
        share: Callable[[Number], Number],
    ) -> Number:
        """Sum a number over all buckets of the network, those that all ranks have once.

        Parameters
        ----------
        buckets : collection of Bucket
            Those of this rank.
        square : callable
            Returns the number of this rank's range of a bucket.
        share : callable
            Sums a number over the ranks that update different ranges: `Share.total`.
        """
        sums: dict[Axes, Number] = {}
        for bucket in buckets:
            axes = cut_axes(bucket)
            sums[axes] = sums.get(axes, 0.0) + square(bucket)
        total = sum(self.add(sums[axes], axes) if axes else sums[axes] for axes in sorted(sums))
        total = self.add(share(total), self.stages)
        return self.same(total, tuple(axis for axis in self.axes if axis not in self.stages))


def cut_axes(bucket: Bucket) -> Axes:
    """Return the axes along which ranks have different parts of a bucket's parameters."""
    part = bucket.buffer.parameters[0].part
    return () if part is None else part.axes


@runtime_checkable
class Share(Protocol):
    """The interface of an optimizer that updates only a part of each bucket."""

    exact_norms: bool
    """Whether norms of all gradients must not depend on the parts."""

    def own(self, bucket: Bucket, costs: Sequence[int] | None) -> slice:
        """Return the range of a bucket that this rank updates.

        Parameters
        ----------
        bucket : Bucket
        costs : sequence of int, optional
            If the rule requires whole parameters, which must then not be split: the cost of the
            update of each.
        """

    def gather(self, bucket: Bucket, part: Array, place: Place = int) -> Array:
        """Gather an array from the parts of all ranks. Collective.

        Parameters
        ----------
        bucket : Bucket
        part : Array
            Values for the elements of the bucket that this rank updates.
        place : callable
            Returns where the values for elements from a position of the bucket on begin; by default
            there is one for each.
        """

    def total(self, value: Number) -> Number:
        """Sum a number computed on each rank's ranges. Collective."""


class FullShare:
    """The share of a rank that updates everything."""

    exact_norms = False

    def own(self, bucket: Bucket, costs: Sequence[int] | None) -> slice:
        """Return the whole bucket."""
        return slice(0, len(bucket.values))

    def gather(self, bucket: Bucket, part: Array, place: Place = int) -> Array:
        """Return the array itself."""
        return part

    def total(self, value: Number) -> Number:
        """Return the number."""
        return value


def check_saved(who: str, shapes: Mapping[str, tuple[int, ...]], state: Mapping[str, Any]) -> None:
    """Check the names and shapes of a saved state.

    Parameters
    ----------
    who : str
        First word of errors.
    shapes : mapping of str to tuple
        Shapes of the arrays by name; "iterations" and "lr_factor" are expected too.
    state : mapping

    Raises
    ------
    ValueError
        If a name is missing or unexpected, or an array has another shape.
    """
    expected = {*shapes, "iterations", "lr_factor"}
    if expected != set(state):
        missing, extra = sorted(expected - set(state)), sorted(set(state) - expected)
        raise ValueError(
            f"{who}: the saved state belongs to another optimizer or model: "
            f"missing {shorten(missing, 3)}, unexpected {shorten(extra, 3)}; "
            "use the optimizer and model it was saved with"
        )
    for name, shape in shapes.items():
        if np.shape(state[name]) != shape:
            raise ValueError(
                f"{who}: the saved {name} must have shape {shape}, got {np.shape(state[name])}; "
                "use the model with which it was saved"
            )


class StoredState(NamedTuple):
    """Elements of a slot of a parameter that a rank stores.

    Attributes
    ----------
    slot : str
    entry : BucketEntry
    start : int
        The first one, in the flattened parameter.
    values : Array
    """

    slot: str
    entry: BucketEntry
    start: int
    values: Array


OneUpdate = tuple[tuple[Array, ...], ParameterGroup, dict[str, Any]]
"""Arrays of a call of `Optimizer.update`, their group, and the terms of the parameter."""


class Optimizer(SuggestsNames, StoresArguments, ABC):
    """Base class of update rules and their state.

    Parameters
    ----------
    lr : float or Schedule
        Learning rate, or a function that returns it for update number ``step``, counted from 0.
    weight_decay : float
        Coefficient passed to the rule as `decay` for parameters with weight decay; biases and the
        parameters of norms have none. Cannot be changed once the optimizer is bound.
    groups : mapping of str to mapping, optional
        For patterns of names of parameters, layers or blocks (`pydtnn.utils.names.select`), a
        factor on the learning rate and another weight decay: ``{"head": {"lr_factor": 10}, "*.bn?":
        {"weight_decay": 0}}``. The first matching pattern applies.
    clip_norm : float, optional
        Gradients are scaled down if their global norm (of all parameters together) is above this.
        If their square is not finite, they are not changed: the next loss is then not finite, and
        training stops with the name of the layer.

    Attributes
    ----------
    default_lr : float
        Class attribute: the learning rate if none is given.
    slots : tuple of str
        Names of the rule's state arrays, each as large as the parameters and initially 0.
    per_parameter : bool
        Whether `update` is called once per parameter; otherwise once per range of consecutive
        parameters with equal decay. A rule that depends on shapes and names defines `terms_of`.
    rules : tuple of str
        Class attribute: names of the rules among which an optimizer chooses for each parameter,
        for the option "rule" of `groups`.
    needs_all_gradients : bool
        Whether updates require all gradients, as with `clip_norm`. A rule sets it in its class or
        in `__init__`.
    iterations : int
        Updates made.
    lr_factor : float
        Factor on the learning rate, for callbacks that reduce it; saved with the state.
    offset : str
        Class attribute of a rule that averages: the slot with the difference of the parameters,
        with which gradients are computed, from their average, which is evaluated and saved.
    capturable : bool
        Whether an update runs on the device only and may be captured once in a CUDA graph and
        replayed for all later steps: it reads no value on the host that changes between steps,
        except its terms, and its kernels check `CudaBackend.go`, as those of `backend.update` do.
        Not inherited.
    scales : bool
        Whether `update` passes `factor` to its kernel, so that clipping does not write the
        gradients. Not inherited.
    factor : dict of str to float
        The factor of clipping, "scale", if kernels take it (`Backend.scales`); else empty.
    backend : Backend
        The backend of the rule's kernels and arrays, once bound.
    binding : object
        A new object after each `bind`, to detect state of an earlier one.
    loss_scale : LossScale or None
        Divisor of the gradients before an update, see `scale_loss`.
    rounding : Rounding or None
        Format of the slots between updates, see `round_state`.
    observer : Observer or None
        Receives each bucket's exchange and update, in a phase "exchange"; set by a trainer with
        observers.
    """

    weight_decay: float = option(0.0, at_least=0)
    clip_norm: float | None = option(float, above=0)
    default_lr: ClassVar[float] = 0.01
    slots: tuple[str, ...] = ()
    per_parameter: bool = False
    rules: ClassVar[tuple[str, ...]] = ()
    needs_all_gradients: bool = False
    offset: ClassVar[str] = ""
    capturable: ClassVar[bool] = False
    scales: ClassVar[bool] = False
    backend: Backend
    binding: object = None
    loss_scale: LossScale | None = None
    rounding: Rounding | None = None
    observer: Observer | None = None

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for name in ("capturable", "scales"):
            if name not in vars(cls):
                setattr(cls, name, False)
        if isinstance(cls.slots, str):
            raise TypeError(f'{cls.__name__}: slots must be a tuple; use ("{cls.slots}",)')
        signature = signature_of(cls)
        cls.__signature__ = signature.replace(
            parameters=[
                p.replace(default=cls.default_lr) if p.name == "lr" and p.default is None else p
                for p in signature.parameters.values()
            ]
        )

    def __init__(
        self,
        lr: float | Schedule | None = None,
        *,
        groups: Options | None = None,
        **options: Any,
    ) -> None:
        lr = self.default_lr if lr is None else lr
        if isinstance(lr, Iterable) and not isinstance(lr, str):
            raise TypeError(
                f"{type(self).__name__}: expected a learning rate, got a {type(lr).__name__}; the "
                "trainer passes the model's parameters to the optimizer: use SGD(lr=0.1)"
            )
        if callable(lr):
            self.schedule = lr
        else:
            self.schedule = Constant(self.number("lr (the learning rate)", lr, at_least=0))
        check_names(type(self), options, ["lr", "groups", *options_of(type(self))])
        set_options(self, options)
        self.groups = Groups(type(self).__name__, groups, self.rules)
        self._clipping = None if self.clip_norm is None else Clipping(self.clip_norm)
        self.needs_all_gradients = self.needs_all_gradients or self._clipping is not None
        self.iterations = 0
        self.lr_factor = 1.0
        self.factor: dict[str, Any] = {}
        self._terms: Mapping[str, Number] = {}
        self._given: Mapping[str, Number] | None = None
        self._buffers: tuple[ParameterBuffer, ...] = ()
        self._share: Share = FullShare()
        self._parts = PartSums()
        self._wholes = WholeParameters([], self.cost, 0)
        self._own: dict[int, slice] = {}
        self._slots: dict[int, tuple[Array, ...]] = {}
        self._runs: dict[int, tuple[Array, list[OneUpdate]]] = {}

    @abstractmethod
    def update(self, w: Array, g: Array, *slots: Any, **terms: Any) -> None:
        """Change `w` and the slots in place; the method that a subclass must implement.

        A subclass names its slots and the terms: ``update(self, w, g, velocity, *, lr, decay,
        step)``. The arrays may contain padding between parameters, where all are 0; a rule must
        keep `w` and the slots 0 there.

        Parameters
        ----------
        w, g : Array
            Values and gradients of neighbouring parameters with equal decay (or of one, with
            `per_parameter`), flat.
        *slots : Array
            The state arrays in the order of `slots`, shaped like `w`.
        lr : Number
            Learning rate.
        decay : float
            Weight decay of these parameters: 0 if it does not apply.
        step : Number
            Number of this update, counted from 1.
        **terms : Number
            The results of `terms` for this update, and of `terms_of` for this parameter.
        """

    @property
    def lr(self) -> float:
        """Learning rate of the last update; assigning it replaces the schedule by a constant.

        Checkpoints do not contain the schedule: a run that is to be continued with another rate
        uses a schedule or `lr_factor`.
        """
        return self.lr_now

    @lr.setter
    def lr(self, value: float) -> None:
        self.schedule = Constant(
            check_float(type(self).__name__, "lr (the learning rate)", value, at_least=0)
        )
        self.lr_factor = 1.0

    @property
    def lr_now(self) -> float:
        """Learning rate of the last update; before the first update, of the first."""
        return self.lr_of(max(self.iterations - 1, 0))

    def lr_of(self, step: int) -> float:
        """Return the learning rate of update number `step`, from 0."""
        lr = check_float(
            type(self).__name__,
            f"lr of the schedule at step {step}",
            self.schedule(step),
            at_least=0,
        )
        return lr * self.lr_factor

    def terms(self, step: int) -> dict[str, float]:
        """Compute further values of a rule that change between updates but not between parameters.

        They are computed here rather than in `update`, which a captured graph does not call again.
        """
        return {}

    def terms_of(self, entry: BucketEntry) -> dict[str, Any]:
        """Return further values of a rule with `per_parameter` for a parameter, such as its shape.

        It is called for every parameter of this rank when the optimizer is bound, and raises
        ValueError for a parameter that the rule cannot update.
        """
        return {}

    def cost(self, entry: BucketEntry) -> int:
        """Return the operations of the update of a parameter, of a rule with `per_parameter`.

        Ranks that share updates are balanced by it. By default its elements.
        """
        return prod(entry.shape)

    def uses(self, slot: str, entry: BucketEntry) -> bool:
        """Return whether a rule with `per_parameter` has a slot of a parameter.

        Others are empty in `update`.
        """
        return True

    def number(self, name: str, value: Any, **limits: float) -> float:
        """Check a numeric argument of the rule, see `pydtnn.utils.validate.number`."""
        return check_float(type(self).__name__, name, value, **limits)

    def bind(
        self, backend: Backend, buffers: Sequence[ParameterBuffer], share: object = None
    ) -> None:
        """Bind to a model's parameters and reset the state: no updates, all slots 0.

        Parameters
        ----------
        backend : Backend
        buffers : sequence of ParameterBuffer
            The model's; slots are flat arrays with the same layout.
        share : Share, optional
            The parts of the buckets for which this rank stores state and computes updates; by
            default, or of an object that is no `Share`, all.
        """
        if not hasattr(self, "schedule"):
            who = type(self).__name__
            raise TypeError(f"{who}: __init__ must call super().__init__(lr, ...) first")
        self.backend, self.binding = backend, object()
        self._buffers = tuple(buffers)
        self._share = share if isinstance(share, Share) else FullShare()
        self._own, self._slots, self._runs = {}, {}, {}
        self.iterations, self.lr_factor = 0, 1.0
        cut = [bucket for bucket in self._buckets() if self.per_parameter and cut_axes(bucket)]
        for bucket in self._buckets():
            costs = [self.cost(e) for _, e in whole_entries(bucket)] if self.per_parameter else None
            self._own[bucket.index] = self._share.own(bucket, costs)
        parts = ((bucket, self._own[bucket.index]) for bucket in cut)
        self._wholes = WholeParameters(parts, self.cost, len(self._own))
        self.needs_all_gradients = self.needs_all_gradients or bool(cut)
        for bucket in self._state_buckets():
            self._own.setdefault(bucket.index, slice(0, len(bucket.values)))
            state = (self._allocate(slot, bucket) for slot in self.slots)
            self._slots[bucket.index] = tuple(state)
            self._runs[bucket.index] = bucket.grads, self._cut(bucket)

    def slot_form(self, slot: str, entry: BucketEntry) -> SlotForm:
        """Return the shape and type of a slot of a parameter, if it has the slot (`uses`).

        Slots are flat in `update`. A rule that overrides it updates `per_parameter`.
        """
        return entry.shape, None

    @property
    def has_slot_forms(self) -> bool:
        """Whether a slot is not like the parameters."""
        kind = type(self)
        return kind.uses is not Optimizer.uses or kind.slot_form is not Optimizer.slot_form

    @property
    def state_size(self) -> int:
        """Size of the state in predictions, in units of the parameters, rounded up."""
        return len(self.slots)

    def _place(self, slot: str, bucket: Bucket, position: int) -> int:
        """Return where the values of a slot for elements from a position of a bucket on begin."""
        if not self.has_slot_forms:
            return position
        before = (entry for entry in bucket.parameters if entry.slice.start < position)
        return sum(prod(self.slot_form(slot, e)[0]) for e in before if self.uses(slot, e))

    def _part(self, slot: str, bucket: Bucket, run: slice) -> Array:
        """Return the values of a slot for a range of a bucket, of those that this rank updates."""
        first = self._place(slot, bucket, self._own[bucket.index].start)
        start, stop = (self._place(slot, bucket, at) - first for at in (run.start, run.stop))
        return self._slots[bucket.index][self.slots.index(slot)][start:stop]

    def _allocate(self, slot: str, bucket: Bucket) -> Array:
        own, (_, dtype) = self._own[bucket.index], self.slot_form(slot, bucket.parameters[0])
        size = self._place(slot, bucket, own.stop) - self._place(slot, bucket, own.start)
        return self.backend.zeros((size,), dtype or bucket.buffer.dtype)

    def _cut(self, bucket: Bucket) -> list[OneUpdate]:
        """Return the arrays of this rank's updates of a bucket, each with its group and terms."""
        own = self._own[bucket.index]

        def views(run: slice) -> tuple[Array, ...]:
            slots = (self._part(slot, bucket, run) for slot in self.slots)
            return bucket.values[run], bucket.grads[run], *slots

        runs = self.groups.cut(bucket.parameters, self.weight_decay, self.per_parameter)
        further = map(self.terms_of, bucket.parameters) if self.per_parameter else repeat({})
        return [
            (views(slice(start, stop)), group, terms)
            for (run, group), terms in zip(runs, further, strict=False)
            if (start := max(run.start, own.start)) < (stop := min(run.stop, own.stop))
        ]

    def scale_loss(self, loss_scale: LossScale | None) -> None:
        """Update with gradients of a scaled loss, unless one of them is infinite."""
        self.loss_scale = loss_scale
        if self.clip_norm is not None or loss_scale is not None:
            self.needs_all_gradients = True

    def round_state(self, rounding: Rounding, seed: int) -> None:
        """Round the slots of each parameter after each update.

        Random rounding depends on the seed, the names of slot and parameter, and the update. Ranks
        must have whole slots, since parts have other scales.
        """
        self.rounding, self._rounding_seed = rounding, seed

    def _round(self, bucket: Bucket) -> None:
        assert self.rounding is not None
        for name in self.slots:
            for entry in filter(partial(self.uses, name), bucket.parameters):
                part, noise = self._part(name, bucket, entry.slice).reshape(entry.shape), None
                if self.rounding.stochastic:
                    key = stream(f"{name}/{entry.name}")
                    noise = Noise(self._rounding_seed, key, 0, np.array([self.iterations]))
                self.rounding.apply(self.backend, part, out=part, axis=0, noise=noise)

    def distribute(self, parts: PartSums) -> None:
        """Compute norms with the gradients of all ranks of a mesh, which have parts of them."""
        self._parts = parts

    def _buckets(self) -> list[Bucket]:
        return [bucket for buffer in self._buffers for bucket in buffer.buckets]

    def _state_buffers(self) -> list[ParameterBuffer]:
        """Return the buffers with a state: of whole parameters instead of parts, if it needs them.

        All parameters of a buffer are cut along the same axes.
        """
        cut = self._wholes.shapes
        rest = (b for b in self._buffers if b.buckets and b.parameters[0].name not in cut)
        return [*rest, *self._wholes.buffers]

    def _state_buckets(self) -> list[Bucket]:
        return [bucket for buffer in self._state_buffers() for bucket in buffer.buckets]

    def is_bound_to(self, buffers: Sequence[ParameterBuffer]) -> bool:
        """Return whether the optimizer updates these parameters."""
        return self._buffers == tuple(buffers)

    def rebind(self, buffers: Sequence[ParameterBuffer], share: object = None) -> None:
        """Bind to other parameters of the model, keeping the state.

        The state of parameters that were not bound before is 0. Collective if the state is
        distributed over ranks.

        Parameters
        ----------
        buffers, share
            See `bind`.
        """
        before = self.state()
        self.bind(self.backend, buffers, share)
        self.load({name: before.get(name, value) for name, value in self.state().items()})

    def step(self, wait: Callable[[Bucket], None] | None = None) -> None:
        """Update all parameters: `begin_step`, then `step_bucket` for all buckets in order.

        Parameters
        ----------
        wait : callable, optional
            ``wait(bucket)`` returns when the bucket's gradients are final. It is called once per
            bucket, in order: immediately before the bucket's update, or before the first one if all
            gradients are needed.
        """
        with outside(self.observer, "exchange"):
            self._step(wait)

    def _step(self, wait: Callable[[Bucket], None] | None) -> None:
        buckets, observer = self._buckets(), self.observer
        early, late = (wait, None) if self.needs_all_gradients else (None, wait)
        if early:
            for bucket in buckets:
                with phase(observer, "exchange", bucket.index):
                    early(bucket)
        with phase(observer, "update"):
            self.begin_step()
        for bucket in buckets:
            if late:
                with phase(observer, "exchange", bucket.index):
                    late(bucket)
            with phase(observer, "update", bucket.index):
                self.step_bucket(bucket)
        if self._wholes.parameters:
            with phase(observer, "update"):
                self._parts.mesh.gather_whole(self._wholes.parameters)
                for buffer in self._wholes.buffers:
                    self.step_bucket(buffer.buckets[0])
                self._parts.mesh.scatter_whole(self._wholes.parameters)

    def skip(self) -> None:
        """Count an update without changing parameters, for a rank without samples in this step.

        Schedules and the update count advance as on the other ranks.
        """
        self.next_terms()

    def begin_step(self) -> None:
        """Begin an update: fix its learning rate, count it, unscale and clip the gradients.

        For schemes that call `step_bucket` directly. With `needs_all_gradients`, all gradients must
        be final.
        """
        if self.binding is None:
            raise ValueError(
                f"{type(self).__name__}: bind(backend, buffers) must be called before the first "
                "step; use a Trainer, or call it"
            )
        self._terms = self.next_terms() if self._given is None else self._given
        grads = [bucket.grads[self._own[bucket.index]] for bucket in self._buckets()]
        if self.loss_scale is not None:
            self.loss_scale.unscale(grads, self._count)
            self.loss_scale.adjust()
        if self._clipping is not None:
            scales = self.scales and self.backend.scales
            scale = self._clipping.apply(self.backend, self._total, grads, scales=scales)
            self.factor = {"scale": scale} if scales else {}

    def next_terms(self) -> dict[str, float]:
        """Count an update; return its varying numbers: lr, step, and its `terms`."""
        lr = self.lr_of(self.iterations)
        self.iterations += 1
        return {"lr": lr, "step": self.iterations, **self.terms(self.iterations)}

    @contextlib.contextmanager
    def given(self, terms: Mapping[str, Number]) -> Iterator[None]:
        """Use these terms in updates instead of those of `next_terms`."""
        self._given = terms
        try:
            yield
        finally:
            self._given = None

    def _count(self, value: Number) -> Number:
        """Sum a number over all ranks; ranks with the same gradients may each add theirs."""
        return self._parts.add(self._share.total(value), self._parts.axes)

    def _total(self, number: Callable[[Array], Number]) -> Number:
        """Sum the numbers of all gradients of the network."""
        share = self._share

        def of(bucket: Bucket) -> Number:
            grads = bucket.grads[self._own[bucket.index]]
            return number(share.gather(bucket, grads) if share.exact_norms else grads)

        total = FullShare().total if share.exact_norms else share.total
        return self._parts.total(self._buckets(), of, total)

    @property
    def gradient_norm(self) -> float | None:
        """Global norm of the last update's gradients before clipping; None without `clip_norm`."""
        return None if self._clipping is None else self._clipping.norm

    def step_bucket(self, bucket: Bucket) -> None:
        """Update this rank's share of one bucket; the gradients of the share must be final."""
        parts = bucket.index not in self._slots  # of whole parameters, which follow
        if parts or (self.loss_scale is not None and not self.loss_scale.passed):
            return
        grads, runs = self._runs[bucket.index]
        if grads is not bucket.grads:  # they have other memory since
            self._runs[bucket.index] = bucket.grads, (runs := self._cut(bucket))
        for views, group, own in runs:
            terms = {**self._terms, **own}
            if group.lr_factor != 1:
                terms["lr"] = group.lr_factor * terms["lr"]
            self.update(*views, decay=group.weight_decay, **terms)
        if self.rounding is not None:
            self._round(bucket)

    def apply_average(self) -> None:
        """Replace the parameters by their average, if the rule has one: at the end of training.

        Further updates start there, with an `offset` of 0. Collective; parameters must be whole.
        """
        for bucket in self._buckets() if self.offset else ():
            offset = self.slots_of(bucket)[self.offset]
            average = bucket.values[self._own[bucket.index]] - offset
            bucket.values[...] = self._share.gather(bucket, average)
            offset[...] = 0

    @contextlib.contextmanager
    def evaluated(self) -> Iterator[None]:
        """Context in which the parameters are their average, if the rule has one. Collective."""
        buckets = self._buckets() if self.offset else []
        changed = [self.slots_of(bucket)[self.offset] for bucket in buckets]
        changed += [bucket.values for bucket in buckets]
        before = [array.copy() for array in changed]
        try:
            self.apply_average()
            yield
        finally:
            for array, values in zip(changed, before, strict=True):
                array[...] = values

    def _places(self) -> dict[str, BucketEntry]:
        """Return the parameter of every array of the state by its name."""
        return {
            f"{slot}/{entry.name}": entry
            for bucket in self._buckets()
            for slot in self.slots
            for entry in bucket.parameters
            if self.uses(slot, entry)
        }

    @property
    def is_whole(self) -> bool:
        """Whether this rank stores all of the state of its parameters."""
        whole = (self._own[b.index] == slice(0, len(b.values)) for b in self._buckets())
        return not self._wholes.shapes and all(whole)

    def slots_of(self, bucket: Bucket) -> dict[str, Array]:
        """Return the slots of this rank's range of a bucket by name."""
        return dict(zip(self.slots, self._slots[bucket.index], strict=True))

    def stored(self) -> Iterator[StoredState]:
        """Yield what this rank stores of each slot of each parameter."""
        for bucket in self._state_buckets():
            own = self._own[bucket.index]
            for slot in self.slots:
                for entry in filter(partial(self.uses, slot), bucket.parameters):
                    place = entry.slice
                    start, stop = max(place.start, own.start), min(place.stop, own.stop)
                    if start < stop or start == stop == place.start == place.stop:  # or it is empty
                        values = self._part(slot, bucket, slice(start, stop))
                        yield StoredState(slot, entry, start - place.start, values)

    def state(self) -> dict[str, Any]:
        """Return a copy of the state. Collective if the state is distributed over ranks.

        Returns
        -------
        dict
            Per slot and parameter a NumPy array ``"velocity/<parameter>"`` of the parameter's
            shape (of the whole one, if the rule requires it) or of its `slot_form`, and the numbers
            "iterations" and "lr_factor". Independent of buckets, padding and ranks.
        """
        state: dict[str, Any] = {}
        wholes: dict[str, Any] = {}
        for bucket in self._state_buckets():
            owned = bucket.parameters[0].name in self._wholes.shapes
            share, into = (FullShare(), wholes) if owned else (self._share, state)
            for slot, part in self.slots_of(bucket).items():
                place = partial(self._place, slot, bucket)
                whole = self.backend.to_numpy(share.gather(bucket, part, place))
                for entry in filter(partial(self.uses, slot), bucket.parameters):
                    values = whole[place(entry.slice.start) : place(entry.slice.stop)]
                    shape = self.slot_form(slot, entry)[0]
                    into[f"{slot}/{entry.name}"] = values.reshape(shape).copy()
        if self._wholes.shapes:
            state |= self._parts.mesh.merge_states(wholes)
        return state | {"iterations": self.iterations, "lr_factor": self.lr_factor}

    def check_state(
        self, state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]] | None = None
    ) -> tuple[int, float]:
        """Return the numbers of a saved state: `iterations` and `lr_factor`.

        Parameters
        ----------
        state : mapping
            Of the arrays, only shapes are used.
        shapes : mapping of str to tuple, optional
            Shapes of parameters by name, if not those of this rank's parts.

        Raises
        ------
        ValueError
            See `load`.
        """
        shapes = {**self._wholes.shapes, **(shapes or {})}
        who, expected = type(self).__name__, {}
        for name, entry in self._places().items():
            whole = entry._replace(shape=shapes.get(entry.name, entry.shape))
            expected[name] = self.slot_form(name.partition("/")[0], whole)[0]
        check_saved(who, expected, state)
        iterations = check_int(who, "iterations", state["iterations"], at_least=0)
        return iterations, check_float(who, "lr_factor", state["lr_factor"], at_least=0)

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the state returned by `state`; nothing is changed if it does not fit.

        Raises
        ------
        ValueError
            If a name is missing or unexpected, an array has a wrong shape, or a number is out of
            its limits.
        """
        iterations, lr_factor = self.check_state(state)
        for slot, entry, start, values in self.stored():
            flat = self.backend.asarray(state[f"{slot}/{entry.name}"], values.dtype).reshape(-1)
            values[...] = flat[start : start + len(values)]
        self.iterations, self.lr_factor = iterations, lr_factor
