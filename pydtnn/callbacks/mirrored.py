"""Evaluation of images together with their mirror images, and moved by some pixels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from pydtnn.kernels.reference.family import Array
from pydtnn.training.callback import Callback, Training
from pydtnn.training.capabilities import why_not
from pydtnn.utils.errors import AgreedError
from pydtnn.utils.validate import check_int


class MirroredEvaluation(Callback):
    """Evaluate the mean of the outputs for an image and for its mirror image, left to right.

    Training and the saved model are not changed. An evaluation takes twice as long.

    Parameters
    ----------
    moved : int
        If it is not 0, the mean is that of six images: also of those that are moved by this number
        of pixels along both axes, down and to the right or up and to the left, and of their mirror
        images. Pixels without a value are 0, as outside of a padded image. An evaluation takes six
        times as long, so that of all epochs only the last one's is such a mean; the others evaluate
        the image alone.

    Raises
    ------
    AgreedError
        When training or evaluation starts, on all ranks, if samples are no images or a rank has no
        whole outputs.

    References
    ----------
    Krizhevsky, Sutskever and Hinton, "ImageNet classification with deep convolutional neural
    networks", NeurIPS 2012, section 4.1. Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU",
    2024, section 3.5, for images that are moved by one pixel.
    """

    reads_gradients = False

    def __init__(self, moved: int = 0) -> None:
        self.moved = check_int(type(self).__name__, "moved", moved, at_least=0)
        self._epochs = 0  # of the training that is under way

    def on_fit_start(self, trainer: Training, epochs: int, steps: int) -> None:
        """Check that samples are images."""
        self._check(trainer)
        self._epochs = epochs

    def close(self) -> None:
        """Let evaluations after the training be means."""
        self._epochs = 0

    def means(self, epoch: int, epochs: int) -> bool:
        """Return whether the evaluation after an epoch (from 0) of a training is a mean."""
        return not self.moved or epoch + 1 >= epochs

    def _check(self, trainer: Training) -> None:
        shape, *_ = trainer.model.input_shapes
        why = why_not("mirrored evaluation", trainer.setup)
        if not why and len(shape) != 3:
            why = f"requires images (H, W, C), got samples of shape {shape}; omit it"
        if not why and self.moved >= min(shape[:2]):
            why = f"requires images of more than {self.moved} pixels, got {shape}; reduce moved"
        if why:
            raise AgreedError(f"{type(self).__name__} {why}")

    @contextlib.contextmanager
    def evaluated(self, trainer: Training) -> Iterator[None]:
        """Context in which the model gives the mean of all outputs."""
        self._check(trainer)
        if not self.means(trainer.epoch, self._epochs):
            yield
            return
        model, forward = trainer.model, trainer.model.forward

        def mean(x: Array | tuple[Array, ...], *arguments: Any, **options: Any) -> tuple[Any, Any]:
            y, saved = forward(x, *arguments, **options)
            y = y.copy()  # its memory may be used again
            rest = views(model.backend.xp, x[0] if isinstance(x, tuple) else x, self.moved)
            for view in rest:
                y += forward(view, *arguments, **options)[0]
            y /= 1 + len(rest)
            return y, saved

        nested = "forward" in vars(model)
        if not nested:
            vars(model)["forward"] = mean
        try:
            yield
        finally:
            if not nested:
                del vars(model)["forward"]


def views(xp: Any, x: Array, moved: int) -> list[Array]:
    """Return the mirror images of images (N, H, W, C), and, if `moved` is not 0, four moved ones.

    Parameters
    ----------
    xp : module
        Of the arrays.
    x : Array
    moved : int
        Pixels.
    """
    found, ends = [x], (slice(moved, None), slice(None, -moved))
    for to, of in (ends, ends[::-1]) if moved else ():
        found.append(xp.zeros_like(x))
        found[-1][:, to, to] = x[:, of, of]
    return [*found[1:], *(xp.ascontiguousarray(view[:, :, ::-1]) for view in found)]
