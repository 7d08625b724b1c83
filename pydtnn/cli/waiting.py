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
    straggler_factor: float = option(
        COMMUNICATION,
        1.5,
        "after each epoch, name ranks that compute this many times as long as the others, with the "
        "phase that takes longer; 0 for none",
        at_least=0,
    )

    def check_waits(self) -> None:
        """Raise ValueError if the factor would name ranks that are not slower."""
        if 0 < self.straggler_factor < 1:
            raise ValueError(
                "train: --straggler-factor must be 0 or at least 1, got "
                f"{self.straggler_factor:g}; use 1.5 for ranks that take half as long again"
            )
