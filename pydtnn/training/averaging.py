"""The parameters and statistics that ranks have in common, and saving them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pydtnn.comm.metered import Metered
from pydtnn.comm.rank0 import on_rank_0
from pydtnn.model import Model
from pydtnn.parallel.exchange import GradientExchange
from pydtnn.saving import save_model
from pydtnn.training.callback import Training, evaluated
from pydtnn.training.setup import Setup


class Averaging:
    """Base class of `Trainer`: the methods that average over ranks, and what they use."""

    model: Model
    exchange: GradientExchange
    comm: Metered
    setup: Setup

    def save(self: Training, path: str | Path) -> None:
        """Write the model to a folder, such as "digits.pydtnn", for `pydtnn.load`.

        Collective: all ranks call it; rank 0 writes, and an existing model is replaced. The
        parameters are those that are evaluated: the average of the ranks if they train with
        different ones, or that of a callback.

        Raises
        ------
        AgreedError
            On all ranks, if it cannot be written, or an option of a layer cannot be saved.
        """
        with evaluated(self):
            state = self.model.state()
            on_rank_0(self.comm, save_model, self.model, path, state)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Context in which all ranks have the same parameters and statistics.

        Collective: all ranks call it. If ranks train with different parameters, each restores its
        own afterwards.
        """
        self.synchronise()
        with self.exchange.averaged():
            yield

    def synchronise(self) -> None:
        """Make running statistics equal on all ranks.

        Collective: all ranks call it. They are averaged, weighted by the samples each rank has
        seen.
        """
        self.setup.synchronise()
