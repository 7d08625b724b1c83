"""Optimizers: rules by hand, decay, clipping, schedules, buckets, state, bad input."""

import math

import numpy as np
import pytest

from pydtnn.kernels import create_backend
from pydtnn.layers import Linear, ReLU
from pydtnn.layers.initializers import LeCun
from pydtnn.layers.parameters import Parameter, ParameterBuffer
from pydtnn.model import Model
from pydtnn.optimizers import (
    LAMB,
    LARS,
    OPTIMIZERS,
    SGD,
    SOAP,
    Adagrad,
    Adam,
    Adam8bit,
    AdamW,
    Lion,
    Muon,
    Nadam,
    Optimizer,
    RMSProp,
    ScheduleFreeAdamW,
    get_optimizer,
)
from pydtnn.optimizers.muon import orthogonalise
from pydtnn.parallel.schemes import SCHEMES
from pydtnn.schedules import Cosine, Step
from pydtnn.training.callback import evaluated
from pydtnn.training.checkpoint.pieces import optimizer_pieces
from pydtnn.training.trainer import Trainer
from tests.each import each
from tests.gpu import to_host
from tests.parallel.schemes.course import assert_close, fit, train_serially, trainer_of, weights
from tests.small_training import Recorder, small_data, small_fit, small_trainer

# 64 bytes are 8 float64: "a" is followed by 2 elements of padding, "b" by 5, "c" by 7
SHAPES = {"a": (2, 3), "b": (3,), "c": (3, 3)}
LR, DECAY = 0.05, 0.1


def make(backend, *, dtype="float64", bucket_bytes=1, seed=0, first_index=0):
    """A buffer of three parameters, of which "b" does not decay; each has a bucket of its own."""
    draw = LeCun("normal")
    parameters = [Parameter(n, s, draw, decay=n != "b") for n, s in SHAPES.items()]
    buffer = ParameterBuffer(
        [(p, i) for i, p in enumerate(parameters)],
        backend=backend,
        dtype=dtype,
        bucket_bytes=(bucket_bytes,),
        first_index=first_index,
    )
    for p in parameters:
        p.master[...] = backend.asarray(p.initial_value(seed))
    return buffer


def values(buffer):
    return {p.name: to_host(p.value) for p in buffer.parameters}


def draw_gradients(buffer, rng):
    for p in sorted(buffer.parameters, key=lambda p: p.name):  # the layout depends on the buckets
        p.grad[...] = np.asarray(rng.normal(size=p.shape), like=p.grad)
    return {p.name: to_host(p.grad).astype("float64") for p in buffer.parameters}


def padding(buffer, array):
    """The elements between parameters."""
    used = np.zeros(buffer.size, bool)
    for bucket in buffer.buckets:
        for entry in bucket.parameters:
            used[bucket.start :][entry.slice] = True
    assert not used.all()
    return to_host(array)[~used]


# ---- the rules in formulas: generators that are sent gradients and yield parameters ----


def sgd(w, decay, momentum=0.0, nesterov=False):
    v = 0
    while True:
        g = (yield w) + decay * w
        v = momentum * v + g
        w = w - LR * (g + momentum * v if nesterov else v)


def rmsprop(w, decay):
    s = 0
    while True:
        g = (yield w) + decay * w
        s = 0.99 * s + 0.01 * g**2
        w = w - LR * g / (np.sqrt(s) + 1e-8)


def adagrad(w, decay):
    s = 0
    while True:
        g = (yield w) + decay * w
        s = s + g**2
        w = w - LR * g / (np.sqrt(s + 0.5) + 1e-10)


def lion(w, decay):
    m = 0
    while True:
        g = yield w
        w = w - LR * (np.sign(0.9 * m + 0.1 * g) + decay * w)
        m = 0.99 * m + 0.01 * g


def adam(w, decay, decoupled=False):
    m, v, t = 0, 0, 0
    while True:
        g, t = (yield w), t + 1
        if decoupled:
            w = w - LR * decay * w
        else:
            g = g + decay * w
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        w = w - LR * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)


def nadam(w, decay):
    m, v, t = 0, 0, 0
    mu = [0.9 * (1 - 0.5 * 0.96 ** (i * 0.004)) for i in range(20)]
    while True:
        g, t = (yield w) + decay * w, t + 1
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        now, after = math.prod(mu[1 : t + 1]), math.prod(mu[1 : t + 2])
        ahead = mu[t + 1] * m / (1 - after) + (1 - mu[t]) * g / (1 - now)
        w = w - LR * ahead / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)


