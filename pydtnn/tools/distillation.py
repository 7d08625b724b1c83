"""Distillation: the outputs of a trained model as targets beside the labels."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.comm.agree import together
from pydtnn.data.batch import parts
from pydtnn.kernels import Backend
from pydtnn.kernels.reference.family import Array, Number
from pydtnn.layers import StepContext
from pydtnn.layers.node import Node
from pydtnn.losses import KLDivergence, Loss
from pydtnn.model import Model
from pydtnn.model.passes import Hook, Pass, Run
from pydtnn.saving import load
from pydtnn.training.callback import Callback, Training
from pydtnn.utils.validate import check_float

LIKE = "of the teacher, like that of the model that is trained,"


class Teacher(Callback):
    """Train with the outputs of another model, which is not changed, beside the labels.

    ``L = (1 - w) L_labels + w T^2 sum_n KL(softmax(z_n / T) || softmax(y_n / T))`` with the logits
    y of the model and z of the teacher for the same samples, which are augmented, mixed and
    normalised alike. The teacher has no dropout, and its batch norm uses running statistics.
    Positions whose label the loss ignores have no such term. The loss of an evaluation is that of
    the labels.

    Parameters
    ----------
    model : Model, str or Path
        The teacher, or the folder of a saved model or of a run.
    temperature : float
        The `T` above, above 0.
    weight : float
        The `w` above, from 0 to 1.

    Raises
    ------
    AgreedError
        When training starts, on all ranks, if the teacher cannot be loaded, or has inputs, outputs
        or classes that are not those of the model; if the loss is not one of classes; or if ranks
        have parts of the network.

    References
    ----------
    Hinton, Vinyals and Dean, "Distilling the knowledge in a neural network", 2015, section 2.
    """

    reads_gradients = False

    def __init__(
        self, model: Model | str | Path, temperature: float = 2.0, weight: float = 0.5
    ) -> None:
        self.model = model
        self.temperature = check_float("Teacher", "temperature", temperature, above=0)
        self.weight = check_float("Teacher", "weight", weight, at_least=0, at_most=1)
        self._trainer: Training | None = None

    def on_fit_start(self, trainer: Training, epochs: int, steps: int) -> None:
        """Add the term to the loss. Collective: all ranks call it."""
        self.close()
        taught = together(trainer.comm, self._create_loss, trainer)
        trainer.objective.losses = (taught, *trainer.objective.losses[1:])
        trainer.model.graph.hooks.append(taught)
        self._trainer = trainer

    def close(self) -> None:
        """Train with the labels alone from now on."""
        if self._trainer is not None:
            taught: Any = self._trainer.objective.losses[0]
            self._trainer.objective.losses = (taught.loss, *self._trainer.objective.losses[1:])
            self._trainer.model.graph.hooks.remove(taught)
            self._trainer = None

    def _create_loss(self, trainer: Training) -> TaughtLoss:
        """Return the loss for a teacher that fits."""
        model, teacher, loss = trainer.model, self.model, trainer.objective.losses[0]
        if not isinstance(teacher, Model):
            teacher = load(teacher, backend=model.backend, dtype=str(model.dtype))
        axes = ", ".join(() if model.mesh is None else model.mesh.model_axes) or "none"
        for what, expected, given in (
            (f"the shape of inputs {LIKE}", model.input_shapes, teacher.input_shapes),
            (f"the shape of outputs {LIKE}", model.output_shapes[0], teacher.output_shapes[0]),
            (f"classes {LIKE}", *(m.inputs and m.inputs.class_names for m in (model, teacher))),
            ("what the loss compares", "classes", loss.task),
            ("axes along which ranks have parts of the network", "none", axes),
        ):
            if given != expected and None not in (given, expected):
                raise ValueError(f"Teacher: {what} must be {expected!s:.60}, got {given!s:.60}")
        return TaughtLoss(loss, teacher, self.temperature, self.weight)


class TaughtLoss(Loss, Hook):
    """The loss of `Teacher`, which as a hook passes the inputs of training through the teacher.

    In an evaluation, it is that of the labels.

    Parameters
    ----------
    loss : Loss
        Of the labels.
    teacher : Model
    temperature, weight : float
    """

    def __init__(self, loss: Loss, teacher: Model, temperature: float, weight: float) -> None:
        self.loss, self.teacher, self.weight = loss, teacher, weight
        self.ignore_index, self.counts_targets = loss.ignore_index, loss.counts_targets
        self.check, self.count = loss.check, loss.count  # type: ignore[method-assign]
        self.divergence = KLDivergence(temperature, True, ignore_nan=loss.counts_targets)
        self.outputs = deque[Array]()  # of shards whose loss is to be computed

    def forward(self, run: Run) -> Run:
        """Compute the teacher's outputs before the first layer."""

        def asking(node: Node, state: Any) -> Pass:
            if state.context.training and node is state.graph.part(None).layers[0]:
                xs = tuple(state.values[source.index] for source in state.graph.inputs)
                y, _ = self.teacher.forward(xs, StepContext(training=False), keep=False)
                self.outputs.append(parts(y)[0])
            return run(node, state)

        return asking

    def again(self, run: Run) -> Run:
        """Return the function itself: the outputs are known when layers are recomputed."""
        return run

    def compute(
        self, backend: Backend, y: Array, target: Array, scale: Number, out: Array
    ) -> Number:
        if not self.outputs:
            return self.loss.compute(backend, y, target, scale, out)
        z, dy, w = self.outputs.popleft(), backend.empty(y.shape, y.dtype), self.weight
        if self.counts_targets and target.ndim < y.ndim:
            z = backend.xp.where((target == self.ignore_index)[..., None], np.nan, z)
        value = (1 - w) * self.loss.compute(backend, y, target, (1 - w) * scale, out)
        value += w * self.divergence.compute(backend, y, z, w * scale, dy)
        out += dy
        return value
