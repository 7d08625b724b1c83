"""What messages cost the processor of a rank."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from pydtnn.comm.waiting import number_of_tests, pause
from pydtnn.tools.perfmodel.platform import Platform


class Processor(NamedTuple):
    """What messages cost the processor of a rank.

    Attributes
    ----------
    call : float
        Time of each call that starts an operation, and of the wait for it, on a core of its own, in
        s.
    copy : float
        Time to copy a byte that is sent to another host or received from one, in s/B. Those inside
        a host are copied within the bandwidth of the network.
    add : float
        Time per byte of a library's allreduce inside a host, during which p ranks add and copy 1 -
        1 / p of the array, in s/B; 0: it takes the time of messages.
    eager : float
        Bytes up to which a message between hosts travels while its ranks compute; a longer one
        only proceeds when they are in calls of the communicator.
    wake : float or None
        Time by which a sleep is longer than it should be, in s, if ranks sleep while they wait
        (`pydtnn.comm.waiting`); None: they poll, and keep their part of a core.
    test : float
        Time of the processor for a sleep and the test after it, in s, if ranks sleep while they
        wait.
    """

    call: float = 0.0
    copy: float = 0.0
    add: float = 0.0
    eager: float = inf
    wake: float | None = None
    test: float = 0.0

    def notice(self, waited: float) -> float:
        """Return how late on average a rank notices the end of what it has waited for, in s."""
        return 0.0 if self.wake is None else pause(waited) / 2 + self.wake

    def testing(self, waited: float) -> float:
        """Return the time of the processor for the tests of a wait of so many seconds, in s."""
        each = self.test + (self.wake or 0.0)
        return self.test * number_of_tests(waited, each) if self.test else 0.0

    @classmethod
    def of(cls, platform: Platform) -> Processor:
        """Return the processor of a platform."""
        messages = platform.messages
        copy, add = (1 / r if r else 0.0 for r in (messages.copy, messages.allreduce))
        waits = messages.eager or inf, messages.wake, messages.test
        return cls(messages.call, copy, add, *waits)
