from __future__ import annotations

import pytest

from pydtnn.utils.suggest import unknown


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("cosin", "unknown schedule 'cosin'; did you mean 'cosine'?"),
        ("COSINE", "unknown schedule 'COSINE'; did you mean 'cosine'?"),
        ("warm", "unknown schedule 'warm'; did you mean 'Warmup'?"),
        ("xyz", "unknown schedule 'xyz'; choose one of 'Warmup', 'cosine', 'step'"),
    ],
)
def test_an_unknown_name_is_told_with_the_nearest_ones_or_all(name: str, sentence: str) -> None:
    assert unknown("schedule", name, ["cosine", "step", "Warmup"]) == sentence


def test_where_there_is_nothing_to_choose_the_sentence_says_so() -> None:
    assert unknown("option", "x", []) == "unknown option 'x'; there is none to choose from"
