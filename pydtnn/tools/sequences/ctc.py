"""The loss of sequences of labels whose positions in the input are unknown."""

from __future__ import annotations

import numpy as np

from pydtnn.kernels import Backend
from pydtnn.kernels.reference.family import Array, Number
from pydtnn.losses import Loss
from pydtnn.utils.validate import check_int


class CTC(Loss):
    """Connectionist temporal classification: labels in their order, at unknown positions.

    ``L = sum_n -log P(labels_n)``, where a path has a class at each position, its labels are those
    classes without repetitions and then without blanks, its probability is the product of
    softmax(logits), and P is the sum over all paths of the labels.

    Parameters
    ----------
    blank : int, default 0
        The class that is no label.

    Notes
    -----
    Logits ``(N, T, K)``. Targets ``(N, 1 + S)``: the number of positions of the sample, and up to S
    labels, behind which the others are `blank`. Computed on the host in float64, in logarithms.

    References
    ----------
    Graves et al., "Connectionist temporal classification", ICML 2006, section 4.
    """

    def __init__(self, blank: int = 0) -> None:
        self.blank = check_int("CTC", "blank", blank, at_least=0)

    def check(self, shape: tuple[int, ...], target: Array) -> None:
        """Raise ValueError if targets are not lengths and labels for which there are paths."""
        if len(shape) != 3 or target.ndim != 2 or len(target) != shape[0]:
            raise ValueError(
                "CTC: expected logits (N, T, K) and targets (N, 1 + S), lengths and labels, got "
                f"{shape} and {target.shape}"
            )
        (_, positions, classes), lengths, labels = shape, target[:, 0], target[:, 1:]
        given = labels != self.blank
        repeated = given[:, 1:] & (labels[:, 1:] == labels[:, :-1])  # with a blank between
        wrong = (lengths < given.sum(axis=1) + repeated.sum(axis=1)) | (lengths > positions)
        wrong |= ((labels < 0) | (labels >= classes)).any(axis=1) | (lengths < 1)
        if (wrong | (given[:, 1:] > given[:, :-1]).any(axis=1)).any():
            raise ValueError(
                f"CTC: expected a length in 1..{positions}, then labels in 0..{classes - 1} for "
                f"which it has room, and {self.blank} behind them; check the targets"
            )

    def compute(
        self, backend: Backend, y: Array, target: Array, scale: Number, out: Array
    ) -> Number:
        """Add up the paths of a beginning of the labels, and those of the end, at each position."""
        scores, target = backend.to_numpy(y).astype(np.float64), backend.to_numpy(target)
        log_p = scores - np.logaddexp.reduce(scores, axis=2, keepdims=True)
        lengths, labels, (n, positions, _) = target[:, 0], target[:, 1:], scores.shape
        states = np.full((n, 2 * labels.shape[1] + 1), self.blank)
        states[:, 1::2] = labels
        emitted = np.take_along_axis(log_p, states[:, None], axis=2)
        skipped = (states[:, 2:] != self.blank) & (states[:, 2:] != states[:, :-2])
        behind = 2 * (labels != self.blank).sum(axis=1)[:, None] - np.arange(states.shape[1])
        last = np.where((behind == 0) | (behind == 1), 0.0, -np.inf)
        begins, ends = np.full((2, *emitted.shape), -np.inf)
        begins[:, 0, :2] = emitted[:, 0, :2]
        for t in range(1, positions):
            begins[:, t] = _reached(begins[:, t - 1], skipped) + emitted[:, t]
        for t in reversed(range(positions)):
            if t + 1 < positions:
                after = (ends[:, t + 1] + emitted[:, t + 1])[:, ::-1]
                ends[:, t] = _reached(after, skipped[:, ::-1])[:, ::-1]
            ends[lengths == t + 1, t] = last[lengths == t + 1]
        paths = begins + ends
        log_sums = np.logaddexp.reduce(paths[:, 0], axis=1)
        exists = np.arange(positions) < lengths[:, None]
        gradient = np.exp(log_p) * exists[:, :, None]
        place = np.arange(n)[:, None, None], np.arange(positions)[:, None], states[:, None]
        np.subtract.at(gradient, place, np.exp(paths - log_sums[:, None, None]))
        out[...] = scale * backend.asarray(gradient, out.dtype)
        return -float(log_sums.sum())


def _reached(before: Array, skipped: Array) -> Array:
    """Return logarithms of the sums of the paths that reach each state from those before."""
    stay, one, two = np.full((3, *before.shape), -np.inf)
    stay[...] = before
    one[:, 1:] = before[:, :-1]
    two[:, 2:] = np.where(skipped, before[:, :-2], -np.inf)
    return np.logaddexp(np.logaddexp(stay, one), two)
