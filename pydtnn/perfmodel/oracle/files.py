"""Ranked strategies as JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydtnn.utils.files import write_file


def write_json(path: Path, head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write all rows, with a description of what is predicted; units are SI."""
    text = json.dumps({**head, "predictions": list(rows)}, indent=1)
    write_file("oracle", path, text.encode() + b"\n")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write all rows; a column that a row lacks is empty."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_file("oracle", path, out.getvalue().encode())
