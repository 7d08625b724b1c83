"""Pending operations of a communicator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class Request(ABC):
    """A pending operation. Its arrays belong to the communicator until it is complete."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the operation is complete."""

    @abstractmethod
    def test(self) -> bool:
        """Return whether the operation is complete, without waiting.

        A cheap call that also progresses communication: MPI libraries progress non-blocking
        operations only inside calls.
        """

    @property
    def source(self) -> int:
        """The rank whose message a complete receive has; without meaning for other operations."""
        return -1


class Completed(Request):
    """The request of an operation that was complete when it was started."""

    def wait(self) -> None:
        return None

    def test(self) -> bool:
        return True


class Together(Request):
    """Several operations as one.

    Parameters
    ----------
    requests : sequence of Request
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests

    def wait(self) -> None:
        for request in self._requests:
            request.wait()

    def test(self) -> bool:
        return all(
            [request.test() for request in self._requests]
        )  # a list: each one makes progress
