"""Tests of steps that are repeated as a list of calls: the same bytes as those of the loops."""

import copy
import weakref
from functools import partial

import numpy as np
import pytest

from pydtnn import SGD, AdamW, Model, Trainer
from pydtnn import layers as nn
from pydtnn.callbacks import Callback, ExponentialMovingAverage, FunctionCallback
from pydtnn.data import ArrayDataset, Batch
from pydtnn.kernels import create_backend
from pydtnn.kernels.recorded import KernelRecorder
from pydtnn.model import replay
from pydtnn.models import cifar_densenet, create_net
from pydtnn.parallel import Mesh
from pydtnn.utils.observer import Kind, Observer
from tests.each import each

IMAGES = (16, 16, 3)


class Doubled(nn.Layer):
    """A layer of a user, whose arithmetic is NumPy's."""

    def forward(self, *xs, context):
        return xs[0] * np.float32(2), None

    def backward(self, dy, saved):
        return dy * np.float32(2)


class Other(nn.Linear):
    """A subclass, which may compute anything."""

    def forward(self, *xs, context):
        return super().forward(xs[0] + 1, context=context)


class Seen(Observer):
    """Keeps the names of activities, and the passes of layers."""

    def __init__(self):
        self.names = []
        self.passes = []

    def begin(self, kind, name, *, nbytes=0, bucket=-1):
        self.names.append(name)
        if kind in (Kind.FORWARD, Kind.BACKWARD):
            self.passes.append((kind, name))


def dataset(shape=IMAGES, samples=28):
    rng = np.random.default_rng(3)
    if len(shape) == 1:
        text = rng.integers(16, size=(samples, shape[0] + 1))
        return ArrayDataset(text[:, :-1].astype("float32"), text[:, 1:])
    return ArrayDataset(
        rng.normal(size=(samples, *shape)).astype("float32"), rng.integers(10, size=samples)
    )


def train(net, shape=IMAGES, *, repeats=True, optimizer=None, callbacks=(), model=(), **options):
    """Train; return the trainer and the bytes of all arrays of the model."""
    backend = create_backend("cpu", threads=1, tuning="fixed")
    model = Model(net(), shape, backend=backend, **dict(model))
    optimizer = copy.deepcopy(optimizer) or SGD(0.05, momentum=0.9)
    trainer = Trainer(
        model, optimizer, progress=False, callbacks=copy.deepcopy([*callbacks]), **options
    )
    if not repeats:
        trainer.steps.replays.why_not = "the loops are compared with"
    trainer.fit(dataset(shape), epochs=2, batch_size=8)
    return trainer, {name: array.tobytes() for name, array in model.state().items()}


def assert_same(net, shape=IMAGES, *, repeated=3, **options):
    trainer, values = train(net, shape, **options)
    replays = trainer.steps.replays
    assert replays.repeated >= repeated, replays.why_not
    assert values == train(net, shape, repeats=False, **options)[1]


def vision_transformer():
    return nn.Sequential(
        nn.Conv2d(8, 4, stride=4),
        nn.Reshape((16, 8)),
        nn.ClassToken(),
        nn.PositionalEmbedding(),
        nn.Residual(
            nn.Sequential(nn.LayerNorm(), nn.MultiHeadAttention(2, dropout=0.1), nn.Dropout(0.1))
        ),
        nn.Residual(nn.Sequential(nn.LayerNorm(), nn.Linear(16), nn.GELU(), nn.Linear(8))),
        nn.Flatten(),
        nn.Linear(10),
    )


