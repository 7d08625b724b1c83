"""Which arrays of a state dict are those of a model: by names, or by order and shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

import numpy as np

from pydtnn.interchange.slots import PROJECTION, Slot
from pydtnn.layers.base import Shape
from pydtnn.utils.suggest import some
from pydtnn.utils.text_table import align

COUNTER = "num_batches_tracked"
"""Batches that a batch norm of PyTorch has seen, which the model does not count."""


@dataclass(frozen=True)
class Misfit:
    """An array that was not matched.

    Attributes
    ----------
    problem : str
        "missing", "extra", "transposed" (the expected shape with its axes in another order) or
        "wrong shape".
    ours, theirs : str
        Names in the model and in the state dict; empty if there is none.
    expected, given : tuple of int or None
        Shapes in PyTorch's layout.
    """

    problem: str
    ours: str = ""
    theirs: str = ""
    expected: Shape | None = None
    given: Shape | None = None

    def __str__(self) -> str:
        if self.problem in ("missing", "extra"):
            return f"{self.ours or self.theirs} is {self.problem}"
        transposed = ", as if transposed" * (self.problem == "transposed")
        return f"{self.theirs} has shape {self.given} instead of {self.expected}{transposed}"


@dataclass(frozen=True)
class StateDictReport:
    """Comparison of a state dict with a model; ``print(report)`` shows what does not fit.

    Attributes
    ----------
    by : str
        "names" or "order": what arrays were matched by.
    pairs : dict of str to str
        Names of the arrays in the state dict, by those in the model.
    misfits : tuple of Misfit
    """

    by: str
    pairs: dict[str, str] = field(default_factory=dict)
    misfits: tuple[Misfit, ...] = ()

    def check(self, *, strict: bool) -> None:
        """Raise ValueError if nothing fits the model, or, if `strict`, not everything does.

        Raises
        ------
        ValueError
        """
        if self.misfits and (strict or not self.pairs):
            which = "arrays do not fit" if strict else "no array fits"
            problems = some([str(misfit) for misfit in self.misfits], 4)
            raise ValueError(f"{which} the model (matched by {self.by}): {problems}")

    def __str__(self) -> str:
        total = len(self.pairs) + sum(bool(misfit.ours) for misfit in self.misfits)
        lines = [f"matched {len(self.pairs)} of {total} arrays by {self.by}"]
        if self.misfits:
            head = ("problem", "array here", "array there", "expected", "got")
            rows = [(m.problem, m.ours, m.theirs, m.expected, m.given) for m in self.misfits]
            cells = [["-" if cell in ("", None) else str(cell) for cell in row] for row in rows]
            lines += align([head, *cells], left=5)
        return "\n".join(lines)


def fit(
    slots: Sequence[Slot], arrays: Mapping[str, np.ndarray], *, strict: bool
) -> tuple[StateDictReport, dict[str, np.ndarray]]:
    """Match the arrays of a state dict, and return those that fit, in the layouts of the model.

    Raises
    ------
    ValueError
        If an array has no counterpart of its shape (without `strict`: none has).
    """
    report = match(slots, {name: array.shape for name, array in arrays.items()})
    report.check(strict=strict)
    fitting = [slot for slot in slots if slot.name in report.pairs]
    return report, {slot.name: slot.to_ours(arrays[report.pairs[slot.name]]) for slot in fitting}


def match(slots: Sequence[Slot], shapes: Mapping[str, Shape]) -> StateDictReport:
    """Find the arrays of a state dict that belong to those of a model.

    Arrays of the same layer are matched together, by PyTorch's names of parameters. Layers are
    matched by name if more than half of the model's have a counterpart. Otherwise they are matched
    by kind (convolutions, linear layers, batch norms, other norms) in their order: one by one if
    there are equally many of a kind, or else along the longest blocks of equal shapes.

    Parameters
    ----------
    slots : sequence of Slot
        Arrays of the model.
    shapes : mapping of str to tuple of int
        Shapes of the arrays of the state dict, in the order of their definition.
    """
    ours: dict[str, dict[str, Slot]] = {}
    for slot in slots:
        ours.setdefault(slot.layer, {})[slot.what] = slot
    theirs: dict[str, dict[str, str]] = {}
    for name in shapes:
        layer, what = _split(name)
        if what != COUNTER:
            theirs.setdefault(layer, {})[what] = name
    if 2 * len(ours.keys() & theirs.keys()) > len(ours):
        by, layers = "names", {layer: layer for layer in ours if layer in theirs}
    else:
        by, layers = "order", _by_order(ours, theirs, shapes)
    pairs: dict[str, str] = {}
    misfits: list[Misfit] = []
    used: set[str] = set()
    for layer, members in ours.items():
        counterparts = theirs.get(layers[layer], {}) if layer in layers else {}
        for what, slot in members.items():
            found = counterparts.get(what)
            if found is None:
                misfits.append(Misfit("missing", slot.name, expected=slot.their_shape))
                continue
            used.add(found)
            given, expected = shapes[found], slot.their_shape
            if given == expected:
                pairs[slot.name] = found
                continue
            turned = sorted(given) == sorted(expected)
            problem = "transposed" if turned else "wrong shape"
            misfits.append(Misfit(problem, slot.name, found, expected, given))
    misfits += [
        Misfit("extra", theirs=name, given=shapes[name])
        for members in theirs.values()
        for name in members.values()
        if name not in used
    ]
    return StateDictReport(by, pairs, tuple(misfits))


def _split(name: str) -> tuple[str, str]:
    """Return the layer and the name of an array in it."""
    layer, _, what = name.rpartition(".")
    if not what.startswith(f"{PROJECTION}_"):
        return layer, what
    return f"{layer}.{PROJECTION}".lstrip("."), what.removeprefix(f"{PROJECTION}_")


def _by_order(
    ours: Mapping[str, Mapping[str, Slot]],
    theirs: Mapping[str, Mapping[str, str]],
    shapes: Mapping[str, Shape],
) -> dict[str, str]:
    """Return the layer of the state dict for each layer of the model that has one."""
    own = {
        layer: {what: slot.their_shape for what, slot in members.items()}
        for layer, members in ours.items()
    }
    other = {
        layer: {what: shapes[name] for what, name in members.items()}
        for layer, members in theirs.items()
    }
    layers: dict[str, str] = {}
    for kind in dict.fromkeys(map(_kind, own.values())):
        first = [layer for layer, members in own.items() if _kind(members) == kind]
        second = [layer for layer, members in other.items() if _kind(members) == kind]
        if len(first) == len(second):
            layers.update(zip(first, second, strict=True))
            continue
        a, b = [
            [tuple(sorted(table[layer].items())) for layer in names]
            for table, names in ((own, first), (other, second))
        ]
        for block in SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks():
            for i in range(block.size):
                layers[first[block.a + i]] = second[block.b + i]
    return layers


def _kind(members: Mapping[str, Shape]) -> str:
    """Return the kind of a layer, from the names and shapes of its arrays."""
    if "running_mean" in members:
        return "batch norm"
    axes = len(members.get("weight", ()))
    return {0: "without weights", 1: "norm", 2: "linear layer"}.get(axes, "convolution")
