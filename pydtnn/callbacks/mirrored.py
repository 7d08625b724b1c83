"""Evaluation of images together with their mirror images."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from pydtnn.kernels.reference.family import Array
from pydtnn.training.callback import Callback, Training
from pydtnn.training.capabilities import why_not
from pydtnn.utils.errors import AgreedError


class MirroredEvaluation(Callback):
    """Evaluate the mean of the outputs for an image and for its mirror image, left to right.

    Training and the saved model are not changed. An evaluation takes twice as long.

    Raises
    ------
    AgreedError
        When training or evaluation starts, on all ranks, if samples are no images or a rank has no
        whole outputs.

    References
    ----------
    Krizhevsky, Sutskever and Hinton, "ImageNet classification with deep convolutional neural
    networks", NeurIPS 2012, section 4.1.
    """

    reads_gradients = False

    def on_fit_start(self, trainer: Training, epochs: int, steps: int) -> None:
        """Check that samples are images."""
        shape, *_ = trainer.model.input_shapes
        why = why_not("mirrored evaluation", trainer.setup)
        if not why and len(shape) != 3:
            why = f"requires images (H, W, C), got samples of shape {shape}; omit it"
        if why:
            raise AgreedError(f"{type(self).__name__} {why}")

    @contextlib.contextmanager
    def evaluated(self, trainer: Training) -> Iterator[None]:
        """Context in which the model gives the mean of both outputs."""
        self.on_fit_start(trainer, 0, 0)
        model, forward = trainer.model, trainer.model.forward

        def mean(x: Array | tuple[Array, ...], *arguments: Any, **options: Any) -> tuple[Any, Any]:
            y, saved = forward(x, *arguments, **options)
            y = y.copy()  # its memory may be used again
            images = x[0] if isinstance(x, tuple) else x
            mirrored = model.backend.xp.ascontiguousarray(images[:, :, ::-1])
            y += forward(mirrored, *arguments, **options)[0]
            y *= 0.5
            return y, saved

        nested = "forward" in vars(model)
        if not nested:
            vars(model)["forward"] = mean
        try:
            yield
        finally:
            if not nested:
                del vars(model)["forward"]
