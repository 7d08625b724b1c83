import pytest

from pydtnn.tools.perfmodel.overlap import Channel, Round

ROUND = Round(latency=1.0, transfer=2.0, work=0.5)


def test_an_operation_takes_all_its_rounds():
    channel = Channel()
    assert channel.wait(channel.start([ROUND] * 3, 0.0), 0.0) == pytest.approx(3 * 3.5)
    assert channel.busy == 6


def test_an_operation_without_rounds_is_complete():
    channel = Channel()
    assert channel.wait(channel.start([], 4.0), 4.0) == 4


def test_a_round_begins_at_the_call_after_the_one_before_has_arrived():
    channel = Channel()
    operation = channel.start([ROUND, ROUND], 0.0)
    assert channel.poll(2.9) == 2.9  # the messages arrive at 3
    assert channel.poll(10.0) == 10.5  # and are handled here
    assert not operation.done
    assert channel.wait(operation, 10.5) == pytest.approx(10.5 + 3 + 0.5)


def test_operations_share_the_link():
    channel = Channel()
    first, second = (channel.start([Round(0.0, 2.0, 0.0)], 0.0) for _ in range(2))
    assert channel.wait(first, 0.0) == channel.wait(second, 0.0) == 4


def test_a_short_message_does_not_wait_for_a_long_one():
    channel = Channel()
    long = channel.start([Round(0.0, 10.0, 0.0)], 0.0)
    short = channel.start([Round(0.0, 1.0, 0.0)], 4.0)
    assert channel.wait(short, 4.0) == 6  # at half the rate
    assert channel.wait(long, 6.0) == 11
