"""What distinguishes this machine from others."""

from __future__ import annotations

import platform
from pathlib import Path

NUMBERS = ("cpu family", "model", "CPU implementer", "CPU part")
"""What Linux tells of a CPU beside its name, which hypervisors shorten and ARM's lack."""


def cpu_name() -> str:
    """Return the name of the CPU in its maker's words, or at least its architecture."""
    return _cpu().get("model name") or platform.processor() or platform.machine()


def cpu_model() -> str:
    """Return the name of the CPU with the numbers that tell its generation."""
    cpu = _cpu()
    return ", ".join([cpu_name(), *(f"{name} {cpu[name]}" for name in NUMBERS if name in cpu)])


def _cpu() -> dict[str, str]:
    """What Linux tells of the first core."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # another system
        return {}
    lines = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}
