"""Training in pipeline stages equals training of the whole network with accumulation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from pydtnn import ArrayDataset, Model, Trainer, create_backend
from pydtnn.comm import Communicator, Serial, run_threads
from pydtnn.comm.wrapper import Delayed
from pydtnn.layers import (
    BatchNorm,
    Branches,
    Concat,
    Conv2d,
    Dropout,
    Flatten,
    Linear,
    MaxPool2d,
    Net,
    ReLU,
    Sequential,
)
from pydtnn.model.pipeline import backward, forward
from pydtnn.models import resnet
from pydtnn.models.gpt import gpt
from pydtnn.optimizers import SGD, Optimizer
from pydtnn.parallel import AllReduce, Mesh
from pydtnn.parallel.compression import create_sums
from pydtnn.parallel.reproducible import ExactSums
from pydtnn.parallel.schemes.local_sgd import LocalSGD
from pydtnn.parallel.schemes.sharded import ShardedOptimizer
from pydtnn.parallel.schemes.sharded_parameters import ShardedGradients, ShardedParameters
from pydtnn.training.checkpoint import load_checkpoint, save_checkpoint
from pydtnn.training.nonfinite import NotFiniteError
from pydtnn.training.pipeline import StagePasses
from pydtnn.utils.errors import RankError
from tests.each import each

SHAPE = (9, 7, 3)
MICRO_BATCHES = 4
TOKENS = 11


def conv(filters: int, **options: Any) -> list[Net]:
    return [Conv2d(filters, 3, padding=1, bias=False, **options), BatchNorm(), ReLU()]


def concat_net() -> Net:
    two = Branches(Conv2d(3, 3, padding=1), Sequential(*conv(2), Dropout(0.3)), merge=Concat())
    deeper = Branches(Conv2d(2, 1), Sequential(*conv(3), *conv(2)), merge=Concat())
    return Sequential(*conv(4, stride=2), two, ReLU(), deeper, Flatten(), Linear(5))


def vgg_net() -> Net:
    return Sequential(
        *(*conv(4), *conv(4), MaxPool2d(2), *conv(6), *conv(6), MaxPool2d(2), Flatten()),
        *(Linear(8), ReLU(), Dropout(0.5), Linear(5)),
    )


def resnet20() -> Net:
    return resnet.cifar_resnet(20, 5, SHAPE)


def transformer() -> Net:
    return gpt(TOKENS, (6,), depth=3, heads=2, width=8, dropout=0.1, tied=False)


def shape_of(net: Any) -> tuple[int, ...]:
    return (6,) if net is transformer else SHAPE


Axes = dict[str, int]
Rule = Callable[[float], Optimizer]
Result = tuple[dict[str, np.ndarray], list[float], list[dict[str, float]]]


def dataset(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> ArrayDataset:
    """Images with labels, or sequences of tokens with the next ones."""
    rng = np.random.default_rng(seed)
    if len(shape) == 1:
        tokens = rng.integers(0, TOKENS, (32, shape[0] + 1))
        return ArrayDataset(tokens[:, :-1].astype(np.float64), tokens[:, 1:].astype(np.int64))
    return ArrayDataset(rng.normal(size=(32, *shape)), rng.integers(0, 5, 32))


def momentum(lr: float) -> SGD:
    return SGD(lr, momentum=0.9, weight_decay=1e-3)


def clipped(lr: float) -> SGD:
    return SGD(lr, momentum=0.9, clip_norm=0.2)


def grouped(lr: float) -> SGD:
    return SGD(lr, groups={"linear*": {"lr_factor": 0.1}})


def train(
    model: Model, exchange: AllReduce | None, optimizer: Optimizer | None = None, **options: Any
) -> Result:
    optimizer = optimizer or momentum(0.05)
    trainer = Trainer(model, optimizer, exchange=exchange, progress=False, **options)
    data = (dataset(seed, model.input_shapes[0]) for seed in (0, 1))
    history = trainer.fit(*data, epochs=1, global_batch_size=13, seed=2)
    return model.state(), trainer.losses, history


def in_stages(
    stages: int,
    net: Callable[[], Net] = concat_net,
    schedule: Any = "1f1b",
    *,
    axes: Axes | None = None,
    scheme: Any = None,
    rule: Rule = SGD,
    recompute: Any = None,
    freeze: Sequence[str] = (),
    dtype: str = "float64",
    **options: Any,
) -> list[Result]:
    """Train in stages, with messages that come late; return the results of all ranks."""
    axes = axes or {}

    def rank(comm: Communicator) -> Result:
        mesh = Mesh(Delayed(comm, 1), pipeline=stages, **axes)
        own: Any = {"pipeline_schedule": schedule, "recompute": recompute}
        model = Model(net(), shape_of(net), dtype=dtype, mesh=mesh, **own)
        model.freeze(*freeze) if freeze else None
        exchange = scheme and scheme(mesh.data)
        return train(model, exchange, rule(0.05), **{"micro_batches": MICRO_BATCHES} | options)

    return run_threads(stages * int(np.prod([*axes.values()])), rank)


@cache
def whole(
    net: Callable[[], Net] = concat_net,
    data: int = 1,
    *,
    accumulation: int = MICRO_BATCHES,
    rule: Rule = SGD,
    freeze: Sequence[str] = (),
) -> Result:
    """Train the whole network on as many data ranks."""

    def rank(comm: Communicator) -> Result:
        model = Model(net(), shape_of(net), dtype="float64")
        model.freeze(*freeze) if freeze else None
        return train(model, AllReduce(comm), rule(0.05), accumulation=accumulation)

    return run_threads(data, rank)[0]


def assert_equal(results: list[Result], expected: Result) -> None:
    names = {name for state, _, _ in results for name in state}
    assert names == {*expected[0]}
    for state, losses, history in results:
        for name, value in state.items():
            np.testing.assert_allclose(
                value, expected[0][name], rtol=1e-12, atol=1e-13, err_msg=name
            )
        assert losses == pytest.approx(expected[1], rel=1e-12)
        assert history[0] == pytest.approx(expected[2][0], rel=1e-11)


def one_by_one(stage: int, stages: int, micro_batches: int) -> Any:
    for m in range(micro_batches):
        yield from (forward(m), backward(m))


def opposite(stage: int, stages: int, micro_batches: int) -> Any:
    """Neighbouring stages have opposite orders of the micro-batches."""
    order = range(micro_batches)[:: -1 if stage % 2 else 1]
    return [*map(forward, order), *map(backward, order)]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("net", "stages", "data", "schedule"),
    [
        (resnet20, 4, 1, "1f1b"),
        (vgg_net, 2, 2, "gpipe"),
        (concat_net, 3, 2, "zb_v"),
        (concat_net, 3, 1, opposite),
        (vgg_net, 3, 1, one_by_one),
        (resnet20, 2, 2, "zb_h1"),
        (resnet20, 3, 1, "zb_2p"),
        (vgg_net, 3, 1, "interleaved"),
        (concat_net, 2, 1, "eager_1f1b"),
        (concat_net, 2, 2, "interleaved:3"),
        (resnet20, 2, 1, "zb_v"),
    ],
)
def test_three_steps_equal_those_with_accumulation(net, stages, data, schedule):
    """Also if messages are late, and of schedules of one's own, which are functions."""
    results = in_stages(stages, net, schedule, axes={"data": data}, scheme=AllReduce, rule=momentum)
    assert_equal(results, whole(net, data, rule=momentum))


