"""What `AllReduce` asks of messages that are under way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pydtnn.comm import create_communicator
from pydtnn.comm.communicator import Request
from pydtnn.comm.exchange import AllReduce
from pydtnn.comm.sums import Sums


class Slow(Request):
    """A message that is complete when `complete` says so, and counts who asks."""

    def __init__(self) -> None:
        self.complete = False
        self.asked = 0

    def wait(self) -> None:
        self.complete = True

    def test(self) -> bool:
        self.asked += 1
        return self.complete


class SlowSums(Sums):
    """Sums that are slow."""

    def start(self, bucket: Any) -> Slow:
        return Slow()


@pytest.fixture
def exchange() -> AllReduce:
    """Three messages under way."""
    exchange = AllReduce(create_communicator("serial"), sums=SlowSums)
    for index in range(3):
        exchange.bucket_ready(SimpleNamespace(index=index))  # type: ignore[arg-type]
    return exchange


def asked(messages: list[Any]) -> list[int]:
    return [message.asked for message in messages]


def test_the_oldest_message_under_way_is_asked_and_none_that_is_complete(
    exchange: AllReduce,
) -> None:
    messages: list[Any] = list(exchange.requests.values())
    exchange.progress()
    assert asked(messages) == [1, 0, 0]
    messages[0].complete = messages[1].complete = True
    exchange.progress()
    assert asked(messages) == [2, 1, 1]
    exchange.progress()
    assert asked(messages) == [2, 1, 2]


@pytest.mark.parametrize("ends", ["update", "abandon"])
def test_after_a_step_its_messages_are_not_asked_again(exchange: AllReduce, ends: str) -> None:
    messages: list[Any] = list(exchange.requests.values())
    if ends == "abandon":
        exchange.abandon()
    else:
        exchange.update(SimpleNamespace(step=lambda wait: None))  # type: ignore[arg-type]
    exchange.progress()
    assert asked(messages) == [0, 0, 0]
