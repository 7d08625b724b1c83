"""Which arrays of a state dict are those of a model: by names, or by order and shape."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pydtnn.layers.base import Shape
from pydtnn.model.load_report import advice_of
from pydtnn.tools.interchange.published_names import NAMINGS, Naming, parts_of
from pydtnn.tools.interchange.slots import PROJECTION, RECURRENT, ArraySlot
from pydtnn.utils.names import shorten
from pydtnn.utils.units import align

COUNTER = "num_batches_tracked"
"""Batches that a batch norm of PyTorch has seen, which the model does not count."""


@dataclass(frozen=True)
class Stored:
    """An array in a file, whose values are read when its shape is known to be right.

    Attributes
    ----------
    shape : tuple of int
    read : callable
        Returns the values; raises ValueError if they are damaged.
    """

    shape: Shape
    read: Callable[[], np.ndarray]


@dataclass(frozen=True)
class Misfit:
    """An array that was not matched.

    Attributes
    ----------
    problem : str
        "missing", "extra", "transposed" (the expected shape with its axes in another order),
        "wrong shape" or "ambiguous" (several arrays could belong to it, and none is loaded).
    ours, theirs : str
        Names in the model and in the state dict, several if it is ambiguous; empty if there is
        none.
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
        if self.problem == "ambiguous":
            return f"{self.ours} could be {self.theirs} (give names by rename=)"
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
    skipped : tuple of str
        Classes and functions whose objects beside the tensors were not read.
    """

    by: str
    pairs: dict[str, str] = field(default_factory=dict)
    misfits: tuple[Misfit, ...] = ()
    skipped: tuple[str, ...] = ()

    def check(self, *, strict: bool) -> None:
        """Raise ValueError if nothing fits the model, or, if `strict`, not everything does.

        Raises
        ------
        ValueError
        """
        if self.misfits and (strict or not self.pairs):
            which = "arrays do not fit" if strict else "no array fits"
            problems = shorten([str(misfit) for misfit in self.misfits], 4)
            shapes = [(m.given, m.expected) for m in self.misfits if m.given and m.expected]
            advice = advice_of(shapes) if shapes and self.pairs else ""
            raise ValueError(f"{which} the model (matched by {self.by}): {problems}{advice}")

    def __str__(self) -> str:
        total = len(self.pairs) + sum(bool(misfit.ours) for misfit in self.misfits)
        lines = [f"matched {len(self.pairs)} of {total} arrays by {self.by}"]
        if self.misfits:
            head = ("problem", "array here", "array there", "expected", "got")
            rows = [(m.problem, m.ours, m.theirs, m.expected, m.given) for m in self.misfits]
            cells = [["-" if cell in ("", None) else str(cell) for cell in row] for row in rows]
            lines += align([head, *cells], left=5)
        if self.skipped:
            lines.append(f"skipped, without executing anything: {shorten(self.skipped)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Match:
    """Result of `match`.

    Attributes
    ----------
    report : StateDictReport
    slots : list of Slot
        Arrays of the model, with the names and layouts of the state dict.
    copies : dict of str to str
        Names in the state dict of second copies of arrays, and the names in the model.
    constants : list of str
        Names in the state dict of arrays that the model computes itself.
    """

    report: StateDictReport
    slots: list[ArraySlot]
    copies: dict[str, str] = field(default_factory=dict)
    constants: list[str] = field(default_factory=list)


def fit(
    slots: Sequence[ArraySlot],
    arrays: Mapping[str, Stored],
    *,
    strict: bool,
    series: Mapping[str, str] | None = None,
) -> tuple[StateDictReport, dict[str, np.ndarray]]:
    """Match the arrays of a state dict; read and return those that fit, in the model's layouts.

    Raises
    ------
    ValueError
        If an array has no counterpart of its shape (without `strict`: none has), names belong to
        several arrays, values cannot be read, or two copies of an array differ.
    """
    found = match(slots, {name: array.shape for name, array in arrays.items()}, series=series)
    report = found.report
    report.check(strict=strict)
    read = {
        slot.name: (slot, _read(arrays, report.pairs[slot.name]))
        for slot in found.slots
        if slot.name in report.pairs
    }
    for copy, name in found.copies.items():
        if not np.array_equal(arrays[copy].read(), read[name][1]):
            raise ValueError(
                f"{copy} must be equal to {report.pairs[name]}, as both are one array of the "
                "model; got other values"
            )
    return report, {name: slot.to_ours(array) for name, (slot, array) in read.items()}


def _read(arrays: Mapping[str, Stored], name: str) -> np.ndarray:
    parts = [arrays[part].read() for part in parts_of(name)]
    return np.concatenate(parts) if parts[1:] else parts[0]


def match(
    slots: Sequence[ArraySlot],
    shapes: Mapping[str, Shape],
    *,
    series: Mapping[str, str] | None = None,
) -> Match:
    """Find the arrays of a state dict that belong to those of a model.

    Arrays are matched by names if more than half of the model's layers have a counterpart: by those
    of the layers here or by those of a published network (`NAMINGS`), either exactly or behind a
    prefix that all of them have. Otherwise layers are matched by kind (convolutions, depthwise
    convolutions, linear layers, batch norms, other norms) in their order: one by one if there are
    equally many of a kind, or else of those of equal shapes. If these are not equally many, either,
    they are ambiguous, and not matched.

    Parameters
    ----------
    slots : sequence of Slot
        Arrays of the model.
    shapes : mapping of str to tuple of int
        Shapes of the arrays of the state dict, in the order of their definition.
    series : mapping of str to str, optional
        If the order of the layers of the state dict is known for some of them only: the name of the
        series of each layer, in which it is known. Layers are then matched with those of equal
        shapes, and are ambiguous if these are in different series.

    Raises
    ------
    ValueError
        If two prefixes fit equally well.
    """
    named = _by_names(slots, shapes)
    if named is None:
        return _by_order(slots, shapes, series or {})
    naming, own = named
    pairs: dict[str, str] = {}
    misfits: list[Misfit] = []
    whole = {**shapes, **_joined(own, shapes)}
    for slot in own:
        _compare(slot, slot.their_name, whole, pairs, misfits)
    used = {part for slot in own for part in parts_of(slot.their_name)}
    copies: dict[str, str] = {}
    constants: list[str] = []
    if naming is not None:
        expected = {slot.name: slot.their_shape for slot in own}
        for name, shape in shapes.items():
            if name in used:
                continue
            for copy, ours in naming.copies.items():
                if _ends_in(re.escape(copy), name) and ours in pairs and shape == expected[ours]:
                    copies[name] = ours
            if _ends_in(naming.constants, name):
                constants.append(name)
    misfits += _extra(shapes, {*used, *copies, *constants})
    return Match(StateDictReport("names", pairs, tuple(misfits)), own, copies, constants)


def _joined(slots: Sequence[ArraySlot], shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of arrays here that are several ones there, one below the other."""
    found: dict[str, Shape] = {}
    for slot in slots:
        parts = [shapes.get(name, ()) for name in parts_of(slot.their_name)]
        if parts[1:] and all(parts) and len({part[1:] for part in parts}) == 1:
            found[slot.their_name] = (sum(part[0] for part in parts), *parts[0][1:])
    return found


