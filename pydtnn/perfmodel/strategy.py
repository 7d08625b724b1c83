"""A way to distribute the training of a network over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from pydtnn.layers.collectives import PIPELINE
from pydtnn.utils.names import unknown

SCHEMES = ("allreduce", "hierarchical", "sharded")
"""Schemes whose messages have closed formulas."""


@dataclass(frozen=True)
class Strategy:
    """How training is distributed.

    Parameters
    ----------
    axes : mapping of str to int
        Ranks along each axis of the mesh, in its order; one rank if empty.
    plan : Plan, mapping or str, optional
        How the network is cut along the axes besides "data"; by default as their names say.
    recompute : int, str or None
        See `Model`; "auto" recomputes about the square root of the possible parts.
    scheme : str
        One of `SCHEMES`.
    compress : str or None
        Name of a compressor.
    compress_options : mapping
    micro_batches : int
        Of a pipeline; 0 for four per stage, or as many as there are samples.
    schedule : str
        Of a pipeline.

    Raises
    ------
    ValueError
        If there is no formula for the scheme.
    """

    axes: Mapping[str, int] = field(default_factory=dict)
    plan: Any = None
    recompute: Any = None
    scheme: str = "allreduce"
    compress: str | None = None
    compress_options: Mapping[str, Any] = field(default_factory=dict)
    micro_batches: int = 0
    schedule: str = "1f1b"

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise ValueError(
                f"Strategy: {unknown('scheme with a formula', self.scheme, SCHEMES)}; the time of "
                "others is that of virtual ranks"
            )

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return prod(self.axes.values())

    @property
    def data(self) -> int:
        """Ranks along the axis "data"."""
        return self.axes.get("data", 1)

    @property
    def cut(self) -> dict[str, int]:
        """Axes with several ranks along which the network is cut."""
        return {axis: n for axis, n in self.axes.items() if axis != "data" and n > 1}

    @property
    def stages(self) -> int:
        """Stages of a pipeline."""
        return self.axes.get(PIPELINE, 1)

    @property
    def parallel(self) -> str:
        """The axes as the argument of `--parallel`."""
        return ",".join(f"{axis}={n}" for axis, n in self.axes.items() if n > 1)

    @property
    def name(self) -> str:
        """The strategy in words.

        >>> Strategy({"data": 4, "spatial": 2}, recompute="auto").name
        'data 4 x spatial 2, recompute'
        """
        axes = " x ".join(f"{axis} {n}" for axis, n in self.axes.items() if n > 1) or "serial"
        words = [axes]
        if self.recompute is not None:
            words.append("recompute" if self.recompute == "auto" else f"recompute {self.recompute}")
        if self.scheme != "allreduce":
            words.append(self.scheme)
        if self.compress:
            words.append(self.compress)
        return ", ".join(words)

    @property
    def kind(self) -> str:
        """The strategy without numbers of ranks: "data x spatial"."""
        kinds = [axis for axis, n in self.axes.items() if n > 1]
        rest = self.name.partition(",")[2]
        return " x ".join(kinds or ["serial"]) + ("," + rest if rest else "")

    def stride(self, axis: str) -> int:
        """Return the distance of neighbours along an axis."""
        names = list(self.axes)
        return prod(self.axes[name] for name in names[names.index(axis) + 1 :])
