"""What `AllReduce` asks of messages that are under way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pydtnn.comm import create_communicator, run_threads
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce
from pydtnn.parallel.schemes import Hierarchical, ParameterServer
from pydtnn.parallel.sums import Sums
from pydtnn.utils.request import Request
from tests.parallel.schemes.course import fit, trainer_of


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


@pytest.mark.parametrize("scheme", [AllReduce, Hierarchical, ParameterServer])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_subclass_that_leaves_a_bucket_out_is_told_so_on_every_rank(scheme, ranks) -> None:
    class Some(scheme):
        def bucket_ready(self, bucket: Any) -> None:
            if bucket.index != 1:
                super().bucket_ready(bucket)

    def rank(comm: Any) -> str:
        trainer = trainer_of(Some(comm), SGD(0.1))
        with pytest.raises(ValueError, match="Some: expected bucket_ready") as error:
            fit(trainer, 1)
        return str(error.value)

    told = run_threads(ranks, rank)
    assert told == ranks * [
        "Some: expected bucket_ready to start a message of bucket 1 of 3, got none; call "
        "super().bucket_ready(bucket) for every bucket, or override the method that "
        "waits for it"
    ]
