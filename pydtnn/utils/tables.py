"""Tables of rows as text that other programs read."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def csv_of(rows: Sequence[Mapping[str, Any]], first: Iterable[str] = ()) -> str:
    """Return rows as comma-separated values, after a line with the names of the columns.

    Parameters
    ----------
    rows : sequence of mapping of str to object
        A column that a row lacks is empty.
    first : iterable of str, optional
        The first columns; the others follow in the order in which rows have them.

    Examples
    --------
    >>> csv_of([{"loss": 0.5}, {"loss": 0.25, "accuracy": 1.0}]).splitlines()
    ['loss,accuracy', '0.5,', '0.25,1.0']
    """
    text = io.StringIO()
    columns = dict.fromkeys([*first, *(name for row in rows for name in row)])
    writer = csv.DictWriter(text, [*columns], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
