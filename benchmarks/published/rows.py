"""The rows of the table: measurements that others have published."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from pydtnn.tools.perfmodel import Platform

FOLDER = Path(__file__).parent

COLUMNS: dict[str, Any] = yaml.safe_load((FOLDER / "columns.yaml").read_text())
"""Defaults of columns; None where a value is needed."""

PASSES = {"with recomputation": 4, "of the network": 3}
"""Passes of a block that a rate in TFLOP/s counts: forward, twice backward, and forward again."""


CONTRADICTED = 1.3
"""Least ratio of times that a row is left out for."""


class Published(SimpleNamespace):
    """A measurement, and what determines a step: the `COLUMNS` are attributes.

    Attributes
    ----------
    left_out : str
        Why the row is not certain, or "".
    """

    left_out = ""

    @property
    def data(self) -> int:
        """Ranks along "data"."""
        return self.devices // (self.tensor * self.pipeline)

    @property
    def matrices(self) -> tuple[int, int, int, int]:
        """Columns of queries, of keys with values, of the first products of an MLP, and of it."""
        size = self.head or self.hidden // self.heads
        inner = self.ffn or 4 * self.hidden
        keys = 2 * (self.kv_heads or self.heads) * size
        return self.heads * size, keys, inner * (1 + self.gated), inner

    @property
    def block(self) -> int:
        """Parameters of a block, without biases and norms."""
        queries, keys, first, inner = self.matrices
        return self.hidden * (2 * queries + keys + first + inner)

    @property
    def seconds(self) -> float:
        """Measured time of a step."""
        unit, _, counted = self.quantity.partition(", ")
        if unit == "s":
            return self.measured
        amount = self.batch / self.measured
        if unit == "tokens/s per device":
            amount *= self.sequence / self.devices
        elif unit == "TFLOP/s per device":
            attention = 4 * self.sequence * self.matrices[0]
            of_blocks = self.layers * PASSES[counted] * (2 * self.block + attention)
            of_token = of_blocks + 6 * self.hidden * self.vocabulary
            amount *= self.sequence * of_token / (self.devices * 1e12)
        return amount

    @property
    def without_bubble(self) -> float:
        """Time of a step without that in which stages of a pipeline wait."""
        number = self.batch // (self.data * self.micro_batch) if self.micro_batch else 1
        return self.seconds / (1 + (self.pipeline - 1) / (number * self.chunks))


def _value(name: str, text: str) -> Any:
    """Return the value of a column; ValueError if there is none."""
    default = COLUMNS[name]
    if default is None:
        kind = {"devices": int, "batch": int, "measured": float}.get(name, str)
    else:
        kind = float if isinstance(default, int | float) and "." in text else type(default)
    if kind is bool or name == "fitted":
        return {"yes": True, "no": False}[text]
    return kind(text)


def read(path: Path) -> Iterator[Published]:
    """Read a file: lines ``# name: value`` are those of all rows.

    Raises
    ------
    ValueError
        If a column is unknown or missing, or a value is not of its type.
    """
    lines = path.read_text().splitlines()
    head = [line[2:].partition(": ") for line in lines if line.startswith("# ")]
    shared = {"source": path.stem} | {name: value for name, _, value in head}
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        try:
            given = {k: _value(k, v) for k, v in (shared | row).items() if v}
            missing = [k for k, v in COLUMNS.items() if v is None and k not in given]
            if missing:
                raise ValueError(f"{missing[0]} is missing")
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path.name}: {row['row']}: {error}; correct it") from error
        yield Published(**COLUMNS | given)


def all_rows() -> list[Published]:
    """Return the rows of all files; those that are not certain have `Published.left_out`."""
    rows = [row for path in sorted(FOLDER.glob("*.csv")) for row in read(path)]
    for row in rows:
        row.left_out = "images are read and decoded during the step" if row.decoded else ""
        for axis in ("micro_batch", "tensor", "devices"):
            near = [other for other in rows if _near(row, other, axis)]
            if near and row.without_bubble > CONTRADICTED * max(o.without_bubble for o in near):
                row.left_out = f"contradicted by {', '.join(other.row for other in near)}"
    return rows


def _near(row: Published, other: Published, axis: str) -> bool:
    """Return whether a row should not take much longer than another, which differs in an axis only.

    That is one with up to half or twice the samples of a micro-batch or tensor ranks (in a host),
    or with more devices of as many samples each.
    """
    ours, theirs = getattr(row, axis), getattr(other, axis)
    close = theirs > ours if axis == "devices" else 2 * min(ours, theirs) >= max(ours, theirs)
    if row.source != other.source or ours == theirs or not close:
        return False
    inside = max(row.tensor, other.tensor) <= platform_of(row.platform).cluster.ranks_per_host
    return inside and _besides(row, axis) == _besides(other, axis)


def _besides(row: Published, axis: str) -> dict[str, Any]:
    own = ("row", "measured", "fitted", "log", "left_out", axis)
    samples = {"batch": row.batch / (row.devices if axis == "devices" else 1)}
    return {name: value for name, value in vars(row).items() if name not in own} | samples


@cache
def platform_of(name: str) -> Platform:
    """Return a platform of this folder, or of the package."""
    own = FOLDER / "platforms" / f"{name}.yaml"
    return Platform.load(own if own.exists() else name)