def schedule_free(w, decay):
    """Algorithm 1 of Defazio et al. 2024, with its three sequences; x is sent for None."""
    x, z, v, total, t = w, w, 0, 0, 0
    while True:
        y = 0.1 * z + 0.9 * x
        if (g := (yield y)) is None:
            yield x
        t += 1
        v = 0.999 * v + 0.001 * g**2
        gamma = LR * np.sqrt(1 - 0.999**t)
        z = z - gamma * g / (np.sqrt(v) + 1e-8) - gamma * decay * y
        total += gamma**2
        x = (1 - gamma**2 / total) * x + gamma**2 / total * z


def nearest(x, signed):
    """Dynamic quantisation: codes, scales and values; k zeros, a one and bits of a fraction."""
    bits = [(k, 2 ** (6 - k + (not signed))) for k in range(7)]
    numbers = [10.0**-k * (0.1 + 0.9 * (i + 0.5) / n) for k, n in bits for i in range(n)]
    numbers = np.sort([0.0, 1.0, *numbers, *(-y for y in numbers if signed)])
    blocks = np.pad(x.ravel(), (0, -x.size % 256)).reshape(-1, 256)
    scale = abs(blocks).max(axis=1, keepdims=True).astype("float32")
    codes = abs((blocks / scale)[..., None] - numbers).argmin(axis=-1)
    kept = (numbers[codes] * scale.astype(float)).ravel()[: x.size].reshape(x.shape)
    return codes.ravel()[: x.size].reshape(x.shape), scale[:, 0], kept


def adam8bit(w, decay):
    m, v, t = 0, 0, 0
    while True:
        g, t = (yield w) + decay * w, t + 1
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        w = w - LR * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        m, v = nearest(m, True)[2], nearest(v, False)[2]


def lars(w, decay, always=False):
    v = 0
    while True:
        g = yield w
        norm_w, norm_g = np.linalg.norm(w), np.linalg.norm(g)
        ratio = 0.001 * norm_w / (norm_g + decay * norm_w) if decay or always else 1
        v = 0.9 * v + LR * ratio * (g + decay * w)
        w = w - v


def lamb(w, decay, always=False):
    m, v, t = 0, 0, 0
    while True:
        g, t = (yield w), t + 1
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        u = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6) + decay * w
        w = w - LR * u * (np.linalg.norm(w) / np.linalg.norm(u) if decay or always else 1)


def muon(w, decay, form="matrix"):
    """Jordan et al. 2024 with the factor of Liu et al. 2025, equation 4; AdamW of vectors."""
    if w.ndim == 1 or form == "table":
        yield from adam(w, decay, decoupled=True)
    m, shape = 0, w.shape if form == "stack" else (len(w), -1)
    while True:
        g = yield w
        m = 0.95 * m + g
        x = (g + 0.95 * m).reshape(shape)
        x = x / np.sqrt((x**2).sum((-2, -1), keepdims=True))
        for _ in range(5):
            gram = x @ x.swapaxes(-2, -1)
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        w = w - LR * (0.2 * np.sqrt(max(x.shape[-2:])) * x.reshape(w.shape) + decay * w)


NESTEROV = {"momentum": 0.9, "nesterov": True}
RULES = {
    "sgd": (SGD, {}, sgd, {}),
    "momentum": (SGD, {"momentum": 0.9}, sgd, {"momentum": 0.9}),
    "nesterov": (SGD, NESTEROV, sgd, NESTEROV),
    "rmsprop": (RMSProp, {}, rmsprop, {}),
    "adagrad": (Adagrad, {"initial": 0.5}, adagrad, {}),
    "lion": (Lion, {}, lion, {}),
    "adam": (Adam, {}, adam, {}),
    "adamw": (AdamW, {}, adam, {"decoupled": True}),
    "nadam": (Nadam, {}, nadam, {}),
    "adam8bit": (Adam8bit, {}, adam8bit, {}),
    "schedule_free": (ScheduleFreeAdamW, {}, schedule_free, {}),
    "lars": (LARS, {}, lars, {}),
    "lars, always": (LARS, {"always_adapt": True}, lars, {"always": True}),
    "lamb": (LAMB, {}, lamb, {}),
    "lamb, always": (LAMB, {"always_adapt": True}, lamb, {"always": True}),
    "muon": (Muon, {}, muon, {}),
}


