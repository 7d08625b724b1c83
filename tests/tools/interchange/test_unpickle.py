from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.tools.interchange.unpickle import DAMAGED, UnsafePickle, run_pickle
from tests.each import each


def read(content: bytes) -> Any:
    return run_pickle(io.BytesIO(content), {})


@each("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_are_read_in_every_protocol(protocol):
    content = {
        "numbers": [0, 1, -1, 255, 256, -70000, 2**31, 2**63, 0.5, True, False, None],
        "text": ["a", "\u00e9", "x" * 300],
        "nested": {"list": [[], [1], ()], "pair": (1, (2, 3, 4), (1, 2, 3, 4, 5))},
    }
    found = read(pickle.dumps(content, protocol))
    assert found == content


class Call:
    """Something whose pickle calls a function when it is read."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@each("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_wants_to_run_code_is_refused_and_nothing_runs(tmp_path, protocol):
    made = tmp_path / "made"
    content = pickle.dumps({"data": Call(os.mkdir, str(made))}, protocol)
    with pytest.raises(UnsafePickle, match=r"^\w+\.mkdir$"):
        read(content)
    assert not made.exists()


@each(
    ("content", "reason"),
    [
        (pickle.dumps(Call(getattr, "", "join")), "getattr"),
        (pickle.dumps({"data": np.float64(1)}), "numpy"),
        (b"\x80\x02cnumpy\nload\n.", "numpy.load"),
        (b"\x80\x04\x8c\x04os\n \x8c\x07sys\ntem\x93.", "os\n .sys\ntem"),  # STACK_GLOBAL
        (b"\x80\x02U\x01xQ.", "an object outside the file"),
        (b"\x80\x02\x82\x01.", "the instruction 0x82"),
        (b"\x80\x05\x96" + b"\xff" * 7 + b"\x7f.", "the instruction 0x96"),  # BYTEARRAY8
    ],
)
def test_whatever_is_not_data_is_refused(content, reason):
    with pytest.raises(UnsafePickle, match=reason):
        read(content)


@each("content", [b"", b"\x80\x04}\x8c\x01a", b"\x80\x02}}b.", b"\x80\x02]K\x01K\x02s."])
def test_damaged_pickles_have_errors_of_known_types(content):
    """Cut off; and an object that has no state, or no keys."""
    with pytest.raises(DAMAGED):
        read(content)


READ = """
import resource, sys
from pathlib import Path
from pydtnn.tools.interchange.unpickle import DAMAGED, run_pickle
now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (int(sys.argv[2]) << 20),) * 2)
try:
    print(run_pickle(open(sys.argv[1], "rb"), {}))
except DAMAGED as error:
    print("it cannot be read:", error)
"""


def read_apart(tmp_path: Path, content: bytes, mebibytes: int) -> str:
    """Read a pickle in a process with a limit of memory; return what it printed."""
    path = tmp_path / "batch"
    path.write_bytes(content)
    command = [sys.executable, "-c", READ, str(path), str(mebibytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-300:]
    return done.stdout


NESTED = b")" + b"\x85" * 300_000


@pytest.mark.long
@each("content", [b"\x80\x02}(" + NESTED + b"K\x01u.", b"\x80\x02(" + NESTED + b"K\x01d."])
def test_deeply_nested_objects_do_not_end_the_interpreter(tmp_path, content):
    """Hashing a nested tuple recurses in C without a limit: 150,000 exceed a stack of 8 MiB."""
    assert "it cannot be read" in read_apart(tmp_path, content, 4096)


@each(
    "content",
    [
        b"\x80\x02}(U\x01ar\xff\xff\xff\xffK\x01u.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f}.",
        b"\x80\x04}(\x8c\x01a\x8e\xff\xff\xff\xff\xff\xff\xff\x7fu.",
    ],
)
def test_a_huge_size_that_a_pickle_declares_takes_no_memory(tmp_path, content):
    told = read_apart(tmp_path, content, 64)
    assert "it cannot be read" in told or told in ("{}\n", "{'a': 1}\n")
    assert "memory" not in told.lower()
