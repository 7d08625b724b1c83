"""Random combinations of features: table, trainer, command line and oracle answer alike."""

from __future__ import annotations

import pytest

from tests import combinations


@pytest.mark.fuzz("distributed")
def test_all_answer_alike_whether_features_can_be_combined(cases, tmp_path):
    for case in cases:
        options = combinations.draw(case.rng)
        case.compare(combinations.judge, options, tmp_path / str(case.number))
