"""From options of the command line to schemes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pydtnn.cli.config import TrainConfig
from pydtnn.cli.workload import describe_run
from pydtnn.comm import Serial
from pydtnn.parallel.compression import COMPRESSORS, CompressedSums
from pydtnn.parallel.compression.compressor import LossySums
from pydtnn.parallel.reproducible import ExactSums
from pydtnn.parallel.schemes import SCHEMES
from tests.each import each

OPTIONS: dict[str, dict[str, Any]] = {"float": {"exponent": 5, "mantissa": 2}}
"""What compressors cannot do without."""


def exchange(**options: Any) -> Any:
    data = {"input_shape": (8, 8, 1), "classes": 4, "samples": 64, "batch": 64}
    return describe_run(TrainConfig(**options), {}, data).create_exchange(Serial())


@each("name", SCHEMES)
def test_every_scheme_is_made_by_its_name(name: str) -> None:
    assert type(exchange(scheme=name)) is SCHEMES[name]


@each("name", COMPRESSORS)
def test_every_compressor_is_made_by_its_name(name: str) -> None:
    sums = exchange(compress=name, compress_options=OPTIONS.get(name, {})).sums
    assert isinstance(sums, LossySums)


def test_options_reach_the_scheme() -> None:
    assert exchange(scheme="local-sgd", scheme_options={"period": 3}).period == 3
    assert not exchange(scheme="allreduce", overlap=False).overlap


def test_exact_sums_have_the_shards_that_were_asked_for() -> None:
    made = exchange(exact=True, global_batch_size=64, shards=16)
    assert isinstance(made.sums, ExactSums)
    assert made.sums.shards == 16


def test_a_scheme_of_a_file_has_options_too(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from pydtnn.parallel.exchange import AllReduce\n"
        "from pydtnn.parallel.option import option\n"
        "class Own(AllReduce):\n"
        "    strength: float = option(0.5, at_least=0)\n"
        "from pydtnn.comm import Serial\n"
        "ready = Own(Serial())\n"
    )
    made = exchange(scheme=f"{file}:Own", scheme_options={"strength": 2.0}, overlap=False)
    assert made.strength == 2.0
    assert not made.overlap
    with pytest.raises(TypeError, match="ready: expected a subclass of GradientExchange, got an"):
        exchange(scheme=f"{file}:ready")


def test_a_compressor_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from pydtnn.parallel.compression import Compressor\n"
        "half = Compressor(lambda x, c: (x,), lambda parts, out, c: out.__iadd__(parts[0]))\n"
        "other = 3\n"
    )
    assert isinstance(exchange(compress=f"{file}:half").sums, CompressedSums)
    sentence = "other: expected a Compressor, or a class or function that returns one, got 3"
    with pytest.raises(TypeError, match=sentence):
        exchange(compress=f"{file}:other")
    with pytest.raises(ValueError, match="unknown option of .*half 'share'; there is none"):
        exchange(compress=f"{file}:half", compress_options={"share": 0.1})


@each(
    ("options", "message"),
    [
        ({"scheme": "gosip"}, "unknown scheme 'gosip'; did you mean 'gossip'?"),
        (
            {"scheme": "local_sgd", "scheme_options": {"perod": 3}},
            "unknown option of local_sgd 'perod'; did you mean 'period'?",
        ),
        ({"scheme": "local_sgd", "scheme_options": {"period": 0}}, "period must be at least 1"),
        (
            {"scheme_options": {"overlap": False}},
            "--scheme-options: overlap cannot be set here; use --no-overlap",
        ),
        ({"scheme": "gossip", "overlap": False}, "--no-overlap: gossip has no parameter `overlap`"),
        ({"compress": "top_j"}, "unknown compressor 'top_j'; did you mean 'top_k'"),
        ({"compress": "top_k", "compress_options": {"share": 2}}, "share must be"),
        ({"compress_options": {"share": 0.1}}, "--compress-options requires --compress"),
        (
            {"compress": "sign", "scheme": "local_sgd"},
            "LocalSGD: ranks do not sum gradients, so these cannot be compressed",
        ),
        (
            {"exact": True, "global_batch_size": 8, "scheme": "stale"},
            "StaleGradients: results depend on the number of ranks, so exact sums are not",
        ),
        ({"exact": True}, "--exact requires --global-batch-size; set the number of samples"),
        (
            {"exact": True, "global_batch_size": 8, "compress": "sign"},
            "--exact cannot be combined with --compress; omit it",
        ),
        (
            {"exact": True, "global_batch_size": 8, "tuning": "measure"},
            "--exact cannot be combined with --tuning measure; use fixed or direct",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        exchange(**options)