def bound(backend, optimizer, **options):
    buffer = make(backend, **options)
    optimizer.bind(backend, [buffer])
    return optimizer, buffer


@each("rule", RULES)
@each("decay", [0.0, DECAY])
@each("clip_norm", [None, 0.5])
def test_five_steps_equal_the_formulas(backend, rule, decay, clip_norm):
    kind, options, formula, constants = RULES[rule]
    optimizer = kind(LR, weight_decay=decay, clip_norm=clip_norm, **options)
    optimizer, buffer = bound(backend, optimizer, bucket_bytes=1 << 20)
    expected = {
        name: formula(w, 0.0 if name == "b" else decay, **constants)
        for name, w in values(buffer).items()
    }
    for sequence in expected.values():
        next(sequence)
    rng = np.random.default_rng(0)
    steps = 50 if rule in ("schedule_free", "adam8bit") else 5
    for _ in range(steps):
        g = draw_gradients(buffer, rng)
        optimizer.step()
        if clip_norm is None or (optimizer.scales and backend.scales):
            assert all((to_host(p.grad) == g[p.name]).all() for p in buffer.parameters)
        factor = (clip_norm or 1) / (optimizer.gradient_norm if clip_norm else 1)
        for name, w in values(buffer).items():
            wanted = expected[name].send(factor * g[name])
            # float64, another order of operations
            np.testing.assert_allclose(w, wanted, rtol=1e-12, atol=1e-14)
    with optimizer.evaluated(), optimizer.evaluated():
        for name, w in values(buffer).items() if optimizer.offset else ():
            np.testing.assert_allclose(w, expected[name].send(None), rtol=1e-12, atol=1e-14)
    assert optimizer.iterations == steps
    slots = (np.concatenate(one) for one in zip(*optimizer._slots.values(), strict=True))
    for array in (buffer.values, buffer.grads, *(() if optimizer.has_slot_forms else slots)):
        assert not padding(buffer, array).any()


@each("kind", [LARS, LAMB])
def test_a_layerwise_rule_moves_parameters_that_are_zero(backend, kind):
    buffer = make(backend)
    buffer.values[:] = 0
    optimizer = kind(LR, weight_decay=DECAY)
    optimizer.bind(backend, [buffer])
    draw_gradients(buffer, np.random.default_rng(0))
    optimizer.step()
    assert all((p.value != 0).all() for p in buffer.parameters)


# ---- rules with averages, and with slots of other types ----


def test_eight_bits_are_the_codes_of_blocks_and_a_quarter_of_the_state_of_adam(backend):
    buffer = parameters_of(backend, {"w": (30, 20), "b": (7,), "c": (2, 128)}, {})
    optimizer = Adam8bit()
    optimizer.bind(backend, [buffer])
    gradients = draw_gradients(buffer, np.random.default_rng(0))
    optimizer.step()
    for name, g in gradients.items():
        for slot, moment in (("m", (1 - 0.9) * g), ("v", (1 - 0.999) * g * g)):
            codes, scale, _ = nearest(moment, slot == "m")
            np.testing.assert_array_equal(optimizer.state()[f"{slot}/{name}"], codes)
            np.testing.assert_array_equal(optimizer.state()[f"{slot}_scale/{name}"], scale)
    large = parameters_of(backend, {"w": (512, 256)}, {})
    optimizer.bind(backend, [large])
    assert sum(part.values.nbytes for part in optimizer.stored()) <= 0.27 * 2 * 4 * large.size