def _by_names(
    slots: Sequence[ArraySlot], shapes: Mapping[str, Shape]
) -> tuple[Naming | None, list[ArraySlot]] | None:
    """Return the slots with their names in the state dict, if most layers have one.

    The best names are those that the most layers have, then those of the most arrays of the right
    shape, then the first: names here come first, and names without a prefix.
    """
    layers = len({slot.layer for slot in slots})
    best: tuple[tuple[int, int], Naming | None, str, list[ArraySlot]] = ((0, 0), None, "", [])
    other = ""
    for naming, prefix, own in _candidates(slots, shapes):
        found = [slot for slot in own if slot.their_name in shapes]
        fitting = sum(shapes[slot.their_name] == slot.their_shape for slot in found)
        score = len({slot.layer for slot in found}), fitting
        if score > best[0]:
            best, other = (score, naming, prefix, own), ""
        elif score == best[0] and best[2] and prefix and naming is best[1]:
            other = prefix
    (count, _), naming, prefix, own = best
    if 2 * count <= layers:
        return None
    if other:
        raise ValueError(
            f"names of layers belong to several arrays, which begin with {prefix!r} and {other!r}; "
            f"omit those of one of them by rename={{{other.rstrip('.')!r}: None}}"
        )
    return naming, own


def _candidates(
    slots: Sequence[ArraySlot], shapes: Mapping[str, Shape]
) -> Iterator[tuple[Naming | None, str, list[ArraySlot]]]:
    """Yield namings, prefixes of all names in the state dict, and slots with these names."""
    layers = len({slot.layer for slot in slots})
    for naming in (None, *NAMINGS):
        own = slots if naming is None else naming.apply(slots)
        if own is None:
            continue
        yield naming, "", list(own)
        names = {slot.their_name for slot in own}
        for prefix in _prefixes(shapes, names, layers):
            yield naming, prefix, [slot.renamed(f"{prefix}{slot.their_name}") for slot in own]
        if naming is None:
            for prefix in _prefixes(names, shapes, layers):
                cut = [slot.renamed(slot.their_name.removeprefix(prefix)) for slot in own]
                yield naming, "", cut


def _prefixes(long: Iterable[str], short: Container[str], layers: int) -> list[str]:
    """Return the prefixes of names, ending in ".", before the short names of half of the layers."""
    counts: Counter[str] = Counter()
    for name in long:
        for dot in re.finditer(r"\.", name):
            if name[dot.end() :] in short:
                counts[name[: dot.end()]] += 1
    return [prefix for prefix, count in counts.items() if 2 * count > layers]


def _ends_in(pattern: str, name: str) -> bool:
    return bool(pattern) and re.fullmatch(rf"(.*\.)?{pattern}", name) is not None


