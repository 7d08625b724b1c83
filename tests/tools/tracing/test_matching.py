import numpy as np

from pydtnn.tools.tracing.records import RECORD
from pydtnn.tools.tracing.timeline import match_messages
from pydtnn.utils.observer import Kind


def records(*rows):
    """Records from (kind, name, peer, tag, step, start)."""
    found = np.zeros(len(rows), RECORD)
    for field, column in zip(
        ("kind", "name", "peer", "tag", "step", "start"), zip(*rows, strict=True), strict=True
    ):
        found[field] = column
    return found


def match(*ranks):
    names = np.arange(2)
    return match_messages([(rank, names, rank["start"], rank["start"] + 1) for rank in ranks], 0)


def test_the_nth_message_of_a_group_and_tag_is_the_nth_received():
    sender = records(
        (Kind.SENT, 0, 1, 5, 0, 10),
        (Kind.SENT, 0, 1, 6, 0, 11),
        (Kind.SENT, 1, 1, 5, 0, 12),
        (Kind.SENT, 0, 1, 5, 0, 13),
    )
    receiver = records(  # in the order of their ends
        (Kind.RECEIVED, 0, 0, 6, 0, 20),
        (Kind.RECEIVED, 0, 0, 5, 0, 22),
        (Kind.RECEIVED, 1, 0, 5, 0, 23),
        (Kind.RECEIVED, 0, 0, 5, 0, 21),
    )
    found = match(sender, receiver)
    pairs = zip(found.sent["start"], found.received["start"], strict=True)
    assert [*pairs] == [(10, 21), (11, 20), (12, 23), (13, 22)]


def test_messages_between_other_ranks_are_not_confused():
    a = records((Kind.SENT, 0, 1, 0, 0, 10), (Kind.SENT, 0, 2, 0, 0, 11))
    b = records((Kind.RECEIVED, 0, 0, 0, 0, 30))
    c = records((Kind.RECEIVED, 0, 0, 0, 0, 20))
    found = match(a, b, c)
    assert found.received["start"].tolist() == [30, 20]
    assert found.received["target"].tolist() == [1, 2]


def test_if_a_side_recorded_more_steps_messages_match_within_steps():
    sender = records(*((Kind.SENT, 0, 1, 0, step, 10 * step) for step in (1, 2, 3)))
    receiver = records(*((Kind.RECEIVED, 0, 0, 0, step, 10 * step + 1) for step in (2, 3)))
    found = match(sender, receiver)
    assert found.sent["step"].tolist() == found.received["step"].tolist() == [2, 3]
    assert found.unmatched_sent["step"].tolist() == [1]
    assert len(found.unmatched_received) == 0


def test_messages_with_processes_that_are_no_ranks_of_the_run_have_no_other_side():
    found = match(records((Kind.SENT, 0, -1, 0, 0, 10), (Kind.RECEIVED, 0, -1, 0, 0, 10)))
    assert len(found) == 0
    assert found.unmatched_sent["target"].tolist() == [-1]
    assert found.unmatched_received["source"].tolist() == [-1]
