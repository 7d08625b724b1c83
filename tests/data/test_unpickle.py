from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.data.unpickle import read_pickle
from tests.data.pickles import array, numbers, pickled, string
from tests.each import each


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_pickles_of_python_2_and_3_give_their_arrays_lists_and_strings(tmp_path, rng):
    data = rng.integers(0, 256, (3, 5)).astype(np.uint8)
    old = pickled(data=array(data), labels=numbers([1, 2, 300]), batch_label=string(b"a batch"))
    for order in ("C", "F"):
        values = {"data": np.asarray(data, order=order), "labels": [1, 2, 300]}
        for content in (old, pickle.dumps(values, protocol=4)):
            found = read_pickle(write(tmp_path / "batch", content))
            assert found["data"].dtype == np.uint8
            np.testing.assert_array_equal(found["data"], data)
            assert found["labels"] == [1, 2, 300]
            assert found.get("batch_label", b"a batch") == b"a batch"


@each("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_are_read_in_every_protocol(tmp_path, protocol):
    content = {
        "numbers": [0, 1, -1, 255, 256, -70000, 2**31, 2**63, 0.5, True, False, None],
        "text": ["a", "\u00e9", "x" * 300],
        "nested": {"list": [[], [1], ()], "pair": (1, (2, 3, 4), (1, 2, 3, 4, 5))},
    }
    found = read_pickle(write(tmp_path / "batch", pickle.dumps(content, protocol)))
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
    with pytest.raises(ValueError, match=r"refers to \w+\.mkdir; nothing was executed: delete"):
        read_pickle(write(tmp_path / "batch", content))
    assert not made.exists()


ZEROS = np.zeros((2, 3), np.uint8)


@each(
    ("content", "reason"),
    [
        (pickle.dumps(Call(getattr, "", "join")), "refers to"),
        (pickle.dumps({"data": np.float64(1)}), "refers to"),
        (b"\x80\x02cnumpy\nload\n.", "refers to"),
        (b"\x80\x02cnumpy\nndarray.tofile\n.", "refers to"),
        (b"\x80\x04\x8c\x04os\n \x8c\x07sys\ntem\x93.", "refers to"),  # STACK_GLOBAL, two lines
        (b"\x80\x02U\x01xQ.", "refers to"),
        (b"\x80\x02\x82\x01.", "refers to"),
        (pickled(data=array(ZEROS, length=5)), "wrong number of bytes for its shape"),
        (pickled(data=array(ZEROS, code=b"O8")), "an array of b'O8'"),
        (pickled(data=b"cnumpy\nndarray\n}b"), "it cannot be read"),
        (pickle.dumps({"data": np.zeros(3, np.float32)}, 4), "an array of 'f4'"),
        (pickled(data=array(ZEROS))[:-4], "it cannot be read"),
        (b"", "it cannot be read"),
        (pickle.dumps([1, 2]), "expected a pickled dictionary, got list"),
    ],
)
def test_whatever_is_not_data_is_refused_in_one_sentence(tmp_path, content, reason):
    with pytest.raises(ValueError, match=reason) as error:
        read_pickle(write(tmp_path / "batch", content))
    assert "\n" not in str(error.value)
    assert str(tmp_path / "batch") in str(error.value)


READ = """
import resource, sys
from pathlib import Path
from pydtnn.data.cifar import read_pickle
now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (int(sys.argv[2]) << 20),) * 2)
try:
    print(read_pickle(Path(sys.argv[1])))
except ValueError as error:
    print(error)
"""


def read_apart(tmp_path: Path, content: bytes, mebibytes: int) -> str:
    """Read a pickle in a process with a limit of memory; return what it printed."""
    path = write(tmp_path / "batch", content)
    command = [sys.executable, "-c", READ, str(path), str(mebibytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-300:]
    return done.stdout


NESTED = b")" + b"\x85" * 300_000


@pytest.mark.long
@each(
    "content",
    [
        b"\x80\x02}(" + NESTED + b"K\x01u.",
        pickled(data=array(ZEROS)).replace(b"T\x02\x00\x00\x00u1", NESTED),
    ],
)
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
