"""Requests in a queue complete in order, and a chain continues when its request is complete."""

from __future__ import annotations

from collections.abc import Iterator

from pydtnn.utils.request import Chain, Queue, Request
from tests.each import each


class Step(Request):
    """A request that is complete when `done` is set, or by waiting."""

    def __init__(self, done: bool = False) -> None:
        self.done = done

    def test(self) -> bool:
        return self.done

    def wait(self) -> None:
        self.done = True


def generator(steps: list[Step], log: list[str], name: str = "") -> Iterator[Request]:
    for i, step in enumerate(steps):
        log.append(f"{name}{i}")
        yield step
    log.append(f"{name}end")


def test_a_queue_completes_requests_in_the_order_in_which_they_were_added():
    queue, first, second, log = Queue(), Step(), Step(done=True), list[str]()
    queue.add(first, lambda: log.append("first"))
    queue.add(second, lambda: log.append("second"))
    queue.progress()
    assert (len(queue), log) == (2, [])
    first.done = True
    queue.progress()
    assert (len(queue), log) == (0, ["first", "second"])

    steps, numbers = [Step() for _ in range(3)], list[int]()
    for i, step in enumerate(steps):
        queue.add(step, lambda i=i: numbers.append(i))  # type: ignore[misc]
    queue.wait()
    assert numbers == [0, 1, 2]
    assert all(step.done for step in steps)


def test_a_chain_begins_at_once_and_continues_by_tests():
    steps, log = [Step(), Step()], list[str]()
    chain = Chain(generator(steps, log))
    assert log == ["0"]
    assert not chain.test()
    steps[0].done = True
    assert not chain.test()
    assert log == ["0", "1"]
    steps[1].done = True
    assert chain.test()
    assert log == ["0", "1", "end"]


def test_a_chain_that_only_waiting_advances_is_not_complete_before():
    steps, log = [Step(done=True), Step(done=True)], list[str]()
    chain = Chain(generator(steps, log), by_test=False)
    assert not chain.test()
    assert log == ["0"]
    chain.wait()
    assert log == ["0", "1", "end"]
    assert chain.test()


@each("by_test", [True, False])
def test_second_steps_start_in_the_order_of_the_chains(by_test):
    queue, log = Queue(), list[str]()
    a, b = [Step(), Step()], [Step(done=True), Step(done=True)]
    first = Chain(generator(a, log, "a"), queue, by_test=by_test)
    second = Chain(generator(b, log, "b"), queue, by_test=by_test)
    assert not second.test()  # the first step of the other chain is not complete
    assert log == ["a0", "b0"]
    a[0].done = True
    assert second.test()
    assert log == ["a0", "b0", "a1", "b1", "bend"]
    first.wait()
    assert log[-1] == "aend"


def test_chains_out_of_turn_do_not_wait_for_each_other():
    queue, log = Queue(), list[str]()
    first = Chain(generator([Step()], log, "a"), queue)
    steps = [Step(done=True), Step()]
    second = Chain(generator(steps, log, "b"), queue, in_turn=False)
    assert not second.test()
    assert log == ["a0", "b0", "b1"]
    assert not first.test()
    second.wait()
    assert log == ["a0", "b0", "b1", "aend", "bend"]  # waiting for one completes the queue


def test_a_chain_without_steps_is_complete():
    assert Chain(iter(())).test()
    assert Chain(iter(()), Queue()).test()