def _compare(
    slot: ArraySlot,
    name: str,
    shapes: Mapping[str, Shape],
    pairs: dict[str, str],
    misfits: list[Misfit],
) -> None:
    """Add an array of the state dict to the pairs if it has the right shape, else to the misfits.

    No array has the name if it is missing.
    """
    expected, given = slot.their_shape, shapes.get(name)
    if given is None:
        misfits.append(Misfit("missing", slot.name, expected=expected))
    elif given == expected:
        pairs[slot.name] = name
    else:
        turned = sorted(given) == sorted(expected)
        problem = "transposed" if turned else "wrong shape"
        misfits.append(Misfit(problem, slot.name, name, expected, given))


def _extra(shapes: Mapping[str, Shape], used: Container[str]) -> list[Misfit]:
    return [
        Misfit("extra", theirs=name, given=shape)
        for name, shape in shapes.items()
        if name not in used and name.rpartition(".")[2] != COUNTER
    ]


def _by_order(
    slots: Sequence[ArraySlot], shapes: Mapping[str, Shape], series: Mapping[str, str]
) -> Match:
    """Match layers by kind and order."""
    ours: dict[str, dict[str, ArraySlot]] = {}
    for slot in slots:
        ours.setdefault(slot.layer, {})[slot.what] = slot
    theirs: dict[str, dict[str, str]] = {}
    for name in shapes:
        layer, what = split(name)
        if what != COUNTER:
            theirs.setdefault(layer, {})[what] = name
    own = {
        layer: {what: slot.their_shape for what, slot in members.items()}
        for layer, members in ours.items()
    }
    other = {
        layer: {what: shapes[name] for what, name in members.items()}
        for layer, members in theirs.items()
    }
    pairs: dict[str, str] = {}
    misfits: list[Misfit] = []
    used: set[str] = set()
    layers = _layers_by_order(own, other, series)
    for layer, members in ours.items():
        counterparts = layers.get(layer, [])
        for what, slot in members.items():
            names = [theirs[c][what] for c in counterparts if what in theirs[c]]
            used.update(names)
            if len(names) < 2:
                _compare(slot, "".join(names), shapes, pairs, misfits)
            else:
                shown = shorten([*dict.fromkeys(names)], 3)
                misfits.append(Misfit("ambiguous", slot.name, shown, slot.their_shape))
    misfits += _extra(shapes, used)
    return Match(StateDictReport("order", pairs, tuple(misfits)), list(slots))


def split(name: str) -> tuple[str, str]:
    """Return the layer and the name of an array in it."""
    layer, _, what = name.rpartition(".")
    if recurrent := RECURRENT.fullmatch(what):
        what, number = recurrent.groups()
        return f"{layer}.layer{number}".lstrip("."), what
    if not what.startswith(f"{PROJECTION}_"):
        return layer, what
    return f"{layer}.{PROJECTION}".lstrip("."), what.removeprefix(f"{PROJECTION}_")


Layers = Mapping[str, Mapping[str, Shape]]
"""Shapes of the arrays of each layer."""

Signature = tuple[tuple[str, Shape], ...]
"""Names and shapes of the arrays of a layer, in the order of the names."""


def _layers_by_order(own: Layers, other: Layers, series: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the layers of the state dict that each layer of the model may be."""
    layers: dict[str, list[str]] = {}
    for kind in dict.fromkeys(map(_kind, own.values())):
        first, second = (
            [layer for layer, members in table.items() if _kind(members) == kind]
            for table in (own, other)
        )
        in_order = len({series.get(layer) for layer in second}) < 2
        if in_order and len(first) == len(second):
            layers |= {a: [b] for a, b in zip(first, second, strict=True)}
            continue
        found = _by_shapes(first, second, own, other, series)
        places = [second.index(found[layer][0]) for layer in first if len(found[layer]) == 1]
        if in_order and places != sorted(places):  # shapes and order contradict each other
            found = {layer: names * 2 for layer, names in found.items()}
        layers |= found
    return layers


def _by_shapes(
    first: Sequence[str],
    second: Sequence[str],
    own: Layers,
    other: Layers,
    series: Mapping[str, str],
) -> dict[str, list[str]]:
    """Return the counterparts of layers among those of equal shapes, in the order of a series.

    A layer that may have none, or share it with others, has several.
    """
    alike: dict[Signature, tuple[list[str], list[str]]] = {}
    for side, (names, table) in enumerate(((first, own), (second, other))):
        for name in names:
            alike.setdefault(_signature(table[name]), ([], []))[side].append(name)
    found: dict[str, list[str]] = {}
    for ours, theirs in alike.values():
        if len(ours) == len(theirs) and len({series.get(layer) for layer in theirs}) == 1:
            found |= {a: [b] for a, b in zip(ours, theirs, strict=True)}
        else:
            found |= {layer: theirs if len(theirs) != 1 else theirs * 2 for layer in ours}
    return found


def _signature(members: Mapping[str, Shape]) -> Signature:
    return tuple(sorted(members.items()))


def _kind(members: Mapping[str, Shape]) -> str:
    """Return the kind of a layer, from the names and shapes of its arrays."""
    if "running_mean" in members:
        return "batch norm"
    shape = members.get("weight", ())
    if len(shape) > 2 and shape[1] == 1:
        return "depthwise convolution"
    return {0: "without weights", 1: "norm", 2: "linear layer"}.get(len(shape), "convolution")
