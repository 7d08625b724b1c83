"""JSON objects with a format number, as in checkpoints and saved models."""

from __future__ import annotations

import json
from typing import Any


def parse_object(data: bytes, name: str, version: int) -> dict[str, Any]:
    """Return the object in a file's content.

    Parameters
    ----------
    data : bytes
    name : str
        Name of the file, for errors.
    version : int
        Required value of "format".

    Raises
    ------
    ValueError
        If it is not a JSON object, or has another format.
    """
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"{name} cannot be parsed ({reason})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{name} must contain an object")
    found = content.get("format")
    if type(found) is not int or found != version:
        raise ValueError(f"its format must be {version} for this version of pydtnn, got {found}")
    return content
