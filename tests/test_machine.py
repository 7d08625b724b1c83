"""Tests of `pydtnn.machine`, on machines that are made up."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from pydtnn.machine import cpu_model, cpu_name

X86 = """processor\t: 0
cpu family\t: 6
model\t\t: 207
model name\t: Some Processor

processor\t: 1
model name\t: Another Processor
"""

ARM = """processor\t: 0
CPU implementer\t: 0x41
CPU part\t: 0xd0c
"""


@pytest.mark.parametrize(
    ("text", "name", "model"),
    [
        (X86, "Some Processor", "Some Processor, cpu family 6, model 207"),
        (ARM, "arm chip", "arm chip, CPU implementer 0x41, CPU part 0xd0c"),
        ("", "arm chip", "arm chip"),
    ],
)
def test_a_cpu_is_known_by_its_name_and_numbers(
    text: str, name: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "processor", lambda: "arm chip")
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    assert (cpu_name(), cpu_model()) == (name, model)


def test_a_system_without_proc_tells_the_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(Path, "read_text", missing)
    assert cpu_name() == cpu_model() == "riscv64"
