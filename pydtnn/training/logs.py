"""Losses and metrics by name, whose missing names are explained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, SupportsIndex, overload

import numpy as np

from pydtnn.utils.errors import MissingNameError
from pydtnn.utils.names import unknown

VALIDATION = "val_"
"""Prefix of values of the validation set."""


class Logs(dict[str, float]):
    """Losses and metrics by name; a name that they do not contain raises `MissingNameError`.

    >>> Logs(loss=0.5) | {"lr": 0.1}
    {'loss': 0.5, 'lr': 0.1}
    """

    def __or__(self, other: Mapping[str, float]) -> Logs:  # type: ignore[override]
        return Logs({**self, **other})

    @property
    def numbers(self) -> Logs:
        """The same without arrays, the results of some metrics of `Trainer.evaluate`."""
        return Logs((name, value) for name, value in self.items() if not np.ndim(value))

    def __missing__(self, name: str) -> float:
        raise MissingNameError(missing(name, self))


class History(list[Logs]):
    """Logs of each epoch; ``history["loss"]`` is the list of one value in all epochs.

    >>> History([Logs(loss=0.5), Logs(loss=0.25)])["loss"]
    [0.5, 0.25]
    """

    @overload
    def __getitem__(self, index: SupportsIndex) -> Logs: ...

    @overload
    def __getitem__(self, index: slice) -> list[Logs]: ...

    @overload
    def __getitem__(self, index: str) -> list[float]: ...

    def __getitem__(self, index: Any) -> Any:
        return (
            [logs[index] for logs in self] if isinstance(index, str) else super().__getitem__(index)
        )

    @property
    def history(self) -> History:
        """The same, as the object that ``fit`` of Keras returns has it."""
        return self


def missing(name: str, names: Iterable[str]) -> str:
    """Return a sentence for a name that logs with `names` do not contain.

    >>> missing("val_accuracy", ["loss", "accuracy"])
    "no value 'val_accuracy', got 'loss', 'accuracy'; pass a validation set to Trainer.fit, whose \
values are available from on_epoch_end on"
    >>> missing("acuracy", ["loss", "accuracy"])
    "unknown value 'acuracy'; did you mean 'accuracy'?"
    """
    names = [*names]
    known = name.removeprefix(VALIDATION) in names
    if name.startswith(VALIDATION) and known and not any(n.startswith(VALIDATION) for n in names):
        return (
            f"no value {name!r}, got {', '.join(map(repr, names))}; pass a validation set to "
            "Trainer.fit, whose values are available from on_epoch_end on"
        )
    if not names:
        return f"no value {name!r}: there is none before the first step of an epoch is complete"
    return unknown("value", name, names)
