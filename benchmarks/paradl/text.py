"""Readers of ParaDL's files: `.net`, `.lc` and `.plat` of the published tool, and YAML."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.paradl.layers import LayerList, LayerSize, Shape
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.utils import plain_yaml
from pydtnn.utils.files import read_file
from pydtnn.utils.names import unknown
from pydtnn.utils.units import parse_quantity

YAML = (".yaml", ".yml")

ENTRIES = ("name", "samples", "layers")
LAYER_ENTRIES = ("name", "x", "w", "y", "forward", "backward", "update", "split")
PLATFORM_ENTRIES = (
    "MEM_PER_NODE",
    "NODE_SPEED",
    "BANDWIDTH",
    "LATENCY",
    "MAX_NODE",
    "GPU_PER_NODE",
)


def read_network(path: str | Path) -> LayerList:
    """Read a network: YAML, or the published tool's text (`.net`).

    Parameters
    ----------
    path : str or Path
        YAML has the entries ``name``, ``samples`` and ``layers``, a list of mappings with ``name``,
        ``x``, ``w``, ``y`` (sizes such as ``3x224x224``), ``forward``, ``backward`` and ``update``
        (times with a unit, such as ``0.6 ms``) and ``split`` (true or false). Text has a line
        ``Dataset|name``, ``Input|samplesxCxWxH``, ``Model|name``, and a line
        ``NAME|x|w|y|seconds`` per layer; the time is that of forward and
        backward of a sample, of which a third is counted as forward.

    Raises
    ------
    ValueError
        If the content is not valid; the message names the file and the line or entry.
    OSError
        If the file cannot be read.
    """
    path = Path(path)
    content = _text(path)
    return _from_yaml(path, content) if path.suffix in YAML else _from_text(path, content)


def read_split(path: str | Path, network: LayerList) -> LayerList:
    """Read the layers that model parallelism divides: a line ``NAME|0`` or ``NAME|1`` each.

    Raises
    ------
    ValueError
        If a line is not of this form, or there is not one for each layer.
    OSError
        If the file cannot be read.
    """
    path = Path(path)
    chosen = []
    for number, line in _lines(_text(path)):
        _, *value = (part.strip() for part in line.split("|"))
        if value not in (["0"], ["1"]):
            raise _wrong(path, number, f"NAME|0 or NAME|1, got {line!r}; correct it")
        chosen.append(value == ["1"])
    return network.with_split(chosen)


def read_platform(source: str | Path) -> Platform:
    """Read a platform: a name, a YAML file, or the published tool's text (`.plat`).

    A text has lines ``KEY|value|unit``. As in the published tool, links and classes of ranks are
    those of the platform "abci"; memory, ranks per host and the number of hosts are those of the
    file.

    Raises
    ------
    ValueError, OSError
        If the file is not valid or cannot be read.
    """
    path = Path(source)
    if path.suffix != ".plat":
        return Platform.load(source)
    values: dict[str, float] = {}
    for number, line in _lines(_text(path)):
        key, *rest = (part.strip() for part in line.split("|"))
        if key not in PLATFORM_ENTRIES:
            raise ValueError(f"{path.name}: {unknown('entry', key, PLATFORM_ENTRIES)}")
        try:
            values[key] = float(rest[0])
        except (IndexError, ValueError):
            raise _wrong(path, number, f"{key}|number|unit, got {line!r}; correct it") from None
        if not 0 < values[key] < 1e30:
            raise _wrong(path, number, f"a value above 0 for {key}, got {rest[0]}; correct it")
    abci = Platform.load("abci")
    per_host = int(values.get("GPU_PER_NODE", abci.cluster.ranks_per_host))
    ranks = int(values.get("MAX_NODE", abci.cluster.hosts * per_host))
    cluster = replace(
        abci.cluster,
        hosts=max(1, -(-ranks // per_host)),
        ranks_per_host=per_host,
        memory_per_rank=values.get("MEM_PER_NODE", abci.cluster.memory_per_rank),
    )
    return replace(abci, name=path.stem, cluster=cluster)


def parse_shape(who: str, text: object) -> Shape:
    """Return the sizes of a text such as "3x224x224".

    >>> parse_shape("x", "3x224x224")
    (3, 224, 224)
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return (text,)
    if isinstance(text, str) and re.fullmatch(r"\d{1,12}(x\d{1,12})*", text.strip()):
        return tuple(int(n) for n in text.strip().split("x"))
    raise ValueError(f"{who}: expected sizes such as 3x224x224, got {text!r}; correct them")


