"""Sizes in words."""

from __future__ import annotations

import pytest

from pydtnn.utils.sizes import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("7B", 7), ("2GiB", 2 << 30), ("2 gb", 2 * 10**9), ("0.5k", 512), (" 3T ", 3 << 40)],
)
def test_units_are_powers_of_1000_or_1024(text: str, size: int) -> None:
    assert parse_size("limit", text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e3", "2XB", "0", "0.0001", "3iB", "1 2"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="limit: expected a size such as 500MiB or 2GiB, got"):
        parse_size("limit", text)
