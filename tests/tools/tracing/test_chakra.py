"""Execution traces of Chakra: what is exported, what is read, and how long it takes here."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from pydtnn.tools.trace import main
from pydtnn.tools.tracing import load_timeline
from pydtnn.tools.tracing.analysis import usage
from pydtnn.tools.tracing.chakra import Collective, Node, NodeType, encode, read_nodes
from pydtnn.tools.tracing.execution import groups_of
from pydtnn.tools.tracing.exports import FORMATS
from pydtnn.tools.tracing.exports.chakra import to_nodes
from tests.each import each
from tests.tools.tracing.synthetic import LAYERS, write_run

SAMPLES = Path(__file__).parent / "chakra"
LATENCY, BANDWIDTH, CALL = 50e-6, 125e6, 30e-6
"""Of the platform cpu-1gbit, in s and B/s."""


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


def took(capsys, *files, platform="cpu-1gbit"):
    """Import files; return the time of each rank and its computation, in s."""
    assert main(["import", "--format", "chakra", "--platform", platform, *map(str, files)]) == 0
    rows = re.findall(r"^rank \d+ .*$", capsys.readouterr().out, re.MULTILINE)
    return [[1e-3 * float(time) for time in re.findall(r"([\d.e-]+) ms", row)[:2]] for row in rows]


def refused(capsys, *files):
    assert main(["import", "--format", "chakra", "--platform", "cpu-1gbit", *map(str, files)]) == 1
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    return text


def write(folder, *ranks):
    paths = [folder / f"trace.{rank}.et" for rank in range(len(ranks))]
    for path, nodes in zip(paths, ranks, strict=True):
        path.write_bytes(encode(nodes))
    return paths


def collective(kind, size, one=1, **more):
    attributes = {"comm_type": kind.value, "comm_size": size, **more}
    return Node(one, kind.name, NodeType.COMM_COLL, attributes=attributes)


def computed(one, duration, *before, host=False):
    return Node(
        one, "work", NodeType.COMP, [*before], duration=duration, attributes={"is_cpu_op": host}
    )


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


def test_what_the_official_library_writes_is_read(tmp_path, messages):
    metadata, kind = messages
    node = kind(id=7, name="sum", type=7, ctrl_deps=[1 << 40], duration_micros=3)
    for name, field, value in (
        ("comm_type", "int64_val", 0),
        ("comm_size", "uint64_val", 1 << 20),
        ("a", "sint64_val", -5),
        ("b", "int32_val", -6),
        ("c", "float_val", 0.5),
        ("d", "sfixed64_val", -7),
        ("e", "string_val", "text"),
        ("f", "bool_val", True),
    ):
        setattr(node.attr.add(name=name), field, value)
    node.attr.add(name="g").bool_list.values.extend([True])
    node.inputs.values = "[]"
    parts = [metadata(version="0.0.4").SerializeToString(), node.SerializeToString()]
    path = tmp_path / "x.0.et"
    path.write_bytes(
        b"".join(bytes([len(part) % 128 + 128, len(part) // 128]) + part for part in parts)
    )
    ((found,),) = read_nodes([path])
    assert (found.id, found.name, found.control, found.duration) == (7, "sum", [1 << 40], 3)
    assert found.values == "[]"
    numbers = {"comm_type": 0, "comm_size": 1 << 20, "a": -5, "b": -6, "c": 0.5, "d": -7}
    assert found.attributes == {**numbers, "e": "text", "f": 1, "g": None}


def test_computation_is_that_of_the_step_and_sums_run_beside_it(timeline, exported, capsys):
    steps = timeline.steps
    taken = np.sort(steps.stop.max(axis=1) - steps.start.min(axis=1))[len(steps) // 2]
    for rank, nodes in enumerate(read_nodes(exported)):
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
    found = took(capsys, *exported, platform="cpu-10gbit")
    recorded = 1e-9 * np.median(steps.stop.max(axis=1) - steps.start.min(axis=1))
    assert max(time for time, _ in found) == pytest.approx(recorded, rel=0.05)


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
    ranks = read_nodes(sorted((tmp_path / "out").glob("*.et")))
    named = {rank: own["12"[rank // 2]] for rank, own in enumerate(groups_of(ranks))}
    assert named == {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}


def test_a_published_sum_takes_the_time_of_its_rounds(capsys):
    found = took(capsys, *SAMPLES.glob("*.et"))
    assert len(found) == 8
    sent = 14 * (1 << 17) / BANDWIDTH  # 7/8 of the array, twice
    for time, computation in found:
        assert sent + 6 * LATENCY <= time < sent + 14 * (LATENCY + CALL)
        assert computation == 0


@each(
    ("kind", "share"),
    [
        (Collective.ALL_GATHER, 3),
        (Collective.REDUCE_SCATTER, 3 / 4),
        (Collective.BROADCAST, 3),
        (Collective.GATHER, 3),
        (Collective.SCATTER, 3 / 4),
    ],
)
def test_collectives_send_their_bytes(tmp_path, capsys, kind, share):
    size = 4 << 20
    found = took(capsys, *write(tmp_path, *[[collective(kind, size)]] * 4))
    assert max(found)[0] == pytest.approx(LATENCY + share * size / BANDWIDTH, rel=0.05)


def test_what_does_not_depend_on_a_message_is_computed_beside_it(tmp_path, capsys):
    size, ends = 1 << 20, {"comm_src": 0, "comm_dst": 1, "comm_size": 1 << 20, "comm_tag": 70_000}
    sender = [
        computed(1, 1000),
        Node(2, "send", NodeType.COMM_SEND, [1], attributes=ends),
        computed(3, 20_000, 1),
    ]
    receiver = [
        Node(1, "receive", NodeType.COMM_RECV, attributes=ends),
        computed(2, 4000),
        computed(3, 3000, host=True),
        computed(4, 5000, 1),
    ]
    (first, work), (second, other) = took(capsys, *write(tmp_path, sender, receiver))
    assert first == pytest.approx(21e-3, rel=0.01)  # the message is under way
    assert work == pytest.approx(21e-3)
    arrived = 1e-3 + LATENCY + size / BANDWIDTH
    assert second == pytest.approx(arrived + 5e-3, rel=0.02)
    assert other == pytest.approx(4e-3 + 5e-3)  # host and device at the same time


def test_groups_are_those_that_nodes_define_or_those_of_their_collectives(tmp_path, capsys):
    values = """['[{"pg_name": "5", "ranks": [0, 1]}, {"pg_name": "6", "ranks": []}]']"""
    defined = Node(9, "## process_group:init ##", NodeType.METADATA, values=values)
    ranks = [
        [defined, collective(Collective.ALL_REDUCE, 8, pg_name="5")],
        [defined, collective(Collective.ALL_REDUCE, 8, pg_name="5")],
        [collective(Collective.ALL_REDUCE, 8, pg_name="7")],
        [collective(Collective.ALL_REDUCE, 8, pg_name="7"), computed(2, 9000, 1)],
    ]
    groups = groups_of(ranks)
    assert groups[0] == {"5": (0, 1), "6": (0, 1, 2, 3), "": (0, 1, 2, 3)}
    assert groups[3]["7"] == (2, 3)
    times = took(capsys, *write(tmp_path, *ranks))
    assert times[3][0] > 9e-3 > times[0][0]


SEND = {"comm_dst": 1, "comm_size": 8}


@each(
    ("nodes", "words"),
    [
        ([computed(1, 1), computed(1, 1)], "expected nodes with different ids, got 1 for 2"),
        ([computed(1, 1, 5)], "node 1 depends on node 5, which does not exist"),
        ([computed(1, 1, 2), computed(2, 1, 1), computed(3, 1, 2)], "node 1 depends on itself"),
        ([computed(1, 1 << 60)], "expected a duration of at most 1e+06 s"),
        ([collective(Collective.ALL_REDUCE, 1 << 50)], "expected comm_size from 0 to 1,073,741"),
        ([Node(1, "", NodeType.COMM_COLL)], "expected comm_type from 0 to 9, got None"),
        ([Node(1, "", NodeType.COMM_SEND, attributes=SEND)], "expected comm_dst from 0 to 0"),
        ([Node(1, "", NodeType.COMM_RECV, attributes={"comm_src": 0})], "sends to itself"),
        ([], "a file without nodes"),
    ],
)
def test_inconsistent_nodes_are_refused(tmp_path, capsys, nodes, words):
    assert words in refused(capsys, *write(tmp_path, nodes))


def test_files_need_the_ranks_in_their_names_and_nodes_that_match(tmp_path, capsys):
    for name in ("a.0.et", "a.2.et", "none.et"):
        (tmp_path / name).write_bytes(encode([computed(1, 1)]))
    assert "got 2 of ranks 0, 2" in refused(capsys, tmp_path / "a.0.et", tmp_path / "a.2.et")
    assert "whose number is the last" in refused(capsys, tmp_path / "none.et")
    assert "does not exist" in refused(capsys, tmp_path / "gone.0.et")
    ends = {"comm_src": 0, "comm_dst": 1, "comm_size": 8}
    lonely = [Node(1, "receive", NodeType.COMM_RECV, attributes=ends)]
    assert "do not match" in refused(capsys, *write(tmp_path, [computed(1, 5)], lonely))
    assert main(["import", "x.0.et"]) == 1
    assert "the following arguments are required" in capsys.readouterr().err


def test_a_file_that_is_cut_off_anywhere_is_read_up_to_a_node_or_refused(tmp_path):
    nodes = [computed(1, 300), collective(Collective.ALL_REDUCE, 1 << 20, 2), computed(3, 4, 1)]
    data, path = encode(nodes), tmp_path / "x.0.et"
    ends = {*itertools.accumulate(len(part) + 1 for part in parts_of(data))}
    for length in range(len(data)):
        path.write_bytes(data[:length])
        if length in ends and length > min(ends):
            assert len(read_nodes([path])[0]) < len(nodes)
        else:
            with pytest.raises(ValueError, match=r"x\.0\.et: ") as error:
                read_nodes([path])
            assert "\n" not in str(error.value)
