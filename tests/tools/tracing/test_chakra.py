"""Execution traces of Chakra: what is exported."""

import json
from pathlib import Path

import numpy as np
import pytest

from pydtnn.tools.tracing import load_timeline
from pydtnn.tools.tracing.analysis import usage
from pydtnn.tools.tracing.chakra import NodeType
from pydtnn.tools.tracing.exports import FORMATS
from pydtnn.tools.tracing.exports.chakra import to_nodes
from tests.tools.tracing.synthetic import LAYERS, write_run

SAMPLES = Path(__file__).parent / "chakra"


@pytest.fixture(scope="module")
def timeline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_run(folder, ranks=4, steps=5, noise=0.1)
    return load_timeline(folder)


@pytest.fixture(scope="module")
def exported(timeline, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "chakra"
    FORMATS["chakra"].write(timeline, folder)
    return [folder / f"step.{rank}.et" for rank in range(4)]


@pytest.fixture
def messages():
    """The classes of the official schema, by the official library."""
    protobuf = pytest.importorskip("google.protobuf")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    assert protobuf.__version__
    found = descriptor_pb2.FileDescriptorSet.FromString((SAMPLES / "et_def.desc").read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in found.file:
        pool.Add(file)
    names = ("GlobalMetadata", "Node")
    return [
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}"))
        for name in names
    ]


def parts_of(data):
    """Yield the messages of a file."""
    while data:
        length, shift = 0, 0
        while True:
            byte, data = data[0], data[1:]
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        yield data[:length]
        data = data[length:]


def test_the_official_library_reads_what_is_exported(exported, timeline, messages):
    metadata, kind = messages
    ranks, _ = to_nodes(timeline)
    for path, nodes in zip(exported, ranks, strict=True):
        first, *rest = parts_of(path.read_bytes())
        assert metadata.FromString(first).version == "0.0.4"
        assert len(rest) == len(nodes) > 10
        for data, node in zip(rest, nodes, strict=True):
            found = kind.FromString(data)
            assert (found.id, found.name, found.type) == (node.id, node.name, node.type)
            assert [*found.data_deps] == node.data
            assert [*found.ctrl_deps] == node.control
            assert (found.start_time_micros, found.duration_micros) == (node.start, node.duration)
            values = {one.name: getattr(one, one.WhichOneof("value")) for one in found.attr}
            assert values == node.attributes


def test_computation_is_that_of_the_step_and_sums_run_beside_it(timeline):
    steps = timeline.steps
    taken = np.sort(steps.stop.max(axis=1) - steps.start.min(axis=1))[len(steps) // 2]
    for rank, nodes in enumerate(to_nodes(timeline)[0]):
        work = [node for node in nodes if node.type == NodeType.COMP]
        assert sum(node.duration for node in work) < taken / 1000
        mean = 1e6 * usage(timeline)[rank].compute / len(steps)
        assert sum(node.duration for node in work) == pytest.approx(mean, rel=0.05)
        assert {f"{name} (backward)" for name in LAYERS} <= {node.name for node in work}
        sums = [node for node in nodes if node.type == NodeType.COMM_COLL]
        assert [node.attributes["comm_size"] for node in sums] == [2000] * 2  # 2 * 3 / 4 of it
        for one in sums:
            after = [node for node in nodes if one.id in node.data]
            assert [node.name for node in after] == ["update"]
            beside = [node for node in work if one.id < node.id < after[0].id]
            assert beside
            assert all(one.id not in node.data for node in beside)
        order = [node for node in work if node.control]
        assert all(node.control[0] in node.data for node in order)


def test_groups_of_some_ranks_are_numbered_in_a_file_beside_the_nodes(tmp_path):
    write_run(tmp_path / "run", steps=3)
    timeline = load_timeline(tmp_path / "run")
    everyone = timeline.name_id("all")
    timeline.names += ["left", "right"]
    calls = timeline.activities["group"] == everyone
    right = timeline.activities["rank"] >= 2
    timeline.activities["group"][calls] = len(timeline.names) - 2 + right[calls]
    FORMATS["chakra"].write(timeline, tmp_path / "out")
    groups = json.loads((tmp_path / "out" / "groups.json").read_text())
    assert groups == {"1": [0, 1], "2": [2, 3]}
    for rank, nodes in enumerate(to_nodes(timeline)[0]):
        sums = [node for node in nodes if node.type == NodeType.COMM_COLL]
        assert {node.attributes["pg_name"] for node in sums} == {"12"[rank // 2]}