def soap(w, decay, sides):
    """Algorithms 3 and 4 of Vyas et al. 2024, with the order of the eigenvalues of their code."""
    m, v, t, bases = np.zeros_like(w), np.zeros_like(w), 0, [np.eye(n) for n in w.shape]
    moments = [np.zeros((n, n)) for n in w.shape[:sides]]
    while True:
        g = yield w
        if t:
            p, q = bases
            m, v = 0.95 * m + 0.05 * g, 0.95 * v + 0.05 * (p.T @ g @ q) ** 2
            n = p @ ((p.T @ m @ q) / (np.sqrt(v) + 1e-8)) @ q.T
            w = w * (1 - LR * decay) - LR * np.sqrt(1 - 0.95**t) / (1 - 0.95**t) * n
        for axis in range(sides):
            s = moments[axis] = 0.95 * moments[axis] + 0.05 * (g.T @ g if axis else g @ g.T)
            u = bases[axis]
            if t == 0:
                bases[axis] = np.linalg.eigh(s)[1][:, ::-1]
            elif t % 10 == 0:
                order = np.argsort(-np.diag(u.T @ s @ u))
                bases[axis], v = np.linalg.qr(s @ u[:, order])[0], v.take(order, axis)
        t += 1


def test_soap_has_the_steps_of_its_authors(backend):
    buffer = parameters_of(backend, {"square": (6, 6), "wide": (4, 2, 3, 2)}, {})
    optimizer, rng = SOAP(LR, weight_decay=DECAY, max_dimension=6), np.random.default_rng(0)
    optimizer.bind(backend, [buffer])
    first = {name: w.reshape(len(w), -1) for name, w in values(buffer).items()}
    expected = {name: soap(w, DECAY, 1 + (name == "square")) for name, w in first.items()}
    for sequence in expected.values():
        next(sequence)
    for _ in range(200):
        gradients = draw_gradients(buffer, rng)
        optimizer.step()
        for name, g in gradients.items():
            w = expected[name].send(g.reshape(first[name].shape)).reshape(g.shape)
            np.testing.assert_allclose(values(buffer)[name], w, rtol=1e-12, atol=1e-12)
    assert optimizer.state()["left_basis/wide"].shape == (4, 4)


ON_RANKS = {
    "muon": lambda: Muon(0.02, clip_norm=0.5),
    "soap": lambda: SOAP(0.02, max_dimension=5, epsilon=1e-4, frequency=2),
    "adam8bit": lambda: Adam8bit(0.02, weight_decay=0.01, clip_norm=0.5),
    "schedule_free": lambda: ScheduleFreeAdamW(0.02, weight_decay=0.01, clip_norm=0.5),
}


@pytest.mark.few(10)
@pytest.mark.threads(1, 2, 3, 4)
@pytest.mark.parametrize("scheme", ["allreduce", *(name for name in SCHEMES if "shard" in name)])
@pytest.mark.parametrize("rule", ON_RANKS)
def test_ranks_compute_what_one_does(comm, scheme, rule):
    trainer = trainer_of(SCHEMES[scheme](comm), ON_RANKS[rule](), bucket_bytes=1)
    assert_close(fit(trainer, 2), train_serially(ON_RANKS[rule](), 2))
    assert all(len(found.values) for found in optimizer_pieces(trainer.optimizer, trainer.model))


def test_the_average_is_evaluated_and_kept():
    seen = []

    def look(trainer):
        trained = weights(trainer)
        with evaluated(trainer):
            seen.append((weights(trainer), trainer.logs["val_loss"]))
        assert_close(weights(trainer), trained)

    trainer = small_trainer(None, Recorder(on_epoch=look), optimizer=ScheduleFreeAdamW(0.05))
    small_fit(trainer)
    assert_close(weights(trainer), seen[1][0])
    for average, loss in seen:
        trainer.model.load(average)
        assert trainer.evaluate(small_data()[1])["loss"] == pytest.approx(loss, rel=1e-12)


# ---- Muon ----


def parameters_of(backend, shapes, forms):
    """A buffer of parameters with shapes, some of them with a form."""
    parameters = [Parameter(n, s, LeCun("normal"), form=forms.get(n)) for n, s in shapes.items()]
    buffer = ParameterBuffer([(p, 0) for p in parameters], backend=backend, dtype="float64")
    for p in parameters:
        p.master[...] = backend.asarray(p.initial_value(0))
    return buffer


