"""Random damage to every file that pydtnn reads ends in the right values or in one sentence.

Each kind of file is read by a process of its own, so that a crash, a hang or an explosion of memory
is a failure that names the case. Files that are only written (history.csv) have no place
here, nor have the digits, which scikit-learn reads.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.fuzz.damage import change_json, damage
from tests.fuzz.damaged_files import KINDS

PATIENCE = 300.0
"""Seconds after which a process that reads a small file hangs, also on a busy machine."""


class Reader:
    """A process that damages and reads files of one kind, a case per line."""

    def __init__(self, kind: str, folder: Path) -> None:
        folder.mkdir()
        command = [sys.executable, "-m", "tests.fuzz.damaged_files", kind, str(folder)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def answer(self, seed: int) -> dict[str, str]:
        """Try one case."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{seed}\n".encode())
        stdin.flush()
        ready, _, _ = select.select([stdout], [], [], PATIENCE)
        assert ready, f"seed {seed}: the reader hangs"
        line = stdout.readline()
        if not line:
            stderr = self.process.stderr
            assert stderr is not None
            told = stderr.read().decode(errors="replace")[-500:]
            pytest.fail(f"seed {seed}: the reader ended with {self.process.wait()}: {told}")
        return json.loads(line)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Reader]:
    made = Reader(request.param, tmp_path / "files")
    yield made
    made.close()


def check(answer: dict[str, str]) -> None:
    assert answer["outcome"] in ("read", "refused"), f"{answer['done']}: {answer['error']}"


@pytest.mark.fuzz("damage")
@pytest.mark.parametrize("reader", KINDS, indirect=True)
def test_a_damaged_file_is_read_as_it_is_or_refused_in_a_sentence(reader, cases):
    for case in cases:
        case.compare(check, reader.answer(int(case.rng.integers(1 << 62))))


def test_damage_changes_bytes_and_is_the_same_for_the_same_seed():
    data, others = bytes(range(256)) * 20, [b"other" * 99]
    made = [[damage(data, np.random.default_rng(n), others) for n in range(200)] for _ in range(2)]
    assert made[0] == made[1]
    assert sum(changed != data for changed, _ in made[0]) > 190
    text = json.dumps({"a": {"b": [1, 2]}, "c": None}).encode()
    changes = [change_json(text, np.random.default_rng(n))[0] for n in range(200)]
    assert sum(json.loads(changed) != json.loads(text) for changed in changes) > 150
