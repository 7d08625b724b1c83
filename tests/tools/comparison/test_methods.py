"""Published methods that are compared with others: beside the same methods in NumPy."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, Serial, run_threads
from pydtnn.optimizers import SGD
from pydtnn.parallel.compression import COMPRESSORS, create_sums
from pydtnn.parallel.exchange import AllReduce, averaged
from pydtnn.parallel.schemes import SCHEMES, create_scheme
from pydtnn.tools.comparison import METHODS, DecoupledDiLoCo, GradientPush, OkTopk, StaleSynchronous
from pydtnn.tools.perfmodel.virtual import run_virtual
from pydtnn.tools.testing import check_scheme, scheme
from pydtnn.tools.testing.scheme import CHECKS
from tests.each import each
from tests.fuzz.reference_training import COMPRESSED, STEPS, Array, Ranks, streaming_diloco
from tests.parallel.schemes.course import all_values, data, trainer_of
from tests.parallel.schemes.test_references import STREAMED, counted, long_run, reference
from tests.parallel.schemes.test_sleeping_ranks import RANKS, Watch, late_after
from tests.parallel.schemes.test_sleeping_ranks import STEPS as ALL_STEPS
from tests.tools.perfmodel.virtual.costs import UniformCosts, cluster


def gradient_push(ranks: Ranks, grads: Array, counts: Array) -> None:
    """A column of the matrix is what a rank divides among its targets and itself."""
    size, step = len(grads), ranks.steps
    powers = [1 << k for k in range(10) if 1 << k < size]
    hops = {
        "random": [[h] for h in np.random.default_rng(step).integers(1, max(size, 2), size)],
        "ring": [{1 % size, -1 % size} - {0}] * size,
        "complete": [range(1, size)] * size,
        "exponential": [powers] * size,
        "one_peer": [[powers[step % len(powers)]] if powers else []] * size,
    }[ranks.options["graph"]]
    matrix = np.eye(size)
    for rank, own in enumerate(hops if size > 1 else ()):
        for hop in own:
            matrix[(rank + hop) % size, rank] = 1
    matrix /= matrix.sum(axis=0)
    weights = ranks.memory.get("weights", np.ones(size))
    ranks.w = ranks.w * weights[:, None]
    ranks.apply(grads * (size / counts.sum()))
    weights = ranks.memory["weights"] = matrix @ weights
    ranks.w = matrix @ ranks.w / weights[:, None]
    ranks.samples[:] = weights


def stale_synchronous(ranks: Ranks, grads: Array, counts: Array) -> None:
    """Own updates at once, those of others later; `waiting` has the updates of all ranks."""
    before, size = ranks.w, len(grads)
    ranks.apply(grads * (size / counts.sum()))
    ranks.waiting.append((ranks.w - before) / size)
    ranks.w = before + ranks.waiting[-1]
    if len(ranks.waiting) > ranks.options["staleness"]:
        late = ranks.waiting.pop(0)
        ranks.w = ranks.w + (late.sum(axis=0) - late)
    ranks.samples[:] = 1


def noloco(ranks: Ranks, grads: Array, counts: Array) -> None:
    """A doubly stochastic matrix with 1/2 for both of each pair, and 1 for who is alone."""
    ranks.apply_own_means(grads, counts)
    ranks.samples[:] = 1
    memory, (size, _) = ranks.memory, ranks.w.shape
    outer = memory.get("outer", np.tile(ranks.centre, (size, 1)))
    if ranks.steps % ranks.options["period"] == 0:
        drawn, matrix = np.random.default_rng([3, ranks.steps]).permutation(size), np.eye(size)
        for pair in zip(drawn[::2], drawn[1::2], strict=False):
            matrix[np.ix_(pair, pair)] = 0.5
        rate, momentum, pull = (ranks.options[name] for name in ("rate", "momentum", "pull"))
        step = momentum * memory.get("step", 0) + rate * matrix @ (ranks.w - outer)
        memory["step"] = step = step + pull * (matrix @ outer - outer)
        memory["outer"] = outer + step
        ranks.w = memory["outer"].copy()


def decoupled_diloco(ranks: Ranks, grads: Array, counts: Array) -> None:
    """Without a quorum."""
    streaming_diloco(ranks, grads, counts, power=2)


def demo(ranks: Ranks, grads: Array, counts: Array) -> None:
    """Chunks of the network of `long_run`, each with the Kronecker product of two transforms."""
    kept = ranks.memory["kept"] = ranks.options["decay"] * ranks.memory.get("kept", 0)
    kept = ranks.memory["kept"] = kept + grads / counts.sum()
    sides, sent = {1: (1, 1), 3: (1, 3), 4: (1, 4), 15: (3, 5), 20: (5, 4)}, np.zeros_like(kept)
    places, widths = np.arange(43), [20, 5, 15, 3]
    if ranks.options["chunk"] == 4:  # rows, single biases, columns
        places[25:40], widths = places[25:40].reshape(3, 5).T.flat, [4] * 5 + [1] * 5 + [3] * 6
    for chunk in np.split(places, np.cumsum(widths)[:-1]):
        transform = np.kron(*map(cosines, sides.get(len(chunk), (1, len(chunk)))))
        for own, out in zip(kept, sent, strict=True):
            components = transform @ own[chunk]
            components[np.argsort(-abs(components))[ranks.options["keep"] :]] = 0
            out[chunk] = np.linalg.solve(transform, components)
    kept -= sent
    ranks.apply([sent.sum(axis=0)] * len(grads))


def cosines(n: int) -> Array:
    """The DCT-II of unit vectors, as the Fourier transform of twice their length."""
    half = np.fft.fft(np.eye(n), 2 * n)[:, :n] * np.exp(-0.5j * np.pi * np.arange(n) / n)
    return half.real.T * np.sqrt(np.where(np.arange(n) == 0, 1, 2) / n)[:, None]


def ok_topk(ranks: Ranks, grads: Array, counts: Array) -> None:
    """Values above a threshold of each rank, whose sums are above another one."""
    memory, ends = ranks.memory, np.cumsum(ranks.options.get("sizes", [len(grads[0])]))
    kept = memory["kept"] = memory.get("kept", 0) + grads / counts.sum()
    total = np.zeros_like(grads[0])
    for index, part in enumerate(np.split(np.arange(len(total)), ends[:-1])):
        k, own = int(np.ceil(ranks.options["share"] * len(part))), kept[:, part]
        if ranks.steps % ranks.options["renew"] == 0:
            memory["limits", index] = np.sort(abs(own))[:, -k]
        sent = np.where(abs(own) >= memory["limits", index][:, None], own, 0)
        sums = sum(sent)
        if ranks.steps % ranks.options["renew"] == 0:
            others = np.sort(abs(sums[sums != 0]))
            memory["limit", index] = others[-k] if len(others) >= k else 0
        total[part] = np.where(abs(sums) >= memory["limit", index], sums, 0)
        own[(sent != 0) & (total[part] != 0)] = 0
        kept[:, part] = own
    ranks.apply([total] * len(grads))


PAIRED = {"period": 7, "rate": 0.6, "momentum": 0.4, "pull": 0.5, "seed": 3}

CASES: list[tuple[Any, dict[str, Any]]] = [
    (gradient_push, {"graph": "random"}),
    (stale_synchronous, {"staleness": 3}),
    (noloco, PAIRED),
    (decoupled_diloco, STREAMED),
    (demo, {"keep": 2, "chunk": 4, "decay": 0.9}),
    (demo, {"keep": 3, "chunk": 5, "decay": 0.99}),
    (ok_topk, {"share": 0.1, "renew": 8}),
]


@pytest.fixture(autouse=True)
def _references(monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (gradient_push, stale_synchronous, noloco, decoupled_diloco):
        monkeypatch.setitem(STEPS, step.__name__, step)
    for step in (demo, ok_topk):
        monkeypatch.setitem(COMPRESSED, step.__name__, step)


@pytest.mark.long
@each("ranks", [1, 3])
@each(("step", "options"), CASES)
def test_200_steps_are_those_of_the_method_in_numpy(step, options, ranks):
    drawn = long_run(step.__name__, options, "momentum", ranks)
    (expected, *_), history = drawn.reference()
    for ours, logs in run_threads(ranks, drawn.train):
        np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-12)
        assert logs[-1]["loss"] == pytest.approx(history[-1]["loss"], rel=1e-12)


@pytest.mark.parametrize("checks", [(), pytest.param(CHECKS, marks=pytest.mark.long)])
@each(("step", "options"), {c[0]: c for c in CASES if c[0].__name__ in METHODS["scheme"]}.values())
def test_check_scheme_compares_each_step_with_the_reference(step, options, checks, monkeypatch):
    monkeypatch.setattr(scheme, "CHECKS", checks)
    method = partial(METHODS["scheme"][step.__name__], **options)
    rest: dict[str, Any] = {"tolerance": 1e-12, "equal_to_serial": False, "ranks": [4]}
    if step is not decoupled_diloco:  # whose reference has one bucket
        rest["reference"] = reference(step.__name__, **options)
    check_scheme(method, optimizer=lambda: SGD(0.02), **rest)


@pytest.mark.threads(3)
def test_pushed_parameters_are_averaged_by_their_weights(comm):
    exchange = GradientPush(comm)
    trainer = trainer_of(exchange, SGD(0.0))
    exchange.start(trainer.model.buckets)
    exchange.weight = comm.rank + 0.5
    trainer.model.buffers[0].values[:] += comm.rank
    expected = np.average(all_values(comm, trainer), axis=0, weights=[0.5, 1.5, 2.5])
    with averaged(exchange):
        np.testing.assert_allclose(trainer.model.buffers[0].values, expected, rtol=1e-12)


def test_a_rank_that_is_stale_synchronous_waits_when_it_is_staleness_steps_ahead():
    slept = 2
    late = late_after(StaleSynchronous, RANKS - 1, slept)
    for step in range(ALL_STEPS - 1):  # the last one sums the losses
        # the update of step slept + 1 is late, and used by the others `staleness` steps later
        expected = np.full(RANKS, step > slept + StaleSynchronous.staleness.default)
        expected[-1] = step > slept
        np.testing.assert_array_equal(late[:, step], expected, err_msg=f"step {step}")


class Noted(DecoupledDiLoCo):
    """Notes what ranks send, and the outer parameters after each step."""

    def start(self, buckets):
        super().start(buckets)
        self.sent, self.found = [], [self.outer[0].copy()]

    def send(self, bucket):
        self.sent.append([*bucket.values, self.samples])
        super().send(bucket)

    def outer_step(self, outer, *rest):
        super().outer_step(outer, *rest)
        self.found.append(outer.copy())


def test_an_outer_step_has_what_has_arrived_of_a_quorum_and_later_what_was_late():
    def rank(comm: Communicator) -> Noted:
        exchange = Noted(comm, period=2, quorum=2, grace=0.0, rate=0.6, momentum=0.5)
        trainer = trainer_of(exchange, SGD(0.1), bucket_bytes=1 << 20, callbacks=[Watch(2, [3])])
        trainer.fit(data(), epochs=2, global_batch_size=3, seed=5, loader_threads=0)
        return exchange

    ranks = run_virtual(rank, network=cluster("aaa"), costs=UniformCosts()).results
    centre, *found, velocity = *ranks[0].found, 0.0
    assert len(found) == len(ranks[2].sent) == 13
    for number, after in enumerate(found):
        # rank 2 sleeps after the fourth step of an epoch, while the others train
        members = ranks[: 2 + (number in (0, 1, 6, 7, 12))]
        *sent, samples = np.array([one.sent[number] for one in members]).T
        change = centre - samples**2 @ np.transpose(sent) / sum(samples**2)
        velocity = 0.5 * velocity + change
        centre = centre - 0.6 * (change + 0.5 * velocity)
        np.testing.assert_allclose(after, centre, rtol=1e-12, atol=1e-12, err_msg=str(number))


def test_a_quorum_above_the_ranks_is_refused_before_training():
    with pytest.raises(ValueError, match="quorum must be at most 1, the number of ranks, got 2$"):
        trainer_of(DecoupledDiLoCo(Serial(), quorum=2), SGD(0.1))


@pytest.mark.threads(1, 2, 3)
def test_schemes_send_what_their_formulas_say(comm):
    buckets = trainer_of(create_scheme("allreduce", comm), SGD(0.1)).model.buckets
    b, n, p = len(buckets), sum(bucket.values.nbytes for bucket in buckets), comm.size
    one, rank = min(p - 1, 1), comm.rank
    others = 1 if rank else p - 1
    for name, options, messages, sent in [
        ("stale_synchronous", {}, 20 * (p - 1) * b, 20 * (p - 1) * n),
        ("gradient_push", {"graph": "random"}, 20 * one * (1 + b), 20 * one * (8 + n)),
        ("decoupled_diloco", {"period": 5}, 4 * b * others, 4 * others * (n + 8 * b * (rank > 0))),
        *([("noloco", {"period": 5}, 8 * one * b, 8 * one * n)] * (p < 3)),
    ]:
        found = counted(comm, name, options, 20)
        assert found == (messages, pytest.approx(sent, abs=messages)), name


def test_registries_find_them_after_their_own():
    assert not {*SCHEMES, *COMPRESSORS} & {name for found in METHODS.values() for name in found}
    for name in METHODS["scheme"]:
        assert type(create_scheme(name, Serial())) is METHODS["scheme"][name]
    sums = AllReduce(Serial(), sums=create_sums("Ok-TopK", share=0.1)).sums
    assert type(sums) is OkTopk
    with pytest.raises(ValueError, match="unknown scheme 'gradient_pusch'; did you mean 'gradie"):
        create_scheme("gradient_pusch", Serial())