def test_two_hundred_steps_of_matrices_filters_experts_and_tables_equal_the_formulas_of_muon():
    backend, rng = create_backend("cpu"), np.random.default_rng(0)
    shapes = {"tall": (7, 3), "filter": (4, 3, 3, 2), "stack": (2, 3, 5), "table": (9, 4)}
    buffer = parameters_of(backend, shapes, {"stack": "stack", "table": "table"})
    rule = Muon(LR, weight_decay=DECAY)
    rule.bind(backend, [buffer])
    formulas = [(p, muon(p.master.copy(), DECAY, p.form)) for p in buffer.parameters]
    for _, formula in formulas:
        next(formula)
    for _ in range(200):
        buffer.grads[:] = rng.normal(size=buffer.size)
        rule.step()
        for p, formula in formulas:
            np.testing.assert_allclose(p.master, formula.send(p.grad), rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="Muon: groups must name matrices .*, got table, a table"):
        Muon(groups={"table": {"rule": "muon"}}).bind(backend, [buffer])


def test_sixteen_bits_orthogonalise_to_their_precision(backend):
    u = backend.asarray(np.random.default_rng(0).normal(size=(9, 5)), "float64")
    orthogonalise(backend, u, 5, np.dtype("bfloat16"))
    assert (abs(np.linalg.svd(to_host(u))[1] - 0.9) < 0.3).all()


def test_small_singular_values_are_raised_in_single_precision_as_in_double(backend):
    rng = np.random.default_rng(0)
    u, _, v = np.linalg.svd(rng.normal(size=(20, 50)), full_matrices=False)
    x = u * np.geomspace(1, 1e-6, 20) @ v
    single, double = backend.asarray(x, "float32"), backend.asarray(x, "float64")
    for array in (single, double):
        orthogonalise(backend, array, 5, array.dtype)
    np.testing.assert_allclose(to_host(single), to_host(double), atol=1e-4)


def test_a_group_of_muon_chooses_the_rule_and_its_rate(backend):
    ours, buffer = bound(backend, Muon(LR, adamw_lr_factor=0.5, groups={"a": {"rule": "adamw"}}))
    adamw, twin = bound(backend, AdamW(0.5 * LR, weight_decay=0.1))
    for rule, one in ((ours, buffer), (adamw, twin)):
        draw_gradients(one, np.random.default_rng(0))
        rule.step()
    for name in ("a", "b"):  # the decay is a factor of the rate
        np.testing.assert_allclose(values(buffer)[name], values(twin)[name], rtol=1e-12)
    with pytest.raises(ValueError, match="Muon: groups must name matrices .*, got b, a vector"):
        bound(backend, Muon(groups={"b": {"rule": "muon"}}))


# ---- clipping ----


def test_clipping_scales_all_gradients_by_their_common_norm(backend):
    first = make(backend)
    second = make(backend, dtype="float32", first_index=len(first.buckets))
    optimizer = SGD(1.0, clip_norm=0.5)
    optimizer.bind(backend, [first, second])
    rng = np.random.default_rng(0)
    gradients = [draw_gradients(buffer, rng) for buffer in (first, second)]
    before = [values(buffer) for buffer in (first, second)]
    norm = math.sqrt(sum((g**2).sum() for part in gradients for g in part.values()))
    optimizer.step()
    assert optimizer.gradient_norm == pytest.approx(norm, rel=1e-12)
    for buffer, part, w, rtol in zip(
        (first, second), gradients, before, (1e-12, 1e-4), strict=True
    ):
        for p in buffer.parameters:  # float32: what is left of w - lr g after rounding to w's size
            expected = part[p.name] * 0.5 / norm
            step = w[p.name] - to_host(p.value)
            np.testing.assert_allclose(step, expected, rtol=rtol, atol=1e-6 * rtol)


@pytest.mark.filterwarnings("ignore:invalid value")
@each("value", [np.inf, np.nan, 1e200])
def test_clipping_leaves_gradients_alone_of_which_the_squares_are_not_finite(value):
    optimizer, buffer = bound(create_backend("numpy"), SGD(1.0, clip_norm=1.0))
    draw_gradients(buffer, np.random.default_rng(0))
    buffer.parameters[0].grad.reshape(-1)[0] = value
    before = buffer.grads.copy()
    optimizer.step()
    np.testing.assert_array_equal(buffer.grads, before)


# ---- order of work ----


@each("whole", [None, "clip_norm", "class", "later"])
def test_a_step_waits_for_each_bucket_or_for_all_where_the_rule_needs_them(backend, whole):
    events = []

    class Record(SGD):
        needs_all_gradients = whole == "class"

        def step_bucket(self, bucket):
            events.append(("update", bucket.index))

    optimizer, _ = bound(backend, Record(LR, clip_norm=0.5 if whole == "clip_norm" else None))
    optimizer.scale_loss(None)  # as Trainer does
    if whole == "later":
        optimizer.needs_all_gradients = True
    optimizer.step(lambda bucket: events.append(("wait", bucket.index)))
    waits, updates = [("wait", i) for i in range(3)], [("update", i) for i in range(3)]
    in_turn = [event for pair in zip(waits, updates, strict=True) for event in pair]
    assert events == (waits + updates if whole else in_turn)


