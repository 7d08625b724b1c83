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


def test_a_pickle_of_python_2_gives_its_arrays_lists_and_strings(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    data = rng.integers(0, 256, (3, 5)).astype(np.uint8)
    content = pickled(data=array(data), labels=numbers([1, 2, 300]), batch_label=string(b"a batch"))
    found = read_pickle(write(tmp_path / "batch", content))
    assert sorted(found) == ["batch_label", "data", "labels"]
    assert found["data"].dtype == np.uint8
    np.testing.assert_array_equal(found["data"], data)
    assert found["labels"] == [1, 2, 300]
    assert found["batch_label"] == b"a batch"


@each("order", ["C", "F"])
def test_a_pickle_of_python_3_gives_its_arrays(
    tmp_path: Path, rng: np.random.Generator, order: Any
) -> None:
    data = np.asarray(rng.integers(0, 256, (3, 5)), np.uint8, order=order)
    content = pickle.dumps({"data": data, "labels": [1, 2, 3]}, protocol=4)
    found = read_pickle(write(tmp_path / "batch", content))
    np.testing.assert_array_equal(found["data"], data)
    assert found["labels"] == [1, 2, 3]


class Call:
    """Something whose pickle calls a function when it is read."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@each("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_wants_to_run_code_is_refused_and_nothing_runs(
    tmp_path: Path, protocol: int
) -> None:
    made = tmp_path / "made"
    content = pickle.dumps({"data": Call(os.mkdir, str(made))}, protocol)
    with pytest.raises(ValueError, match=r"refers to \w+\.mkdir; nothing was executed: delete"):
        read_pickle(write(tmp_path / "batch", content))
    assert not made.exists()


@each(
    "content",
    [
        pickle.dumps(Call(eval, "1")),
        pickle.dumps(Call(getattr, "", "join")),
        pickle.dumps({"data": np.float64(1)}),
        pickle.dumps({"data": Path("x")}),
        b"\x80\x02cnumpy\nload\n.",
        b"\x80\x02cnumpy\nndarray.tofile\n.",
        b"\x80\x02cpydtnn.data.unpickle\nread_pickle\n.",
        b"\x80\x02U\x01xQ.",
        b"\x80\x02\x82\x01.",
    ],
)
def test_whatever_is_not_data_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ValueError, match=r"refers to|it cannot be read"):
        read_pickle(write(tmp_path / "batch", content))


@each(
    ("content", "reason"),
    [
        (
            pickled(data=array(np.zeros((2, 3), np.uint8), length=5)),
            "wrong number of bytes for its shape",
        ),
        (pickled(data=array(np.zeros((2, 3), np.uint8), code=b"O8")), "an array of b'O8'"),
        (pickled(data=b"cnumpy\nndarray\n}b"), "it cannot be read"),
        (pickle.dumps({"data": np.zeros(3, np.float32)}, 4), "an array of 'f4'"),
        (pickled(data=array(np.zeros((2, 3), np.uint8)))[:-4], "it cannot be read"),
        (b"", "it cannot be read"),
        (b"not a pickle", "it cannot be read"),
        (pickle.dumps([1, 2]), "expected a pickled dictionary, got list"),
    ],
)
def test_a_damaged_pickle_is_told_in_one_sentence(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        read_pickle(write(tmp_path / "batch", content))
    assert "\n" not in str(error.value)
    assert str(tmp_path / "batch") in str(error.value)


DEPTH = 300_000
NESTED = b"\x80\x02}(U\x01a)" + b"\x85" * DEPTH
DEEP = {
    "a tuple as a key": NESTED.replace(b"U\x01a", b"") + b"K\x01u.",
    "a tuple as a value": NESTED + b"u.",
    "a list as a value": b"\x80\x02}(U\x01a" + b"](" * DEPTH + b"e" * DEPTH + b"u.",
    "a tuple instead of a type": pickled(data=array(np.zeros((1, 1), np.uint8))).replace(
        b"T\x02\x00\x00\x00u1", b")" + b"\x85" * DEPTH
    ),
}


@pytest.mark.long
@each("where", DEEP)
def test_deeply_nested_objects_do_not_end_the_interpreter(tmp_path: Path, where: str) -> None:
    """Hashing a nested tuple recurses in C without a limit: 150,000 exceed a stack of 8 MiB."""
    path = write(tmp_path / "batch", DEEP[where])
    code = (
        "import sys; from pathlib import Path; from pydtnn.data.cifar import read_pickle\n"
        "try: print(sorted(read_pickle(Path(sys.argv[1]))))\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-300:]
    assert "it cannot be read" in done.stdout or where.endswith("as a value")


@each(
    "content",
    [
        b"\x80\x02}(U\x01ar\xff\xff\xff\xffK\x01u.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f}.",
        b"\x80\x04}(\x8c\x01a\x8e\xff\xff\xff\xff\xff\xff\xff\x7fu.",
    ],
)
def test_a_huge_size_that_a_pickle_declares_takes_no_memory(tmp_path: Path, content: bytes) -> None:
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from pydtnn.data.cifar import read_pickle\n"
        "now = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (now + (64 << 20),) * 2)\n"
        "try: print(read_pickle(Path(sys.argv[1])))\n"
        "except ValueError as error: print(error)"
    )
    path = write(tmp_path / "batch", content)
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-300:]
    assert "it cannot be read" in done.stdout or done.stdout in ("{}\n", "{'a': 1}\n")
    assert "memory" not in done.stdout.lower()


@each("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_are_read_in_every_protocol(tmp_path: Path, protocol: int) -> None:
    content = {
        "numbers": [0, 1, -1, 255, 256, -70000, 2**31, 2**63, 0.5, True, False, None],
        "text": ["a", "\u00e9", "x" * 300],
        "nested": {"list": [[], [1], ()], "pair": (1, (2, 3, 4), (1, 2, 3, 4, 5))},
    }
    found = read_pickle(write(tmp_path / "batch", pickle.dumps(content, protocol)))
    assert found == content


def test_a_name_with_ends_of_lines_is_refused_in_one_line(tmp_path: Path) -> None:
    content = b"\x80\x04\x8c\x04os\n \x8c\x07sys\ntem\x93."  # STACK_GLOBAL
    with pytest.raises(ValueError, match="refers to") as caught:
        read_pickle(write(tmp_path / "batch", content))
    assert "\n" not in str(caught.value)
