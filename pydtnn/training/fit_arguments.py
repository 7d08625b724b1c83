"""The number of epochs of `Trainer.fit`, and answers to arguments of other libraries."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from pydtnn.utils.names import unknown
from pydtnn.utils.validate import whole

_log = logging.getLogger("pydtnn.training")

ELSEWHERE = {
    "validation_data": "pass the data set as `validation`",
    "validation_split": "divide the data set with pydtnn.data.split_validation and pass the second "
    "part as `validation`",
    "initial_epoch": "omit it: training continues from trainer.epoch; `epochs` counts from the "
    "beginning, `more_epochs` from there",
    "verbose": 'set Trainer(progress="bar"), "plain" or "none"',
    "callbacks": "set Trainer(callbacks=[...])",
    "shuffle": "omit it: samples are shuffled in every epoch, depending on `seed`",
    "n_epochs": "use `epochs`",
    "num_epochs": "use `epochs`",
    "max_epochs": "use `epochs`",
    "lr": "set the learning rate of the optimizer, such as SGD(lr=0.1)",
    "workers": "use `loader_threads`",
    "num_workers": "use `loader_threads`",
    "x": "pass a data set, such as ArrayDataset(x, y), as `train`",
    "y": "pass a data set, such as ArrayDataset(x, y), as `train`",
}
"""What replaces arguments of `fit` in other libraries."""

OWN = (
    *("train", "validation", "epochs", "more_epochs", "batch_size", "global_batch_size", "augment"),
    *("mix", "steps_per_epoch", "drop_last", "seed", "loader_threads"),
)


def refuse(others: Mapping[str, object]) -> None:
    """Raise TypeError for an argument that `fit` does not have.

    Raises
    ------
    TypeError
        The message contains what to use instead.
    """
    for name in others:
        if name in ELSEWHERE:
            raise TypeError(f"fit: there is no argument `{name}`; {ELSEWHERE[name]}")
        raise TypeError(f"fit: {unknown('argument', name, OWN)}")


def last_epoch(epoch: int, epochs: int | None, more_epochs: int | None) -> int:
    """Return the number of epochs that are complete when `fit` ends.

    Parameters
    ----------
    epoch : int
        Epochs that are complete.
    epochs, more_epochs : int, optional
        Arguments of `fit`; without both, 1 epoch.

    Raises
    ------
    TypeError, ValueError
        If both are set, or one of them is not a number of epochs.
    """
    if epochs is not None and more_epochs is not None:
        raise TypeError(
            "fit: expected epochs or more_epochs, got both; epochs counts from the beginning, "
            "more_epochs from the present state"
        )
    if more_epochs is not None:
        return epoch + whole("Trainer", "more_epochs", more_epochs, at_least=0)
    last = whole("Trainer", "epochs", 1 if epochs is None else epochs, at_least=0)
    if epoch >= last > 0:
        _log.info("%s", describe_complete(epoch, last))
    return last


def describe_complete(epoch: int, epochs: int) -> str:
    """Return the sentence for a `fit` without an epoch to train."""
    done = f"{epoch} epoch{'s are' if epoch > 1 else ' is'} complete"
    return (
        f"fit: nothing to train: {done}, and epochs={epochs} counts from the beginning; pass "
        f"more_epochs={epochs} to train on"
    )