def test_an_update_that_is_skipped_is_counted(backend):
    optimizer = SGD(lambda step: 0.5**step, momentum=0.9)
    buffer = make(backend)
    optimizer.bind(backend, [buffer])
    before = backend.to_numpy(buffer.values).copy()
    buffer.grads[:] = 1
    optimizer.skip()
    optimizer.skip()
    assert (optimizer.iterations, optimizer.lr_now) == (2, 0.5)
    np.testing.assert_array_equal(backend.to_numpy(buffer.values), before)
    assert not any(v.any() for k, v in optimizer.state().items() if k.startswith("velocity"))


# ---- learning rate ----


def test_updates_are_counted_from_zero_for_schedules_and_from_one_for_rules(backend):
    seen = []

    class Record(Optimizer):
        def update(self, w, g, *, lr, decay, step):
            seen.append((lr, step))

    optimizer = Record(lambda step: 10.0 + step)
    buffer = make(backend, bucket_bytes=1 << 20)
    optimizer.bind(backend, [buffer])
    assert optimizer.lr_now == 10
    optimizer.step()
    optimizer.step()
    optimizer.lr_factor = 0.5
    optimizer.step()
    assert seen == [(10.0, 1), (11.0, 2), (6.0, 3)]
    assert optimizer.lr_now == 6


@each(
    ("schedule", "error", "words"),
    [
        (lambda step: -1.0, ValueError, "SGD: lr of the schedule at step 0 must be at least 0"),
        (lambda step: None, TypeError, "SGD: lr of the schedule at step 0 must be a number"),
    ],
)
def test_a_schedule_that_gives_no_rate_is_refused(backend, schedule, error, words):
    optimizer, _ = bound(backend, SGD(schedule))
    with pytest.raises(error, match=words):
        optimizer.step()


# ---- state ----


@each("rule", RULES)
def test_a_run_continues_to_the_same_bytes_from_its_state_in_other_buckets(backend, rule):
    kind, options, *_ = RULES[rule]

    def build(bucket_bytes):
        optimizer = kind(Step(LR, (4,)), weight_decay=DECAY, **options)
        return bound(backend, optimizer, dtype="float32", bucket_bytes=bucket_bytes)

    def train(optimizer, buffer, steps):
        for step in steps:
            draw_gradients(buffer, np.random.default_rng(step))
            optimizer.step()

    whole, buffer = build(1)
    train(whole, buffer, range(3))
    whole.lr_factor = 0.5
    state, reached = whole.state(), values(buffer)
    shapes = {name: np.shape(value) for name, value in state.items()}
    slots = {f"{slot}/{name}": shape for slot in whole.slots for name, shape in SHAPES.items()}
    slots |= {name: (1,) for name in slots if "_scale/" in name}
    for name in ("v/a", "v/c") if rule == "muon" else ():  # matrices have no second moment
        del slots[name]
    assert shapes == {**slots, "iterations": (), "lr_factor": ()}  # without padding
    train(whole, buffer, range(3, 6))  # a state is a copy: this does not change it
    other, resumed = build(1 << 20)
    for p in resumed.parameters:
        p.master[...] = backend.asarray(reached[p.name])
    other.load(state)
    train(other, resumed, range(3, 6))
    for name, w in values(buffer).items():
        np.testing.assert_array_equal(values(resumed)[name], w)


def test_the_product_of_nadams_momenta_does_not_depend_on_the_steps_before():
    forward, rule = Nadam(momentum_decay=0.5), Nadam(momentum_decay=0.5)
    products = [forward.terms(step)["mu_product"] for step in range(1, 6)]
    assert products == sorted(products, reverse=True)
    for step in (5, 2, 4, 4, 1, 3):  # as if checkpoints of earlier steps were loaded
        assert rule.terms(step)["mu_product"] == products[step - 1]