@each(
    ("schedule", "micro_batches", "kept"),
    [
        ("1f1b", 5, [3, 2, 1]),
        ("eager_1f1b", 5, [5, 3, 1]),
        ("gpipe", 5, [5, 5, 5]),
        ("zb_h1", 5, [3, 3, 3]),
        ("zb_2p", 5, [5, 5, 5]),
        ("interleaved", 5, [4, 3, 2]),
        ("zb_v", 5, [3, 3, 3]),
        ("chimera", 8, [1.5, 2, 2, 1.5]),
    ],
    few=3,
)
def test_a_stage_keeps_the_values_of_as_many_micro_batches_as_the_schedule(
    schedule, micro_batches, kept, monkeypatch
):
    found: dict[int, float] = {}
    run = StagePasses.run

    def watched(passes: StagePasses) -> None:
        run(passes)
        rank = passes.pipeline.rank
        found[rank] = max(passes.most_kept, found.get(rank, 0))

    monkeypatch.setattr(StagePasses, "run", watched)
    in_stages(len(kept), vgg_net, schedule, micro_batches=micro_batches)
    assert [found[stage] for stage in range(len(kept))] == kept


def test_all_ranks_learn_of_a_loss_that_is_not_finite():
    def rank(comm: Communicator) -> None:
        mesh = Mesh(comm, pipeline=3)
        model = Model(vgg_net(), SHAPE, mesh=mesh)
        if mesh.position["pipeline"] == 1:
            next(iter(model.parameters.values())).master[...] = np.nan
        before = {name: value.copy() for name, value in model.state().items()}
        with pytest.raises(NotFiniteError, match="the loss is not finite at epoch 1, step 1"):
            train(model, AllReduce(mesh.data), micro_batches=3)
        for name, value in model.state().items():
            np.testing.assert_array_equal(value, before[name])

    run_threads(3, rank)


