"""Options of waits for other ranks."""

from __future__ import annotations

from dataclasses import dataclass

from pydtnn.cli.options import COMMUNICATION, option


@dataclass(frozen=True)
class WaitOptions:
    """Options of the configuration that limit waits, and name slow ranks."""

    timeout: float = option(
        COMMUNICATION,
        300.0,
        "longest wait for other ranks or for a batch, in s; then a table names the rank that is "
        "late, and all ranks end with status 75; 0 for no limit",
        at_least=0,
    )