def test_binding_starts_afresh(backend):
    optimizer = Adam(LR)
    buffer = make(backend)
    optimizer.bind(backend, [buffer])
    draw_gradients(buffer, np.random.default_rng(0))
    optimizer.step()
    optimizer.bind(backend, [make(backend)])
    assert optimizer.iterations == 0
    assert all((value == 0).all() for name, value in optimizer.state().items() if "/" in name)


def test_states_that_do_not_fit_are_refused_and_change_nothing(backend):
    adam, sgd = Adam(LR), SGD(LR, momentum=0.9)
    for optimizer in (adam, sgd):
        buffer = make(backend)
        optimizer.bind(backend, [buffer])
        draw_gradients(buffer, np.random.default_rng(0))
        optimizer.step()
    with pytest.raises(ValueError, match=r"missing m/a, m/b, m/c and 3 more, unexpected vel"):
        adam.load(sgd.state())
    before = sgd.state()
    wrong = {name: value + 1 for name, value in before.items()}
    wrong["velocity/c"] = np.zeros((2, 2))
    with pytest.raises(ValueError, match=r"velocity/c must have shape \(3, 3\), got \(2, 2\)"):
        sgd.load(wrong)
    wrong["velocity/c"] = before["velocity/c"] + 1
    for name, value in (("iterations", math.inf), ("iterations", -1), ("lr_factor", math.nan)):
        with pytest.raises((TypeError, ValueError), match=f"^SGD: {name} must be"):
            sgd.load({**wrong, name: value})
    for name, value in sgd.state().items():
        np.testing.assert_array_equal(value, before[name])


# ---- bad input ----


@each(
    ("name", "options", "words"),
    [
        ("sgd", {"lr": -0.1}, "SGD: lr .* must be at least 0, got -0.1"),
        ("adam", {"lr": math.nan}, "Adam: lr .* must be at least 0, got nan"),
        ("sgd", {"momentum": 1.0}, "SGD: momentum must be at least 0 and below 1, got 1.0"),
        ("sgd", {"nesterov": True}, "SGD: nesterov requires a momentum above 0"),
        ("adamw", {"weight_decay": -1}, "AdamW: weight_decay must be at least 0"),
        ("sgd", {"clip_norm": 0}, "SGD: clip_norm must be above 0"),
        ("rmsprop", {"rho": 1}, "RMSProp: rho must be at least 0 and below 1"),
        ("adagrad", {"initial": -1}, "Adagrad: initial must be"),
        ("lion", {"beta2": 1}, "Lion: beta2 must be"),
        ("nadam", {"momentum_decay": -1}, "Nadam: momentum_decay must be"),
        ("lars", {"trust": 0}, "LARS: trust must be above 0"),
        ("adm", {}, "unknown optimizer 'adm'; did you mean 'adam'"),
        ("sgd", {"momentun": 0.9}, "unknown option of sgd 'momentun'; did you mean 'momentum'"),
    ],
)
def test_mistakes_are_refused_in_a_sentence(name, options, words):
    with pytest.raises(ValueError, match=words):
        get_optimizer(name, **options)


def test_rules_that_are_incomplete_are_refused(backend):
    with pytest.raises(ValueError, match="SGD: bind"):
        SGD(0.1).step()
    with pytest.raises(TypeError, match=r'Momentum: slots must be a tuple; use \("velocity",\)'):
        type("Momentum", (Optimizer,), {"slots": "velocity"})

    class Forgets(Optimizer):
        def __init__(self, beta):
            self.beta = beta

        def update(self, w, g, *, lr, decay, step):
            w -= lr * g

    with pytest.raises(TypeError, match=r"Forgets: __init__ must call super\(\).__init__\(lr, "):
        Forgets(0.9).bind(backend, [make(backend)])


# ---- numbers that change from step to step ----


@each("name", sorted(OPTIMIZERS))
def test_terms_that_somebody_has_taken_give_the_same_update(backend, name):
    """As a captured step does: the numbers are taken on the host, and used elsewhere."""
    results = []
    for outside in (False, True):
        buffer = make(backend)
        optimizer = get_optimizer(name, lr=Cosine(0.1, 5))
        optimizer.bind(backend, [buffer])
        rng = np.random.default_rng(0)
        for _ in range(3):
            draw_gradients(buffer, rng)
            if outside:
                terms = optimizer.next_terms()
                arrays = {k: backend.asarray([v], "float64")[:1] for k, v in terms.items()}
                with optimizer.given(terms if backend.name != "cuda" else arrays):
                    optimizer.step()
            else:
                optimizer.step()
        assert optimizer.iterations == 3
        results.append(values(buffer))
    for key, value in results[0].items():
        np.testing.assert_array_equal(results[1][key], value)


