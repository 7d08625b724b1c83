"""From options of the command line to schemes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pydtnn.cli.config import TrainConfig
from pydtnn.cli.workload import describe_run
from pydtnn.comm import Serial
from pydtnn.parallel.compression import COMPRESSORS, CompressedSums
from pydtnn.parallel.compression.compressor import LossySums
from pydtnn.parallel.reproducible import ExactSums
from pydtnn.parallel.schemes import SCHEMES
from pydtnn.training.trainer import Trainer
from tests.each import each
from tests.small_training import small_model


def exchange(**options: Any) -> Any:
    data = {"input_shape": (8, 8, 1), "classes": 4, "samples": 64, "batch": 64}
    return describe_run(TrainConfig(**options), {}, data).create_exchange(Serial())


def test_every_scheme_and_compressor_is_made_by_its_name_with_its_options():
    for name, scheme in SCHEMES.items():
        assert type(exchange(scheme=name)) is scheme
    for name in COMPRESSORS:
        assert isinstance(exchange(compress=name).sums, LossySums)
    assert exchange(scheme="local-sgd", scheme_options={"period": 3}).period == 3
    assert not exchange(scheme="allreduce", overlap=False).overlap
    made = exchange(exact=True, global_batch_size=64, shards=16)
    assert isinstance(made.sums, ExactSums)
    assert made.sums.shards == 16


def test_a_scheme_of_a_file_has_options_too(tmp_path):
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


def test_a_compressor_may_come_from_a_file(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "from pydtnn.parallel.compression import Compressor\n"
        "half = Compressor(lambda x, c: (x,), lambda parts, out, c: out.__iadd__(parts[0]))\n"
        "other = 3\n"
    )
    assert isinstance(exchange(compress=f"{file}:half").sums, CompressedSums)
    with pytest.raises(TypeError, match="other: expected a Compressor, or a class or function"):
        exchange(compress=f"{file}:other")
    with pytest.raises(ValueError, match="unknown option of .*half 'share'; there is none"):
        exchange(compress=f"{file}:half", compress_options={"share": 0.1})


EXACT = {"exact": True, "global_batch_size": 8}


@each(
    ("options", "message"),
    [
        ({"scheme": "local_sgd", "scheme_options": {"perod": 3}}, "'perod'; did you mean 'period'"),
        ({"scheme": "local_sgd", "scheme_options": {"period": 0}}, "period must be at least 1"),
        ({"scheme_options": {"overlap": False}}, "not one of its options; use --scheme overlap"),
        ({"scheme": "gossip", "overlap": False}, "overlap: gossip has no parameter `overlap`"),
        ({"compress": "top_k", "compress_options": {"share": 2}}, "share must be"),
        ({"compress_options": {"share": 0.1}}, "--compress options requires --compress"),
        ({"exact": True}, "--exact requires --global-batch-size; set the number of samples"),
        (EXACT | {"compress": "sign"}, "--exact cannot be combined with --compress; omit it"),
        (EXACT | {"tuning": "measure"}, "--exact cannot be combined with --tuning measure; use"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        exchange(**options)


@each(
    ("options", "message"),
    [
        ({"compress": "sign", "scheme": "local_sgd"}, "LocalSGD: ranks do not sum gradients, so"),
        (EXACT | {"scheme": "stale"}, "StaleGradients: results depend on the number of ranks, so"),
    ],
)
def test_a_trainer_refuses_sums_that_a_scheme_does_not_have(options, message):
    with pytest.raises(ValueError, match=message):
        Trainer(small_model(), "sgd", exchange=exchange(**options))
