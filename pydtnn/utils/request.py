"""Pending operations, such as messages; queues and chains of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence


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


class Forwarding(Request):
    """A request that acts for another one; a subclass adds to its waits and tests.

    Parameters
    ----------
    inner : Request
    """

    def __init__(self, inner: Request) -> None:
        self.inner = inner

    @property
    def source(self) -> int:
        return self.inner.source


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


class Queue:
    """Requests in progress, oldest first."""

    def __init__(self) -> None:
        self._entries: deque[tuple[Request, Callable[[], object]]] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request, then: Callable[[], object] = lambda: None) -> None:
        """Append a request; `then` is called once it and all requests before it are complete."""
        self._entries.append((request, then))

    def progress(self) -> None:
        """Test the oldest request and, while it is complete, the next one."""
        while self._entries and self._entries[0][0].test():
            self._entries.popleft()[1]()

    def wait(self) -> None:
        """Wait for all requests, in order."""
        while self._entries:
            request, then = self._entries.popleft()
            request.wait()
            then()


class Chain(Request):
    """Run a generator that yields the requests it waits for.

    It runs to its first ``yield`` immediately, and resumes after each yielded request completes.

    Parameters
    ----------
    steps : iterator of Request
    queue : Queue, optional
        A queue that `wait` and `test` also progress.
    in_turn : bool
        Whether the second step starts after the first steps of all requests queued before.
    by_test : bool
        Whether `test` may start the next step, or only `wait`: ranks observe the completion of a
        request at different times. Ignored with `queue` and `in_turn`.
    """

    def __init__(
        self,
        steps: Iterator[Request],
        queue: Queue | None = None,
        *,
        in_turn: bool = True,
        by_test: bool = True,
    ) -> None:
        self._steps, self._queue = steps, queue
        self._last = self._current = next(steps, None)
        self._advances = by_test
        if queue is not None and in_turn and self._current is not None:
            self._advances = False
            queue.add(self._current, self._in_turn)
            queue.progress()

    def wait(self) -> None:
        if self._queue is not None and self._current is not None:
            self._queue.wait()
        while self._current is not None:
            self._current.wait()
            self._next()

    @property
    def source(self) -> int:
        return -1 if self._last is None else self._last.source

    def test(self) -> bool:
        if self._queue is not None:
            self._queue.progress()
        while self._advances and self._current is not None and self._current.test():
            self._next()
        return self._current is None

    def _in_turn(self) -> None:
        self._advances = True
        self._next()

    def _next(self) -> None:
        self._current = next(self._steps, None)
        self._last = self._current or self._last
