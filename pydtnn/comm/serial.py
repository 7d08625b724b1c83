"""The communicator of one rank: an ordinary group of size 1."""

from __future__ import annotations

import os
import pickle
import sys
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.comm.monitor.supervision import Supervision
from pydtnn.comm.traffic import Traffic
from pydtnn.utils.request import Completed, Request

if TYPE_CHECKING:
    from pydtnn.comm.thread import Mailbox, ThreadMessage


class Serial(Communicator):
    """One rank. Collectives do not change arrays; a rank can send to itself, as in MPI."""

    capturable = True

    def __init__(self, traffic: Traffic | None = None) -> None:
        super().__init__(0, [0], traffic)
        self._supervision: Supervision | None = None

    @property
    def supervision(self) -> Supervision | None:
        return self._supervision

    def supervise(self, supervision: Supervision | None) -> None:
        """Set what this rank shares with other processes."""
        self._supervision = supervision

    def _barrier(self) -> None:
        return None

    def _gather_object(self, value: Any) -> list[Any]:
        # Pickled as in other communicators: returns a copy, and raises if pickling is impossible.
        return [pickle.loads(pickle.dumps(value))]

    def abort(self, code: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # also from a helper thread, where SystemExit would end that thread alone

    def _iallreduce(self, array: np.ndarray, op: str) -> Request:
        return Completed()

    def _broadcast(self, array: np.ndarray, root: int) -> None:
        return None

    def _reduce_scatter(self, array: np.ndarray, counts: list[int], out: np.ndarray) -> None:
        out[:] = array

    def _allgather(self, array: np.ndarray, counts: list[int], out: np.ndarray) -> None:
        out[:] = array

    @cached_property
    def _mailbox(self) -> Mailbox:
        from pydtnn.comm.thread import Mailbox

        return Mailbox()

    def _isend(self, array: np.ndarray, to: int, tag: int) -> Request:
        return _ToOneself(self._mailbox.send(0, 0, tag, array))

    def _irecv(self, array: np.ndarray, source: int | None, tag: int) -> Request:
        return _ToOneself(self._mailbox.receive(source, 0, tag, array))

    def _split(self, color: int, key: int) -> Serial:
        return Serial(self.traffic)


class _ToOneself(Request):
    """A message to the same rank: no other rank can complete it, so waiting would deadlock."""

    def __init__(self, message: ThreadMessage) -> None:
        self._message = message

    @property
    def source(self) -> int:
        return 0

    def wait(self) -> None:
        if not self.test():
            raise RuntimeError(
                "send or recv: rank 0 would deadlock waiting for a message to itself; "
                "call isend and irecv, then wait for both."
            )

    def test(self) -> bool:
        if self._message.problem:
            raise ValueError(self._message.problem)
        return self._message.done
