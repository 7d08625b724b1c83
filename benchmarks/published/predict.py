"""Predictions of rows, and the fit of the numbers of a device."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import log
from statistics import mean
from typing import NamedTuple, cast

import yaml

from benchmarks.published import images, transformer
from benchmarks.published.rows import FOLDER, Published, platform_of
from pydtnn.tools.perfmodel.platform import Kernels

FITTED = ("products", "memory", "fill", "launch")
"""Numbers of a device that are not on its data sheet."""

LIMITS = {"products": 1.0, "memory": 1.0, "fill": 20e-6, "launch": 20e-6}

STEPS = (1.3, 1.1, 1.03, 1.01)


class Compared(NamedTuple):
    """A row and the predicted time of a step, in s."""

    row: Published
    predicted: float

    @property
    def error(self) -> float:
        """Of the predicted time, relative to the measured one."""
        return self.predicted / self.row.seconds - 1


def compare(row: Published, kernels: Kernels | None = None) -> Compared:
    """Predict a row, with other numbers of its device if they are given."""
    platform = platform_of(row.platform)
    compute = replace(platform.compute, kernels=kernels or platform.compute.kernels)
    module = images if row.shape else transformer
    return Compared(row, module.seconds(row, replace(platform, compute=compute)))


def kernels_of(row: Published) -> Kernels:
    """Return the numbers of a row's device."""
    return cast(Kernels, platform_of(row.platform).compute.kernels)


def fit(rows: Sequence[Published]) -> Kernels:
    """Return the numbers with the least mean error of the logarithms of rows.

    One after the other is multiplied and divided by smaller and smaller steps, from the present
    ones.
    """

    def error(kernels: Kernels) -> float:
        return mean(abs(log(1 + compare(row, kernels).error)) for row in rows)

    best = kernels_of(rows[0])
    least = error(best)
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for name in FITTED:
                for factor in (step, 1 / step):
                    value = min(getattr(best, name) * factor, LIMITS[name])
                    other = replace(best, **{name: float(f"{value:.3g}")})  # type: ignore[arg-type]
                    if (now := error(other)) < least - 1e-5:
                        best, least, improved = other, now, True
    return best


@lru_cache(maxsize=1)
def _reasons() -> list[tuple[str, str, str]]:
    return [tuple(one) for one in yaml.safe_load((FOLDER / "reasons.yaml").read_text())]


def reason_of(row: Published) -> str:
    """Return what is known of the reason for a large error of a row."""
    for source, pattern, reason in _reasons():
        if re.fullmatch(source, row.source) and re.search(pattern, row.row):
            return reason
    return "not known"
