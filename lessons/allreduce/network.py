"""What the steps share: a described network, and additions that take virtual time."""

import numpy as np

from pydtnn.utils import clock

Array = np.ndarray


def add(target: Array, received: Array) -> None:
    """Add what was received; on virtual ranks it takes the time that the network describes."""
    target += received
    clock.current().add(received.nbytes)