EXACT = partial(AllReduce, sums=partial(ExactSums, shards=8))


def backward_first(stage: int, stages: int, micro_batches: int) -> Any:
    return [*map(backward, range(micro_batches)), *map(forward, range(micro_batches))]


@each(
    ("options", "message"),
    [
        ({"accumulation": 2}, "accumulation must be 1, got 2; use micro_batches"),
        ({"micro_batches": 0}, "micro_batches must be at least 1, got 0"),
        ({"micro_batches": 30}, "must be at most the 13 samples of a rank per step, got 30"),
        ({"sync_batch_norm": True}, "sync_batch_norm must be False"),
        ({"own": "1f2b"}, "unknown pipeline schedule '1f2b'"),
        ({"own": "1f1b:2"}, "1f1b:2: expected one with a parameter for a value"),
        ({"own": "interleaved:0"}, "chunks must be at least 1, got 0"),
        ({"own": backward_first}, "0 has backward 0 before forward 0; swap them"),
        ({"scheme": EXACT, "own": "zb_h1"}, "must compute backward in one piece; us"),
        ({"scheme": EXACT, "own": "chimera"}, "gradients that are neither exact nor compressed"),
        (
            {"scheme": partial(AllReduce, sums=create_sums("float16")), "own": "chimera"},
            "gradients that are neither exact nor compressed",
        ),
        ({"scheme": LocalSGD, "own": "chimera"}, "gradients that are neither exact nor compressed"),
    ],
)
def test_options_that_do_not_fit_are_refused_on_all_ranks(options, message):
    scheme, own = options.pop("scheme", AllReduce), options.pop("own", "1f1b")

    def rank(comm: Communicator) -> None:
        mesh = Mesh(comm, data=comm.size // 2, pipeline=2)
        model = Model(vgg_net(), SHAPE, mesh=mesh, pipeline_schedule=own)
        train(model, scheme(mesh.data), **options)

    def refused(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=message):
            rank(comm)

    run_threads(4 if own == "chimera" else 2, refused)
    with pytest.raises(ValueError, match="micro_batches=2 requires a model that is cut into"):
        train(Model(vgg_net(), SHAPE), AllReduce(Serial()), micro_batches=2)


def even_before_odd(rank: int, ranks: int, micro_batches: int) -> Any:
    """Two ranks with the same stages complete these in opposite orders."""
    for kind in (forward, backward):
        for odd, stage in enumerate((rank, ranks - 1 - rank)):
            yield from (kind(m, stage) for m in range(odd, micro_batches, 2))


@each(
    ("net", "schedule", "ranks", "data"),
    [
        (concat_net, "chimera", 2, 2),
        (resnet20, "chimera", 4, 1),
        (vgg_net, even_before_odd, 4, 2),
        (concat_net, "dualpipe", 2, 1),
    ],
    few=2,
)
def test_steps_in_two_directions_equal_those_with_accumulation(net, schedule, ranks, data):
    results = in_stages(ranks, net, schedule, axes={"data": data}, rule=momentum)
    assert_equal(results, whole(net, data, rule=momentum))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("net", "grid", "rule"),
    [
        (concat_net, "2x2-3", momentum),
        (vgg_net, "3x2-1", clipped),
        (vgg_net, "2x4-5", grouped),
        (concat_net, "3x2-1-2", momentum),
    ],
)
def test_steps_without_lost_ranks_equal_those_with_all(net, grid, rule):
    """The last step of an epoch has fewer micro-batches than ranks."""
    pipelines, stages = map(int, grid.partition("-")[0].split("x"))
    ranks, number = pipelines * stages - grid.count("-"), 4 * pipelines
    results = in_stages(ranks, net, f"recycle:{grid}", rule=rule, micro_batches=number)
    assert_equal(results, whole(net, accumulation=number, rule=rule))


@each("scheme", [ShardedOptimizer, ShardedGradients, ShardedParameters])
def test_stages_of_two_ranks_are_sharded_over_the_axis_data(scheme):
    results = in_stages(2, concat_net, "chimera", axes={"data": 2}, scheme=scheme)
    assert_equal(results, whole(concat_net, 2))


@each("micro_batches", [1, 3])
def test_a_direction_may_have_fewer_micro_batches_or_none(micro_batches):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one micro-batch
        results = in_stages(2, concat_net, "chimera", micro_batches=micro_batches)
    assert_equal(results, whole(accumulation=micro_batches))


def test_fewer_micro_batches_than_stages_are_warned_of_once():
    with pytest.warns(UserWarning, match="2 micro-batches keep 4 stages waiting 60 % of the time"):
        in_stages(4, vgg_net, micro_batches=2)


