"""Ranks with arrays on a device are compared on the host, whatever carries their messages."""

from __future__ import annotations

from typing import Any

import pytest

from pydtnn.callbacks import Callback, CheckEqual
from pydtnn.comm import Communicator, run_threads
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce
from pydtnn.utils.errors import AgreedError
from tests.comm.devices import TRANSPORTS, device_of, reference_on
from tests.parallel.schemes.course import fit, trainer_of


class Change(Callback):
    """Change an element on one rank after the seventh step."""

    def on_step_end(self, trainer: Any) -> None:
        if (trainer.comm.rank, trainer.optimizer.iterations) == (1, 7):
            name = next(iter(trainer.model.parameters))
            trainer.model.parameters[name].master[...] += 1


@pytest.mark.few(1)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_difference_is_found_and_the_steps_since_the_last_comparison_are_named(
    transport: str,
) -> None:
    def rank(comm: Communicator) -> None:
        xp = device_of(comm)
        check = CheckEqual(5)
        trainer = trainer_of(
            AllReduce(TRANSPORTS[transport](comm, xp)),
            SGD(0.1, momentum=0.9),
            backend=reference_on(xp),
            callbacks=[Change(), check],
            progress=False,
        )
        assert isinstance(trainer.model.buckets[0].values, xp.ndarray)
        try:
            fit(trainer)
        finally:
            assert check.spread == 0

    with pytest.raises(AgreedError, match="on rank 1 since one of the steps 6 to 10: ") as raised:
        run_threads(3, rank)
    assert "by at most 1 (" in str(raised.value)
