import pytest

from benchmarks.paradl import read_network, read_platform, read_split
from tests.benchmarks.paradl.networks import ALEXNET
from tests.each import each

YAML = """\
name: small
samples: 1000
layers:
  - {name: CONV1, x: 3x8x8, w: 3x6x3x3, y: 6x8x8, forward: 1 ms, backward: 2 ms, update: 10 us}
  - {name: FC, x: 384, w: 384x10, y: 10, forward: 20 us, split: false}
"""


def test_yaml_and_text_describe_networks(tmp_path, nets):
    alexnet = nets["alexnet"]
    assert (alexnet.name, alexnet.samples, len(alexnet.layers)) == ("AlexNet", 1_280_000, 20)
    assert sum(x.items_w for x in alexnet.layers) == 62_367_776
    (tmp_path / "net.yaml").write_text(YAML)
    net = read_network(tmp_path / "net.yaml")
    conv, fc = net.layers
    assert (net.name, net.samples, conv.w, conv.kernel) == ("small", 1000, (3, 6, 3, 3), (3, 3))
    assert (conv.forward, conv.backward, conv.update, conv.split) == (1e-3, 2e-3, 1e-5, True)
    assert (fc.items_w, fc.forward, fc.split) == (3840, 2e-5, False)


def test_a_split_file_chooses_layers(tmp_path, nets):
    names = [line.split("|")[0] for line in ALEXNET.splitlines()[3:]]
    lines = [f"{i} {name} |{int(name.startswith('CONV'))}" for i, name in enumerate(names)]
    (tmp_path / "filter.lc").write_text("\n".join(lines))
    net = read_split(tmp_path / "filter.lc", nets["alexnet"])
    assert [x.name for x in net.split] == ["CONV1", "CONV2", "CONV3", "CONV4", "CONV5"]
    (tmp_path / "filter.lc").write_text("CONV1|1")
    with pytest.raises(ValueError, match="each of the 20 layers of AlexNet, got 1; add one line"):
        read_split(tmp_path / "filter.lc", nets["alexnet"])
    (tmp_path / "filter.lc").write_text("CONV1|yes")
    with pytest.raises(ValueError, match=r"filter.lc: line 1: expected NAME\|0 or NAME\|1"):
        read_split(tmp_path / "filter.lc", nets["alexnet"])


def test_a_plat_file_changes_memory_and_hosts(tmp_path):
    path = tmp_path / "small.plat"
    path.write_text("MEM_PER_NODE|8e9|Bytes\nGPU_PER_NODE|2|GPUs\nMAX_NODE|64|GPUs\n")
    found = read_platform(path)
    assert (found.name, found.cluster.memory_per_rank) == ("small", 8e9)
    assert (found.cluster.ranks_per_host, found.cluster.hosts) == (2, 32)
    assert found.messages == read_platform("abci").messages
    for line, message in (
        ("MEM|8e9|B", "small.plat: unknown entry 'MEM'"),
        ("LATENCY|fast|s", "small.plat: line 1: expected LATENCY|number|unit"),
        ("LATENCY|-1|s", "small.plat: line 1: expected a value above 0 for LATENCY, got -1"),
    ):
        path.write_text(line)
        with pytest.raises(ValueError, match=message.replace("|", r"\|")):
            read_platform(path)


@each(
    ("content", "message"),
    [
        (ALEXNET.replace("3x226x226|3x96", "3y226|3x96"), "line 4: CONV1: expected sizes such as"),
        (ALEXNET.replace("0.000610938", "-1"), "line 4: expected a time in seconds, got '-1'"),
        (ALEXNET.replace("|1000x1x1|0", ""), r"line 23: expected NAME\|x\|w\|y\|seconds"),
        (ALEXNET.replace("Input", "#"), r"expected a line Input\|samplesxCxWxH, got none"),
        ("Input|10x3\nModel|m\n", "m must have layers, got none"),
    ],
)
def test_damaged_text_is_one_sentence(tmp_path, content, message):
    (tmp_path / "wrong.net").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_network(tmp_path / "wrong.net")