def concatenated(*norm):
    """With norms, convolutions have the output of `Concat` joined again."""

    def unit(filters, kernel):
        return nn.Sequential(nn.Conv2d(filters, kernel, padding=kernel // 2), *(n() for n in norm))

    branches = nn.Branches(unit(4, 1), unit(8, 3), merge=nn.Concat())
    return nn.Sequential(branches, nn.Conv2d(3, 3), nn.Flatten(), nn.Linear(10))


def dropping():
    """Masks are new in every step."""
    body = (nn.Conv2d(8, 3, padding=1), nn.ReLU(), nn.Dropout(0.3))
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(16), nn.ReLU(), nn.Linear(10))


def small():
    return create_net("resnet8", 10, IMAGES)


@each(
    "net",
    [
        *(small, dropping, vision_transformer, concatenated),
        *(partial(create_net, "mlp", 10, IMAGES), partial(concatenated, nn.BatchNorm, nn.ReLU)),
        partial(cifar_densenet, 10, 10, IMAGES, growth=4),  # norms do not keep concatenations
    ],
)
def test_networks_have_the_same_bytes(net):
    assert_same(net)


@each(
    ("options", "repeated"),
    [
        ({"accumulation": 2}, 3),
        ({"optimizer": AdamW(0.01, clip_norm=0.5)}, 3),
        ({"model": {"recompute": 3}}, 3),
        ({"model": {"dtype": "bfloat16"}}, 3),
        ({"model": {"fuse": False}}, 0),
        ({"callbacks": (ExponentialMovingAverage(0.9),)}, 3),
    ],
)
def test_options_of_training_have_the_same_bytes(options, repeated):
    assert_same(small, repeated=repeated, **options)


@each(
    ("options", "repeated"),
    [
        ({"window": 5, "positions": nn.LinearBiases(), "causal": True}, 3),
        ({"positions": nn.RelativePositions(8, 5)}, 0),  # a bias is computed by NumPy
    ],
)
def test_attention_with_biases_has_the_same_bytes(options, repeated):
    body = partial(nn.MultiHeadAttention, 2, **options)
    net = lambda: nn.Sequential(nn.Reshape((48, 16)), body(), nn.Flatten(), nn.Linear(10))  # noqa: E731
    assert_same(net, repeated=repeated)


def test_layers_of_users_run_by_the_loops():
    for layer in (Doubled, partial(Other, 10)):
        net = lambda layer=layer: nn.Sequential(nn.Flatten(), layer(), nn.Linear(10))  # noqa: E731
        assert_same(net, repeated=0)
    trainer, _ = train(lambda: nn.Sequential(nn.Flatten(), Doubled(), nn.Linear(10)))
    assert 'Doubled does not declare that it supports "replay"' in trainer.steps.replays.why_not
    assert trainer.steps.replays.repeated == 0


def test_observers_see_the_layers_of_repeated_steps_and_attributes_may_change():
    class Thinner(Callback):
        def on_step_end(self, trainer):
            trainer.model.layers[2].rate = 0.1 * (trainer.step % 3)

    assert_same(dropping, repeated=0, callbacks=[Thinner()])
    seen, expected = Seen(), Seen()
    trainer, _ = train(small, observers=[seen])
    train(small, observers=[expected], repeats=False)
    assert trainer.steps.replays.repeated == 1 + 2  # of 3 full batches: the loops run in epoch 1
    assert seen.passes == expected.passes


@each("own", [True, False])
def test_a_pass_that_was_replaced_runs_by_the_loops(own, monkeypatch):
    original = nn.Linear.forward

    def thrice(self, *xs, context):
        y, saved = original(self, *xs, context=context)
        return 3 * y, saved

    def net():
        layer = nn.Linear(10)
        if own:
            layer.forward = partial(thrice, layer)
        return nn.Sequential(nn.Flatten(), layer)

    if not own:
        monkeypatch.setattr(nn.Linear, "forward", thrice)
    trainer, _ = train(net)
    assert trainer.steps.replays.repeated == 0
    assert trainer.steps.replays.why_not.endswith(": a pass of Linear was replaced")


class Scaled(nn.ReLU):
    """A layer of a user that calls kernels only, in a method of its own."""

    supports = ("replay",)

    def forward(self, *xs, context):
        return self.begin(*xs, context=context)

    def begin(self, *xs, context):
        return super().forward(*xs, context=context)


@each("name", ["forward", "begin"])
def test_a_method_of_a_class_that_is_replaced_within_an_epoch_is_noticed(name, monkeypatch):
    def instead(self, *xs, context):
        y = self.empty(len(xs[0]), self.output_shape)
        self.backend.elementwise.forward("sigmoid", xs[0], out=y, alpha=0.0)
        return y, y

    def losses(at):
        def replace(trainer):
            if trainer.step == at:
                assert trainer.steps.replays.repeated == max(at - 2, 0)
                monkeypatch.setattr(Scaled, name, instead)

        x = np.random.default_rng(0).random((60, 8), np.float32)
        model = Model(nn.Sequential(nn.Linear(6), Scaled(), nn.Linear(5)), (8,), seed=1, fuse=False)
        callbacks = [FunctionCallback(on_step_end=replace)]
        trainer = Trainer(model, SGD(0.0), callbacks=callbacks, progress=False)
        trainer.fit(ArrayDataset(x, np.arange(60) % 5), batch_size=6)
        monkeypatch.undo()
        return trainer.losses

    early, late, never = losses(1), losses(6), losses(-1)
    assert late == never[:6] + early[6:]
    assert early[6] != never[6]


@each("kinds", [("bn",), ("conv", "bn"), ("conv",)])
def test_layers_that_are_frozen_later_have_the_same_bytes(kinds, monkeypatch):
    def both_fits():
        trainer, _ = train(small)
        model = trainer.model
        model.set_frozen([n for n in model.parameters if any(kind in n for kind in kinds)])
        for _ in range(2):  # values change in their places
            trainer.fit(dataset(samples=60), epochs=trainer.epoch + 1, batch_size=8)
            model.load({name: 1.5 * value for name, value in model.state().items()})
        return trainer.steps.replays.repeated, [a.tobytes() for a in model.state().values()]

    repeated, values = both_fits()
    assert bool(repeated) is (kinds == ("conv",))
    monkeypatch.setattr("pydtnn.model.replay._why_not", lambda model: "the loops run")
    assert both_fits() == (0, values)


@pytest.mark.tools
def test_kernels_that_are_observed_from_some_step_on_are_reported():
    from pydtnn.tools.tracing.kernels import observed_kernels

    trainer, _ = train(small)
    batch = Batch(np.zeros((8, *IMAGES), "float32"), np.zeros(8, "int64"), np.arange(8), 0, 8)
    for _ in range(3):
        trainer.train_step(batch, 2, 0)
    recorder = Seen()
    with observed_kernels(trainer.model.backend, recorder):
        for _ in range(4):
            recorder.names.clear()
            trainer.train_step(batch, 2, 0)
            assert recorder.names.count("conv.forward") == 9
    trainer.train_step(batch, 2, 0)
    recorder.names.clear()
    trainer.train_step(batch, 2, 0)
    assert not recorder.names


def test_an_error_between_the_passes_leaves_the_memory_free():
    trainer, _ = train(small)
    replays, memory = trainer.steps.replays, trainer.model.backend.memory
    x, y = np.zeros((8, *IMAGES), "float32"), np.zeros(8, "int64")
    batch = Batch(x, y, np.arange(8), 0, 8)
    for _ in range(3):
        trainer.train_step(batch, 2, 0)
    before, repeated = memory.in_use, replays.repeated
    compute, trainer.objective.compute = trainer.objective.compute, None
    with pytest.raises(TypeError):
        trainer.train_step(batch, 2, 0)
    trainer.objective.compute = compute
    assert replays.repeated == repeated + 1
    assert memory.in_use <= before
    for _ in range(3):
        trainer.train_step(batch, 2, 0)
    repeated = replays.repeated
    other = memory.zeros((1 << 18,), np.dtype("float32"))  # takes memory of the recorded step
    trainer.train_step(batch, 2, 0)
    assert not other.any()
    del other
    trainer.train_step(batch, 2, 0)
    assert replays.repeated == repeated + 1


def test_memory_that_had_an_array_before_a_step_and_has_another_after_it_is_not_repeated():
    backend = create_backend("cpu", threads=1, tuning="fixed")
    memory, shape = backend.memory, (1 << 16,)
    lasting, before = memory.zeros(shape, np.dtype("float32")), memory.zeros(shape, np.dtype("f4"))
    address = before.ctypes.data
    recorder = KernelRecorder(backend, lambda call: None)
    del before  # as a message of the step before, which has arrived
    with recorder.recording():
        own = memory.zeros(shape, np.dtype("float32"))
        assert own.ctypes.data == address
        backend.elementwise.add(lasting, lasting, out=own)
    del own
    assert (address, address + 4 * shape[0]) in recorder.spans()
    assert not recorder.why_not
    other = memory.zeros(shape, np.dtype("float32"))
    assert other.ctypes.data == address
    recorder.spans()
    assert recorder.why_not == "an array of the step is still in use after it"


def test_inputs_are_read_where_they_are_and_not_kept():
    trainers = [train(small, repeats=repeats)[0] for repeats in (True, False)]
    x = np.random.default_rng(4).normal(size=(64, *IMAGES))
    parts = [x[i : i + 8].astype("float32") for i in range(0, 40, 8)]
    parts += [x[40:48], x[47:39:-1].astype("float32")[::-1]]  # of another type, and turned
    kept = [weakref.ref(part) for part in parts]
    repeated = trainers[0].steps.replays.repeated
    while parts:
        batch = Batch(parts.pop(), np.arange(8), np.arange(8) + len(parts), 0, 8)
        for trainer in trainers:
            trainer.train_step(batch, 2, 0)
    del batch
    assert trainers[0].steps.replays.repeated == repeated + 6
    first, second = ([a.tobytes() for a in t.model.state().values()] for t in trainers)
    assert first == second
    assert [i for i, ref in enumerate(kept) if ref() is not None] == []


def test_an_earlier_array_is_kept_as_long_as_its_recording():
    backend = create_backend("cpu", threads=1, tuning="fixed")
    memory, shape = backend.memory, (1 << 16,)
    earlier, out = memory.zeros(shape, np.dtype("float32")), memory.zeros(shape, np.dtype("f4"))
    address, calls = earlier.ctypes.data, []
    recorder = KernelRecorder(backend, calls.append)
    with recorder.recording():
        backend.elementwise.add(earlier, earlier, out=out)
    del earlier, out
    assert not recorder.spans()
    assert not recorder.why_not
    assert memory.zeros(shape, np.dtype("float32")).ctypes.data != address
    calls.clear()


@pytest.mark.threads(2)
def test_a_network_on_several_ranks_is_not_repeated(comm):
    net = nn.Sequential(nn.Linear(4))
    model = Model(net, (3,), backend="cpu", mesh=Mesh(comm, filter=2))
    assert replay._why_not(model) == "the network is distributed over ranks"