FROZEN = ("conv2d0", "batchnorm1")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1f1b", {"rule": grouped}),
        ("1f1b", {"freeze": ("*conv2d*", "*batchnorm*")}),
        ("1f1b", {"axes": {"filter": 2}, "rule": clipped}),
        ("zb_h1", {"recompute": 2, "rule": clipped, "freeze": FROZEN}),
        ("interleaved", {"axes": {"alternate": 2}, "freeze": FROZEN}),
        ("zb_v", {"recompute": 3, "axes": {"filter": 2}}),
        ("zb_v", {"axes": {"spatial": 2}, "rule": grouped}),
        ("chimera", {"rule": clipped, "recompute": 2}),
        ("chimera", {"axes": {"alternate": 2}, "rule": clipped, "freeze": FROZEN}),
        ("dualpipe", {"axes": {"spatial": 2}, "recompute": 2}),
    ],
    ids=str,
)
def test_stages_combine_with(schedule, options):
    expected = whole(**{name: options[name] for name in {"rule", "freeze"} & {*options}})
    assert_equal(in_stages(2, concat_net, schedule, **options)[:1], expected)


@each(
    ("dtype", "schedule", "scheme"),
    [("float32", "1f1b", ShardedParameters), ("float64", "interleaved", AllReduce)],
)
def test_exact_training_in_stages_gives_the_same_bytes_on_any_data_ranks(dtype, schedule, scheme):
    def rank(comm: Communicator, scheme: Any) -> dict[str, np.ndarray]:
        mesh = Mesh(comm, data=comm.size // 2, pipeline=2)
        backend = create_backend("cpu", threads=1, tuning="fixed")
        own: Any = {"backend": backend, "pipeline_schedule": schedule}
        model = Model(concat_net(), SHAPE, dtype=dtype, mesh=mesh, **own)
        return train(model, scheme(mesh.data, sums=partial(ExactSums, shards=8)))[0]

    expected = run_threads(2, rank, AllReduce)[0]
    for name, value in run_threads(6, rank, scheme)[0].items():
        np.testing.assert_array_equal(value, expected[name])


class Forgetful(Linear):
    """Its second half does not store the gradients."""

    def backward_parameters(self, left: Any) -> None:
        pass


def test_gradients_that_the_second_half_has_forgotten_are_found_in_the_first_step():
    def net() -> Net:
        return Sequential(Flatten(), Linear(6), ReLU(), Forgetful(5, name="last"))

    with pytest.raises(RankError, match=r"last: backward of Forgetful must store a gradient"):
        in_stages(2, net, "zb_h1")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("stages", "schedule", "axes"),
    [
        (2, "1f1b", {"context": 2}),
        (4, "zb_h1", {}),
        (3, "zb_2p", {}),
        (2, "interleaved", {"tensor": 2}),
        (3, "zb_v", {}),
        (2, "zb_v", {"context": 2}),
        (2, "chimera", {"data": 2}),
        (2, "chimera", {"tensor": 2}),
        (4, "dualpipe", {}),
        (2, "dualpipe", {"context": 2}),
    ],
    ids=str,
)
def test_three_steps_of_a_transformer_equal_serial_ones(stages, schedule, axes):
    micro_batches = MICRO_BATCHES // axes.get("data", 1)
    options: Any = {"axes": axes, "rule": momentum, "micro_batches": micro_batches}
    assert_equal(
        in_stages(stages, transformer, schedule, **options), whole(transformer, rule=momentum)
    )


def test_checkpoints_of_stages_in_two_directions_continue_with_others_and_serially(tmp_path):
    def fit(mesh: Mesh | None, epochs: int, **options: Any) -> Result:
        own: Any = {"pipeline_schedule": "chimera" if epochs == 1 else "1f1b"}
        model = Model(concat_net(), SHAPE, dtype="float64", mesh=mesh, **own)
        exchange = AllReduce(Serial()) if mesh is None else ShardedOptimizer(mesh.data)
        trainer = Trainer(model, momentum(0.05), exchange=exchange, progress=False, **options)
        if epochs > 1:
            load_checkpoint(tmp_path, trainer)
        trainer.fit(dataset(), epochs=epochs, global_batch_size=16, seed=2)
        if epochs == 1:
            save_checkpoint(tmp_path, trainer)
        return model.state(), trainer.losses, trainer.history

    run_threads(4, lambda comm: fit(Mesh(comm, data=2, pipeline=2), 1, micro_batches=2))
    expected = fit(None, 2, accumulation=4)
    results = run_threads(3, lambda comm: fit(Mesh(comm, pipeline=3), 2, micro_batches=4))
    assert_equal(results, expected)
