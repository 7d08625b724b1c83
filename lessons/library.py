"""Each lesson beside the library: the same network, parameters and samples, trained by its feature.

    python lessons/library.py [--ranks 4] [NUMBER ...]

The `train` of a lesson runs on threads, and so does a program of the library that uses what the
lesson teaches: a scheme, sums, a plan or a schedule. A line has the largest difference of the
parameters in the end: both add in an order of their own, so that it is that of rounding.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import nets
import pipelines
from check import lesson, lesson_of
from nets import CHANNELS, CLASSES, HEADS, HIDDEN, RATE, STEPS, WIDTH, WORDS, join, square
from pydtnn import ArrayDataset, Mesh, Model, Trainer, create_backend, layers, optimizers
from pydtnn.callbacks import Callback
from pydtnn.comm import Communicator, Serial, run_threads
from pydtnn.comm.schedules.rule import create_allreduce
from pydtnn.comm.thread import Killed
from pydtnn.data.order import permutation
from pydtnn.layers import Flatten, Linear, ReLU, Residual, Sequential, Tanh
from pydtnn.parallel import AllReduce
from pydtnn.parallel.compression import create_sums
from pydtnn.parallel.reproducible import ExactSums
from pydtnn.parallel.schemes.diloco import DiLoCo
from pydtnn.parallel.schemes.local_sgd import LocalSGD
from pydtnn.parallel.schemes.sharded import ShardedOptimizer
from pydtnn.parallel.schemes.sharded_parameters import ShardedGradients, ShardedParameters
from pydtnn.utils.errors import RankFailure
from pydtnn.utils.interval import Interval
from ranks import Threads

Array = np.ndarray
Params = list[Array]

SGD = partial(optimizers.SGD, RATE)
ADAM = partial(optimizers.Adam, 0.01, beta1=0.9, beta2=0.99, epsilon=1e-8)


def names_of(model: Model) -> list[str]:
    """Return the names of all parameters, in the order of the layers."""
    names = [name for name in model.state() if "running" not in name]  # the last layer first
    order = [*dict.fromkeys(name.rpartition(".")[0] for name in names)][::-1]
    return sorted(names, key=lambda name: order.index(name.rpartition(".")[0]))


def moved(name: str, array: Array, source: int, target: int) -> Array:
    """Move the axis of outputs, which is the first in the library and the last in the lessons."""
    is_matrix = name.endswith(".w") and not name.startswith("table")
    return np.moveaxis(array, source, target) if is_matrix else array


def dataset(batch: Callable[[int], tuple[Array, Array]] = nets.batch, steps: int = STEPS) -> Any:
    """Return the samples of all steps, so that the order of the trainer is that of the lesson."""
    x, y = (np.concatenate(arrays) for arrays in zip(*map(batch, range(steps)), strict=True))
    places = np.argsort(permutation(0, 0, len(x)))
    return ArrayDataset(x[places].astype(float), y[places], classes=int(y.max()) + 1)


def create(
    comm: Communicator,
    net: list[layers.Net],
    params: Params,
    shape: tuple[int, ...] = (nets.SIDE, nets.SIDE),
    *,
    exchange: Callable[..., Any] = AllReduce,
    optimizer: Callable[[], Any] = SGD,
    axes: dict[str, int] | None = None,
    frozen: tuple[str, ...] = (),
    model: dict[str, Any] | None = None,
    **options: Any,
) -> Trainer:
    """Return the trainer of a network that begins with `params`, in the order of its layers."""
    mesh = Mesh(comm, **axes) if axes else None
    backend = create_backend(threads=1, tuning="fixed")
    own: dict[str, Any] = {"dtype": "float64", "backend": backend, **(model or {})}
    built = Model(Sequential(*net), shape, mesh=mesh, **own)
    given = zip(names_of(built), params, strict=True)
    built.load({name: moved(name, p, -1, 0) for name, p in given}, strict=False)
    if frozen:
        built.freeze(*frozen)
    scheme = exchange(mesh.data if mesh else comm)
    return Trainer(built, optimizer(), exchange=scheme, mesh=mesh, progress=False, **options)


def fit(trainer: Trainer, data: Any, steps: int = STEPS) -> Params:
    """Train an epoch; return the parameters in the order of the layers and axes of the lesson."""
    trainer.fit(data, global_batch_size=len(data) // steps, loader_threads=0)
    state = trainer.model.state()
    return [moved(name, state[name], 0, -1) for name in names_of(trainer.model)]


def mlp(*sizes: int) -> list[layers.Net]:
    """Return linear layers with ReLU between them."""
    return [Flatten(), *[layer for size in sizes for layer in (Linear(size), ReLU())][:-1]]


def samples(
    comm: Communicator,
    *,
    sizes: list[int] = nets.SIZES,
    steps: int = STEPS,
    axis: str | None = None,
    **options: Any,
) -> Array:
    """Train linear layers, such as those of lesson 01, divided by samples or along an axis."""
    axes = {axis: comm.size} if axis else None
    trainer = create(comm, mlp(*sizes[1:]), nets.parameters(sizes), axes=axes, **options)
    return join(fit(trainer, dataset(steps=steps), steps))


def sums(comm: Communicator, algorithm: str) -> Array:
    """Sum what lessons 04 and 05 sum."""
    scheduled = create_allreduce(algorithm, comm)

    def allreduce(array: Array) -> Array:
        scheduled.allreduce(array)
        return array

    return nets.descend(comm, allreduce)


def batch_norm(comm: Communicator) -> Array:
    """Train the network of lesson 07."""
    w1, _, w2, b2 = nets.parameters([64, HIDDEN, CLASSES])
    net = [Flatten(), Linear(HIDDEN, bias=False), layers.BatchNorm(), ReLU(), Linear(CLASSES)]
    params = [w1, np.ones(HIDDEN), np.zeros(HIDDEN), w2, b2]
    return join(fit(create(comm, net, params, sync_batch_norm=True), dataset()))


def convolutions(comm: Communicator, axis: str) -> Array:
    """Train the network of lessons 14 and 15, divided along an axis."""
    data = dataset(lambda step: (nets.batch(step)[0][..., None], nets.batch(step)[1]))
    conv = partial(layers.Conv2d, CHANNELS, 3, padding=1, bias=False)
    net = [conv(), ReLU(), conv(), ReLU(), layers.GlobalAvgPool2d(), Linear(CLASSES)]
    trainer = create(comm, net, nets.filters(), (8, 8, 1), axes={axis: comm.size})
    return join(fit(trainer, data))


def tokens(comm: Communicator, block: list[Any], params: Params, **options: Any) -> Params:
    """Train an embedding, a residual block, and scores by the embedding."""
    table = nets.embedding()
    words = layers.Embedding(WORDS, WIDTH, tied=True, name="table")
    places = layers.PositionalEmbedding(name="table_of_places")
    net = [words, places, Residual(Sequential(*block)), words]
    params = [table[:WORDS], table[WORDS:], *params]
    trainer = create(comm, net, params, (nets.TOKENS,), **options)
    return fit(trainer, dataset(nets.sequences))


def attention(comm: Communicator, axis: str, *, output: bool) -> Array:
    """Train the network of lessons 17 and 19, with a matrix after the heads or without."""
    block = [Linear(3 * WIDTH, bias=False), layers.DotProductAttention(HEADS, causal=True)]
    params = [np.concatenate([square(seed) for seed in (2, 3, 4)], axis=1)]  # (D, 3 D)
    if output:
        block, params = [*block, Linear(WIDTH, bias=False)], [*params, square(5)]
    words, places, inner, *rest = tokens(comm, block, params, axes={axis: comm.size})
    return join([words, places, *np.split(inner, 3, axis=1), *rest])


def sequence_parallel(comm: Communicator) -> Array:
    """Train the network of lesson 18, whose norm has no shift."""
    hidden = lesson("18").HIDDEN
    block = [layers.LayerNorm(name="norm"), Linear(hidden, bias=False), ReLU()]
    params = [np.ones(WIDTH), np.zeros(WIDTH), square(2, WIDTH, hidden), square(3, hidden, WIDTH)]
    options: dict[str, Any] = {"axes": {"tensor": comm.size}, "frozen": ("*norm.beta",)}
    done = tokens(comm, [*block, Linear(WIDTH, bias=False)], params, **options)
    return join([*done[:3], *done[4:]])


def pipeline(comm: Communicator, schedule: str) -> Array:
    """Train the network of lessons 20 to 22 by a schedule."""
    params = [pipelines.layer(i) for i in range(pipelines.LAYERS)]
    net = [layer for w in params for layer in (Linear(w.shape[1], bias=False), Tanh())]
    options: dict[str, Any] = {"model": {"pipeline_schedule": schedule}}
    options |= {"axes": {"pipeline": comm.size}, "micro_batches": pipelines.MICRO_BATCHES}
    return join(fit(create(comm, [Flatten(), *net], params, **options), dataset()))


def experts(comm: Communicator) -> Array:
    """Train the network of lesson 23.

    An expert of the library is ``down gelu(up x + b) + c``. It is a matrix, as in the lesson, if
    `down` is the identity and b = -c is so large that GELU is the identity, too.
    """
    count, width = lesson("23").EXPERTS, lesson("23").FEATURES
    mixture = layers.MixtureOfExperts(count, width, choices=1, balance=0, z=0)
    net = [layers.Reshape((1, width)), mixture, Flatten(), Linear(CLASSES, bias=False)]
    matrices = np.stack([square(10 + i, width, width).T for i in range(count)])  # (E, H, D)
    down, far = np.tile(np.eye(width), (count, 1, 1)), np.full((count, width), 40.0)
    router, out = square(1, width, count), square(2, width, CLASSES)
    frozen, axes = ("*down", "*up_bias", "*down_bias"), {"expert": comm.size}
    params = [router, matrices, down, far, -far, out]
    router, matrices, *_, out = fit(create(comm, net, params, axes=axes, frozen=frozen), dataset())
    return join([router, out, matrices.swapaxes(1, 2)])


def mesh(comm: Communicator) -> Array:
    """Train the network of lesson 24 on its mesh."""
    axes = dict(zip(("data", "pipeline", "tensor"), lesson("24").MESHES[comm.size], strict=True))
    width, hidden, pairs = lesson("24").WIDTH, lesson("24").HIDDEN, lesson("24").PAIRS
    net = [
        Residual(Sequential(Linear(hidden, bias=False), Tanh(), Linear(width, bias=False)))
        for _ in range(pairs)
    ]
    shapes = (width, hidden), (hidden, width)
    params = [square(i, *shapes[i % 2]) for i in range(2 * pairs)] + [square(99, width, CLASSES)]
    optimizer = partial(optimizers.SGD, RATE / 4)
    net = [Flatten(), *net, Linear(CLASSES, bias=False)]
    done = fit(create(comm, net, params, axes=axes, optimizer=optimizer), dataset())
    return join([*done[:-1:2], *done[1:-1:2], done[-1]])


class Failure(Callback):
    """Ends the last of several ranks before step 3, and keeps the state of the others."""

    def __init__(self) -> None:
        from pydtnn.tools.survival.recovery import RecoveryState

        self.memory = RecoveryState(Interval(steps=3), 3600.0)

    def on_fit_ready(self, trainer: Trainer, epochs: int, steps: int) -> None:
        self.memory.begin(trainer)

    def on_step_end(self, trainer: Trainer) -> None:
        comm, fails = trainer.comm, lesson("26").FAILS_IN_STEP
        if comm.rank == comm.launched - 1 > 0 and trainer.optimizer.iterations == fails:
            raise Killed


def failure(comm: Communicator) -> Array:
    """Train the network of lesson 01 while the last rank fails."""
    from pydtnn.tools.survival.recovery import restore

    callback, remaining, saved = Failure(), comm, None
    while True:
        net, params = mlp(*nets.SIZES[1:]), nets.parameters()
        trainer = create(remaining, net, params, callbacks=[callback])
        if saved is not None:
            restore(trainer, saved)
        try:
            return join(fit(trainer, dataset()))
        except RankFailure:
            remaining = comm.shrink()
            saved = callback.memory.agree(remaining)


PROGRAMS: dict[str, Callable[[Communicator], Any]] = {
    "01": lambda comm: samples(Serial()),
    "02": partial(samples, exchange=partial(AllReduce, overlap=False)),
    "03": partial(samples, model={"bucket_bytes": 1}),  # a bucket for each layer
    "04": partial(sums, algorithm="ring"),
    "05": partial(sums, algorithm="recursive_doubling"),
    "06": partial(samples, exchange=partial(AllReduce, sums=partial(ExactSums, shards=5))),
    "07": batch_norm,
    "08": partial(samples, exchange=partial(LocalSGD, period=3)),
    "09": partial(samples, exchange=partial(DiLoCo, period=3, rate=0.7, momentum=0.9)),
    "10": partial(samples, exchange=partial(AllReduce, sums=create_sums("top_k", share=0.1))),
    "11": partial(samples, exchange=ShardedOptimizer, optimizer=ADAM),
    "12": partial(samples, exchange=ShardedGradients, model={"bucket_bytes": 1}),
    "13": partial(samples, exchange=ShardedParameters, model={"bucket_bytes": 1}),
    "14": partial(convolutions, axis="spatial"),
    "15": partial(convolutions, axis="filter"),
    "16": partial(samples, sizes=[64, 24, 48, 4], axis="tensor"),
    "17": partial(attention, axis="tensor", output=True),
    "18": sequence_parallel,
    "19": partial(attention, axis="context", output=False),
    "20": partial(pipeline, schedule="gpipe"),
    "21": partial(pipeline, schedule="1f1b"),
    "22": partial(pipeline, schedule="zb_h1"),
    "23": experts,
    "24": mesh,
    "25": partial(samples, exchange=partial(AllReduce, sums=partial(ExactSums, shards=12))),
    "26": failure,
    "27": partial(samples, sizes=[64, 256, 256, 4], steps=8),
}
"""What a rank of the library does for each lesson; what it returns is compared."""


def difference(number: str, ranks: int) -> float:
    """Return the largest difference between a lesson and the library, over all ranks."""
    results = Threads(ranks).run(lesson(number).train)
    pairs = zip(results, run_threads(ranks, PROGRAMS[number]), strict=True)
    return max(float(np.abs(one - other).max()) for one, other in pairs if other is not None)


def main() -> None:
    """Compare lessons with the library."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="threads")
    parser.add_argument("numbers", nargs="*", metavar="NUMBER", help="of lessons; by default all")
    options = parser.parse_args()
    for number in options.numbers or PROGRAMS:
        print(f"{lesson_of(number).stem:32}{difference(number, options.ranks):.1e}")


if __name__ == "__main__":
    main()
