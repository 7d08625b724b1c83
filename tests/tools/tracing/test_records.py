import shutil
import zipfile

import numpy as np
import pytest

from pydtnn.tools.tracing import RECORD, read_traces, write_trace
from tests.tools.tracing.synthetic import write_run


@pytest.fixture
def folder(tmp_path):
    write_run(tmp_path / "run", ranks=2, steps=1)
    return tmp_path / "run"


def change(folder, *, records=None, **about):
    """Write the trace of rank 1 again with other content."""
    trace = read_traces(folder)[1]
    for field, value in (records or {}).items():
        trace.records[field] = value
    content = trace.about | about
    path = folder / "rank-0001.npz"
    path.unlink()
    text = {key: value for key, value in content.items() if value is not None}
    (folder / "new").mkdir()
    write_trace(folder / "new", trace.records, trace.names, text)
    next((folder / "new").glob("*.npz")).rename(path)


def test_what_is_written_is_read(tmp_path):
    records = np.zeros(3, RECORD)
    records["start"] = 5, 2**40, 7
    records["name"] = 1, 0, 1
    clock = {"offset": 3, "drift": 1e-6, "origin": 4, "error": 0}
    about = {"rank": 0, "size": 1, "lanes": ["main"], "clock": clock}
    write_trace(tmp_path, records, ["step", "größe"], about)
    (trace,) = read_traces(tmp_path)
    np.testing.assert_array_equal(trace.records, records)
    assert trace.names == ["step", "größe"]
    assert trace.about == {"version": 2, **about}


def test_missing_files_and_those_of_several_runs_are_named(folder, tmp_path):
    with pytest.raises(ValueError, match=r"has no rank-\*\.npz; give the folder of --trace"):
        read_traces(tmp_path)
    write_run(tmp_path / "other", ranks=3, steps=1)
    shutil.copy(tmp_path / "other" / "rank-0001.npz", folder)
    with pytest.raises(ValueError, match="files of several runs: rank 1 was one of 3 ranks"):
        read_traces(folder)
    (folder / "rank-0000.npz").unlink()
    with pytest.raises(ValueError, match="has the files of ranks 1 of"):
        read_traces(folder)


@pytest.mark.parametrize("length", [0, 100, -1])
def test_a_truncated_file_is_damaged(folder, length):
    path = folder / "rank-0001.npz"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"rank-0001\.npz is damaged \(.*trace the run again"):
        read_traces(folder)


def test_a_file_that_expands_to_gigabytes_is_refused_before_it_is_read(folder):
    path = folder / "rank-0001.npz"
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    block = bytes(1 << 20)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            with file.open(name, "w") as stream:
                stream.write(data)
                for _ in range(80 * (name == "records.npy")):
                    stream.write(block)
    with pytest.raises(
        ValueError, match=r"damaged \(it expands from .* B to 83,.*more than 67,108"
    ):
        read_traces(folder)


def test_a_header_of_more_records_than_the_file_has_allocates_nothing(folder):
    path = folder / "rank-0001.npz"
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    header = members["records.npy"]
    count = header[header.index(b"'shape': (") + 10 :].partition(b",")[0]
    members["records.npy"] = header.replace(b"(%s,)" % count, b"(9%s,)" % count).replace(
        b" \n", b"\n", 1
    )
    with zipfile.ZipFile(path, "w") as file:
        for name, data in members.items():
            file.writestr(name, data)
    with pytest.raises(ValueError, match=r"damaged \(.* B for an array of shape \(9"):
        read_traces(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"version": 1}, "is of another version"),
        ({"rank": 0}, "it contains rank 0"),
        ({"size": 10**9}, "its rank is 1 of 1000000000"),
        ({"clock": {"offset": 1, "drift": "x", "origin": 0}}, "it has no clock"),
        ({"clock": {"offset": 10**400, "drift": 0.0, "origin": 0}}, "it has no clock"),
        ({"clock": {"offset": 1, "drift": 9.0, "origin": 0}}, "it has no clock"),
        ({"lanes": [7, 8]}, "it has no threads"),
        ({"lanes": ["main"]}, "a record has lane 1 of 1"),
        ({"layers": []}, "its layers or machine are no objects"),
        ({"layers": {"fc": {"type": "Linear"}}}, "the layer 'fc' has no forward_flops"),
        ({"machine": {"flops_per_second": "x"}}, "its flops_per_second is not a number"),
        ({"host": 3}, "its host is not a text"),
        ({"records": {"start": -1}}, "a record is not within"),
        ({"records": {"depth": 9999}}, "a record has depth 9999"),
        ({"records": {"name": 99}}, "a record has name 99 of"),
        ({"records": {"duration": -1}}, "a record has a negative duration"),
        ({"records": {"peer": 2}}, "a peer that is not one of 2 ranks"),
    ],
)
def test_content_that_is_not_consistent_is_refused(folder, content, message):
    change(folder, **content)
    with pytest.raises(ValueError, match=rf"^trace: .*rank-0001\.npz .*{message}"):
        read_traces(folder)
