"""The objective of training: a loss and metrics for each output of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from pydtnn.data import Dataset
from pydtnn.data.batch import parts
from pydtnn.data.dataset import read_samples
from pydtnn.data.inputs import Inputs, inputs_of
from pydtnn.kernels import Backend
from pydtnn.kernels.reference.family import Array, Number
from pydtnn.layers.base import Layer
from pydtnn.layers.collectives import AllGather
from pydtnn.layers.node import Node
from pydtnn.layers.parameters import Cut
from pydtnn.losses import Loss, get_loss
from pydtnn.losses.cut import CutClasses, CutPositions
from pydtnn.metrics import Metric, get_metric
from pydtnn.model.partition.exchange import Exchange
from pydtnn.parallel.mesh import Mesh
from pydtnn.training.metric_sums import Totals
from pydtnn.utils.validate import check_float

Losses = Loss | str | Sequence[Loss | str]
Metrics = Sequence[Metric | str] | Sequence[Sequence[Metric | str]]


class Objective:
    """The weighted sum of the losses of all outputs, and their metrics.

    ``L = sum_i weight_i L_i``. With one output its values are named "loss" and after the metrics;
    with several, "loss" is the sum, and those of output i are "output<i>.loss",
    "output<i>.accuracy" and so on.

    Auxiliary outputs are those after the first, if they have weights of their own. They have the
    loss and the targets of the first, and no metrics; the names are those of one output. Their
    losses are part of "loss" in training only, so that an evaluation is that of the first output.

    Parameters
    ----------
    backend : Backend
    shapes : sequence of tuple of int
        Shape of each output of the model, of one sample.
    loss, weights, metrics, auxiliary
        See `pydtnn.Trainer`; `auxiliary` are the weights of auxiliary outputs.

    Attributes
    ----------
    losses : tuple of Loss
    weights : tuple of float
    metrics : tuple of tuple of Metric
        For each output.
    better : dict of str to str
        For each number by its name, "max" or "min": whether larger or smaller is better.
    results : dict of str to callable
        For each metric by its name, `Metric.result`.
    sizes : dict of str to int
        For each metric by its name, `Metric.size`.
    names : tuple of str
        Names of the values, in the order of `Totals`.
    unread : sequence of bool
        For each output, whether its gradient may overwrite it: see `Model.unread_outputs`.

    Raises
    ------
    TypeError, ValueError
        If there is not one loss, weight and list of metrics for each output.
    """

    def __init__(
        self,
        backend: Backend,
        shapes: Sequence[tuple[int, ...]],
        loss: Losses,
        weights: Sequence[float] | None,
        metrics: Metrics | None,
        auxiliary: Sequence[float] | None = None,
    ) -> None:
        self.backend, outputs = backend, len(shapes)
        self._main = main = outputs if auxiliary is None else 1
        self._shapes = tuple(shapes)
        self._parts: tuple[CutClasses | CutPositions | None, ...] = (None,) * outputs
        self.unread: Sequence[bool] = (False,) * outputs
        losses = tuple(map(get_loss, _one_each("loss", loss, main)))
        self.losses = losses if auxiliary is None else losses * outputs
        if auxiliary is not None:
            weights = _weights_with(auxiliary, weights, outputs)
        given = (1.0,) * outputs if weights is None else weights
        name = "loss_weights" if auxiliary is None else "auxiliary_weights"
        self.weights = tuple(
            check_float("Trainer", f"a weight of {name}", weight, at_least=0)
            for weight in _one_each(name, given, outputs)
        )
        given_metrics = [None] * main if metrics is None else _metrics(metrics, main)
        own_metrics = tuple(
            tuple(metrics_of(loss, own)) for loss, own in zip(losses, given_metrics, strict=True)
        )
        self.metrics = (*own_metrics, *((),) * (outputs - main))
        self.better = {"loss": "min"}
        self.results: dict[str, Callable[[Any, int], Any]] = {}
        self.sizes: dict[str, int] = {}
        names = [] if main == 1 else ["loss"]
        for i, own in enumerate(own_metrics):
            for metric in own:
                metric.prepare((1, *shapes[i]))
            prefix = f"output{i}." if main > 1 else ""
            self.better |= {f"{prefix}loss": "min"}
            self.better |= {f"{prefix}{m.name}": m.better for m in own if m.better}
            self.results |= {f"{prefix}{metric.name}": metric.result for metric in own}
            self.sizes |= {f"{prefix}{metric.name}": metric.size for metric in own}
            if losses[i].counts_targets and main > 1:
                self.sizes[f"{prefix}loss"] = 2
                self.results[f"{prefix}loss"] = _quotient
            names += [f"{prefix}loss", *(f"{prefix}{metric.name}" for metric in own)]
        self.names = tuple(names)
        self._counted = any(loss.counts_targets for loss in self.losses)
        if self._counted:
            self.sizes["loss"], self.results["loss"] = 2 * outputs, self._sum_of_quotients

    def describe(self, train: Dataset) -> Inputs:
        """Describe a training set, and what the outputs predict: see `Inputs`."""
        targets = self._for_each(parts(read_samples(train, np.zeros(1, np.int64))[1]))
        counts = self._for_each(parts(train.classes))
        rows = zip(self.losses, counts, targets, self._shapes, strict=False)
        tasks = tuple(
            "classes"
            if n and (not loss.task or (y.ndim == 1 and 1 < n == shape[-1]))
            else loss.task
            for loss, n, y, shape in rows
        )
        return replace(inputs_of(train), tasks=tasks)

    def check(self, shapes: Sequence[tuple[int, ...]], targets: Sequence[Array]) -> None:
        """Raise ValueError if targets do not fit losses and metrics of outputs of these shapes."""
        targets = self._for_each(targets)
        if len(targets) != len(self.losses):
            raise ValueError(
                f"Trainer: expected {len(self.losses)} targets, one for each output of the model, "
                f"got {len(targets)}; return a tuple of targets from the data set's read"
            )
        for loss, metrics, shape, target in zip(
            self.losses, self.metrics, shapes, targets, strict=True
        ):
            loss.check(shape, target)
            check_metrics(metrics, shape, target)

    def cut(self, outputs: Sequence[Node], mesh: Mesh) -> bool:
        """Find outputs that ranks can have in part; return whether losses and metrics take parts.

        Parameters
        ----------
        outputs : sequence of Node
            Of this rank's part of the network.
        mesh : Mesh
        """

        def part_of(layer: Layer) -> CutClasses | CutPositions | None:
            if not isinstance(layer, Exchange) or not layer.optional:
                return None
            axis, cut = layer.axis, cast(Cut, layer.before)
            own = cut.range(mesh.position)

            def gather(numbers: Array) -> Array:
                bounds = range(mesh.shape[axis] + 1)
                return mesh.start("loss", AllGather(numbers, axis, dim=0, bounds=bounds)).wait()

            if cut.dim < len(layer.output_shape) - 1:
                return CutPositions(own, gather)
            return CutClasses(own.start, gather)

        found = [part_of(node.layer) for node in outputs]
        parts = zip(found, self.losses, self.metrics, strict=False)  # other stages have none
        if not any(found) or not all(
            part is None or (loss.takes_parts and all(m.takes_parts for m in own))
            for part, loss, own in parts
        ):
            return False
        self._parts = tuple(found)
        return True

    def takes_parts(self, target: Any) -> bool:
        """Return whether losses are computed on parts of outputs: if targets are classes."""
        targets = self._for_each(target if isinstance(target, tuple) else (target,))
        return any(self._parts) and all(
            part is None or (target.dtype.kind in "biu" and target.ndim == len(shape))
            for part, target, shape in zip(self._parts, targets, self._shapes, strict=True)
        )

    def counts(self, shapes: Sequence[tuple[int, ...]], target: Any) -> Array | None:
        """Return the number of targets that the mean of each loss divides by.

        Parameters
        ----------
        shapes : sequence of tuple of int
            Shape ``(N, ...)`` of each output.
        target : ndarray, or a tuple of one per output

        Returns
        -------
        ndarray of float64, shape ``(outputs,)``, or None
            None if all losses divide by the number of samples.
        """
        if not self._counted:
            return None
        targets = self._for_each(target if isinstance(target, tuple) else (target,))
        rows = zip(self.losses, shapes, targets, strict=True)
        return np.array([float(loss.count(shape, part)) for loss, shape, part in rows])

    def compute(
        self,
        y: Any,
        target: Any,
        scale: Number,
        totals: Totals,
        *,
        training: bool = True,
        ratios: Sequence[float] | None = None,
    ) -> Any:
        """Add all values to `totals`; return the gradient of the scaled loss.

        Targets on the host are checked; those on a device must have been checked before.

        Parameters
        ----------
        y, target : Array, or a tuple of one per output
            Outputs may be parts (`takes_parts`); then this is collective. In training those that
            are `unread` are overwritten by their gradients, if their losses can do that.
        scale : Number
            Factor on the gradient.
        totals : Totals
        training : bool
            Whether the losses of auxiliary outputs are added to that of the first.
        ratios : sequence of float, optional
            A further factor on the gradient for each output: samples per counted target.

        Returns
        -------
        Array, or a tuple of one per output
        """
        ys = y if isinstance(y, tuple) else (y,)
        targets = self._for_each(target if isinstance(target, tuple) else (target,))
        if isinstance(targets[0], np.ndarray):
            self.check([(len(ys[0]), *shape) for shape in self._shapes], targets)
        sums: list[Number] = []
        terms: list[Number] = []
        dys: list[Array] = []
        xp = self.backend.xp
        loss: Any
        for y, target, loss, weight, metrics, ratio, shape, part, unread in zip(
            *(ys, targets, self.losses, self.weights, self.metrics),
            ratios or (1.0,) * len(ys),
            *(self._shapes, self._parts, self.unread),
            strict=True,
        ):
            target, overwrites = self.backend.asarray(target), unread and loss.overwrites
            dy = y if training and overwrites else self.backend.empty(y.shape, y.dtype)
            factor = scale if weight * ratio == 1 else weight * ratio * scale
            if y.shape[1:] == shape:
                own = [metric.compute(xp, y, target) for metric in metrics]
                value = loss.compute(self.backend, y, target, factor, dy)
            elif isinstance(part, CutPositions):
                here, share = target[:, part.own], y.shape[1] / shape[0]
                own = [metric.compute(xp, y, here) for metric in metrics]
                means = [loss.compute(self.backend, y, here, share * factor, dy), *own]
                numbers = share * xp.stack([xp.asarray(mean, "float64") for mean in means])
                value, *own = part.gather(numbers[None]).sum(axis=0)
            else:
                value, scores = loss.compute_cut(self.backend, y, target, factor, dy, part)
                own = [metric.compute_cut(scores, target) for metric in metrics]
            if self._counted:
                pair = value, loss.count((len(y), *shape), target)
                terms.append(xp.stack([xp.asarray(number, "float64") for number in pair]))
                value = terms[-1] if loss.counts_targets else value
            else:
                terms.append(value if weight == 1 else weight * value)
            sums += [value, *own]
            dys.append(dy)
        if self._counted:
            unused = range(len(terms) if training else self._main, len(terms))
            total = xp.concatenate(
                [0 * term if i in unused else term for i, term in enumerate(terms)]
            )
        else:
            terms = terms if training else terms[: self._main]
            total = sum(terms[1:], terms[0])
        sums = sums if self._main > 1 else sums[1 : 1 + len(self.metrics[0])]
        totals.add(len(targets[0]), total, *sums)
        return dys[0] if len(ys) == 1 else tuple(dys)

    def add_penalties(
        self, values: Sequence[Number], totals: Totals, ratios: Sequence[float] | None
    ) -> None:
        """Add losses of layers, which are sums over samples, to the loss.

        Parameters
        ----------
        values : sequence of Number
        totals : Totals
        ratios : sequence of float, optional
            See `compute`.
        """
        factor = 1.0
        if self._counted and ratios is not None:  # the first loss is a weighted quotient of sums
            factor = self.weights[0] * ratios[0]
        if factor and self.backend.has_values:
            totals.values[0] += sum(values) / factor

    def tokens(self, totals: Totals) -> float:
        """Return the mean number of tokens of a sample that the first output predicts.

        Those of `ignore_index` do not count. 0 if the output is no sequence of logits.
        """
        shape, loss = self._shapes[0], self.losses[0]
        if len(shape) != 2 or loss.task != "classes" or not totals.count:
            return 0.0
        return float(totals.values[1] / totals.count if loss.counts_targets else shape[0])

    def _sum_of_quotients(self, sums: Array, count: int) -> float:
        """Return the weighted sum of the means of all losses."""
        pairs = sums.reshape(-1, 2)
        return sum(w * _quotient(pair, count) for w, pair in zip(self.weights, pairs, strict=True))

    def _for_each(self, targets: Sequence[Array]) -> Sequence[Array]:
        """Return a target for each output: auxiliary ones have that of the first."""
        repeated = self._main < len(self.losses) and len(targets) == 1
        return [*targets] * len(self.losses) if repeated else targets


def _quotient(sums: Array, count: int) -> float:
    """Return the mean of a loss over its counted targets; 0 without any."""
    return float(sums[0] / sums[1]) if sums[1] else 0.0


def metrics_of(loss: Loss, metrics: Sequence[Metric | str] | None) -> list[Metric]:
    """Return metrics beside a loss: by default its own.

    Those that are given by name have its `ignore_index` and `threshold`.
    """
    made = []
    for metric in loss.metrics if metrics is None else metrics:
        known = get_metric(metric)
        if isinstance(metric, str) and hasattr(known, "ignore_index"):
            known.ignore_index = loss.ignore_index
        if isinstance(metric, str) and loss.threshold is not None and hasattr(known, "threshold"):
            known.threshold = loss.threshold
        made.append(known)
    return made


def check_metrics(metrics: Sequence[Metric], shape: tuple[int, ...], target: Array) -> None:
    """Raise ValueError if a target does not fit a metric of an output of this shape."""
    for metric in metrics:
        try:
            metric.check(shape, target)
        except ValueError as error:
            raise ValueError(
                f"{error}; or choose other metrics than {metric.name} (metrics=[...], --metrics)"
            ) from error


def _weights_with(
    auxiliary: Sequence[float], weights: Sequence[float] | None, outputs: int
) -> tuple[float, ...]:
    """Return the weights of all outputs from those of the auxiliary ones."""
    if weights is not None:
        raise ValueError(
            "Trainer: loss_weights and auxiliary_weights cannot be used together, got "
            f"{weights!r} and {auxiliary!r}"
        )
    if not isinstance(auxiliary, Sequence) or len(auxiliary) != outputs - 1:
        raise ValueError(
            f"Trainer: auxiliary_weights must be a list of {outputs - 1}, one for each output of "
            f"the model after the first, got {auxiliary!r}"
        )
    return (1.0, *auxiliary)


def _one_each(name: str, given: Any, outputs: int) -> Sequence[Any]:
    """Return one item per output; a single output needs no list."""
    if outputs == 1 and not isinstance(given, list | tuple):
        return [given]
    if isinstance(given, Loss | str) or not isinstance(given, Sequence) or len(given) != outputs:
        shared = "; pass auxiliary_weights if it is that of auxiliary outputs, too"
        raise ValueError(
            f"Trainer: {name} must be a list of {outputs}, one for each output of the model, "
            f"got {given!r}{shared if isinstance(given, Loss | str) else ''}"
        )
    return given


def _metrics(given: Any, outputs: int) -> Sequence[Sequence[Metric | str]]:
    """Return a list of metrics per output; a single output has a plain list."""
    nested = all(isinstance(own, list | tuple) for own in given)
    if nested and len(given) == outputs:
        return [*given]
    if outputs == 1:
        return [given]
    raise ValueError(
        f"Trainer: metrics must be {outputs} lists, one for each output of the model, such as "
        f"{[['accuracy']] * outputs}, got {given!r}"
    )