def _from_text(path: Path, content: str) -> LayerList:
    name, samples = path.stem, 0
    layers: list[LayerSize] = []
    for number, line in _lines(content):
        key, *parts = (part.strip() for part in line.split("|"))
        if key == "Dataset":
            continue
        if key == "Model" and parts:
            name = parts[0]
        elif key == "Input" and parts:
            samples = parse_shape(f"{path.name}: line {number}", parts[0])[0]
        elif len(parts) in (3, 4):
            who = f"{path.name}: line {number}: {key}"
            x, w, y = (parse_shape(who, part) for part in parts[:3])
            seconds = _seconds(path, number, parts[3]) if len(parts) == 4 else 0.0
            layers.append(LayerSize(key, x, w, y, seconds / 3, 2 * seconds / 3))
        else:
            raise _wrong(path, number, f"NAME|x|w|y|seconds, got {line!r}; correct it")
    if not samples:
        raise ValueError(
            f"{path.name}: expected a line Input|samplesxCxWxH, got none; add it before the layers"
        )
    return LayerList(name, samples, tuple(layers))


def _from_yaml(path: Path, content: str) -> LayerList:
    try:
        given = plain_yaml.load(content)
    except ValueError as error:
        raise ValueError(f"{path.name}: expected a YAML file: {error}; correct it") from error
    who = path.name
    given = _entries(who, given, ENTRIES)
    samples, rows = given.get("samples"), given.get("layers")
    if isinstance(samples, bool) or not isinstance(samples, int):
        raise ValueError(f"{who}: samples must be a whole number, got {samples!r}; correct it")
    if not isinstance(rows, list):
        raise ValueError(f"{who}: layers must be a list, got {rows!r}; write one entry a layer")
    layers = []
    for index, row in enumerate(rows):
        here = f"{who}: layers[{index}]"
        row = _entries(here, row, LAYER_ENTRIES)
        missing = [entry for entry in ("name", "x", "w", "y") if entry not in row]
        if missing:
            raise ValueError(f"{here}: expected an entry {missing[0]!r}, got none; add it")
        x, w, y = (parse_shape(f"{here}: {part}", row[part]) for part in "xwy")
        times = {
            part: parse_quantity(f"{here}: {part}", row[part], "s", positive=False)
            for part in ("forward", "backward", "update")
            if part in row
        }
        split = row.get("split", True)
        if not isinstance(split, bool):
            raise ValueError(f"{here}: split must be true or false, got {split!r}; correct it")
        layers.append(LayerSize(str(row["name"]), x, w, y, **times, split=split))
    return LayerList(str(given.get("name", path.stem)), samples, tuple(layers))


def _entries(who: str, given: Any, known: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise ValueError(f"{who}: expected entries 'name: value', got {given!r}; add them")
    for key in given:
        if key not in known:
            raise ValueError(f"{who}: {unknown('entry', str(key), known)}")
    return given


def _seconds(path: Path, number: int, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e30:
        raise _wrong(path, number, f"a time in seconds, got {text!r}; correct it")
    return seconds


def _lines(content: str) -> list[tuple[int, str]]:
    """Return the lines with their numbers, without empty ones and comments."""
    numbered = ((i, line.strip()) for i, line in enumerate(content.splitlines(), 1))
    return [(i, line) for i, line in numbered if line and not line.startswith("#")]


def _text(path: Path) -> str:
    try:
        return read_file("paradl", path).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name}: expected text, got bytes that are not; check it") from error


def _wrong(path: Path, number: int, expected: str) -> ValueError:
    return ValueError(f"{path.name}: line {number}: expected {expected}")