def test_rules_of_the_library_can_be_captured_and_those_derived_must_say_so():
    class Own(SGD):
        pass

    others = {name for name, rule in OPTIMIZERS.items() if not rule.capturable}
    # on a GPU these have no kernels of their own
    assert others == {"adagrad", "lion", "muon", "schedule_free", "adam8bit", "soap"}
    assert not Own.capturable


@each("name", sorted(OPTIMIZERS))
def test_a_model_without_parameters_is_stepped_like_any_other(backend, name):
    model = Model(ReLU(), (3,), backend=backend)
    optimizer = get_optimizer(name, lr=Cosine(0.1, 5), clip_norm=1.0)
    optimizer.bind(backend, model.buffers)
    optimizer.step()
    assert optimizer.iterations == 1
    decays = {"adamw": 0.01, "soap": 0.01, "lamb": 0.01, "lars": 1e-4, "muon": 0.1}
    assert optimizer.weight_decay == decays.get(name, 0)  # the default


# ---- groups of parameters ----


@each("name", sorted(OPTIMIZERS))
def test_a_group_is_updated_like_a_rule_of_its_own_rate_and_decay(backend, name, rng):
    groups = {"a": {"lr_factor": 0.5}, "b": {"weight_decay": 0.2}, "?": {"lr_factor": 3}}
    expected = {"a": (0.5, DECAY), "b": (1, 0.2), "c": (3, DECAY)}
    ours, buffer = get_optimizer(name, lr=LR, weight_decay=DECAY, groups=groups), make(backend)
    ours.bind(backend, [buffer])
    twins = {}
    for parameter, (factor, decay) in expected.items():
        all_decay = {"*": {"weight_decay": decay}}
        rule = get_optimizer(name, lr=factor * LR, weight_decay=decay, groups=all_decay)
        twins[parameter] = rule, make(backend)
        rule.bind(backend, [twins[parameter][1]])
    for _ in range(3):
        grads = draw_gradients(buffer, rng)
        ours.step()
        for rule, twin in twins.values():
            for p in twin.parameters:
                p.grad[...] = backend.asarray(grads[p.name])
            rule.step()
    for parameter, (_, twin) in twins.items():
        np.testing.assert_allclose(
            values(buffer)[parameter], values(twin)[parameter], rtol=1e-12, err_msg=parameter
        )


@each(
    ("groups", "sentence"),
    [
        ({"head": {"lr": 0.1}}, "SGD: unknown option of the group 'head' 'lr'; .*lr_factor"),
        ({"head": {"lr_factor": -1}}, "SGD: lr_factor of the group 'head' must be at least 0"),
        ({"head": {"rule": "muon"}}, "SGD: unknown option of the group 'head' 'rule'"),
        ({"head": 0.1}, "SGD: the group 'head' must be a dict such as .*, got 0.1"),
        ([{"params": "head"}], "SGD: groups must be a dict such as"),
    ],
)
def test_options_of_groups_are_checked(groups, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        SGD(0.1, groups=groups)


def test_groups_match_parameters_of_the_model():
    model = Model(Linear(3, name="head"), (4,), backend="numpy")
    with pytest.raises(ValueError, match="SGD: groups: unknown layer 'haed'; did you mean 'head'"):
        Trainer(model, SGD(0.1, groups={"haed": {"lr_factor": 2}}))


def test_an_assigned_rate_replaces_the_schedule(backend):
    optimizer, buffer = SGD(Cosine(0.1, 10)), make(backend)
    optimizer.bind(backend, [buffer])
    optimizer.lr_factor = 0.5
    optimizer.lr = 0.25
    assert optimizer.lr == optimizer.lr_now == 0.25
    before = values(buffer)["b"].copy()
    buffer.grads[...] = 1
    optimizer.step()
    np.testing.assert_allclose(values(buffer)["b"], before - 0.25)
    with pytest.raises(ValueError, match=r"SGD: lr .* must be at least 0, got -1"):
        optimizer.lr = -1
