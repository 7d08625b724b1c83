"""A model that recomputes values in backward: the same bytes, with less memory."""

from __future__ import annotations

import weakref
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, run_threads
from pydtnn.kernels import create_backend
from pydtnn.layers import (
    Conv2d,
    Flatten,
    Layer,
    Linear,
    Net,
    ReLU,
    Sequential,
    Sigmoid,
    StepContext,
    Tanh,
)
from pydtnn.model import Model
from pydtnn.model.memory import Forecast, forecast_memory
from pydtnn.models import create_net
from pydtnn.parallel.mesh import Mesh
from tests.each import each
from tests.model.networks import IMAGE, NETS, assert_same, passes, projection


def chain() -> Net:
    return Sequential(
        Conv2d(4, 3), Tanh(), Conv2d(4, 3), ReLU(), Flatten(), Linear(6), Sigmoid(), Linear(3)
    )


def model_of(net: Net, *, threads: int = 1, **options: Any) -> Model:
    backend = create_backend("cpu", threads=threads, tuning="fixed")
    return Model(net, IMAGE, backend=backend, **options)


@each("options", [{}, {"fuse": False}, {"dtype": "float64", "threads": 2}], few=5)
@each("name", NETS)
def test_every_way_to_recompute_gives_the_same_bytes(name, options):
    model = model_of(NETS[name](), input_gradient=True, **options)
    expected, again = passes(model), passes(model, accumulate=True)
    first, nodes = 1, len(model.graph.nodes)
    rng = np.random.default_rng(1)
    places = np.arange(first + 1, nodes)
    ways = [places, places[-1:], *(places[rng.random(len(places)) < 0.3] for _ in range(3))]
    for cuts in ways:
        model.statistics.begin_step()
        model.cut([first, *map(int, cuts)])
        assert_same(passes(model), expected)
        assert_same(passes(model, accumulate=True), again)


@each("axes", [{"filter": 2}, {"spatial": 2}])
def test_exchanges_are_repeated_and_sums_of_batch_norm_are_not(axes):
    def rank(comm: Communicator) -> None:
        mesh = Mesh(comm, **axes)
        model = model_of(projection(), mesh=mesh, fuse=False, dtype="float64")
        sent: list[dict[str, int]] = []
        results = []
        for cuts in ((), (1, *range(3, len(model.graph.nodes), 3))):
            before = {name: t.messages for name, t in mesh.traffic.items()}
            model.statistics.begin_step()
            model.cut(cuts)
            results.append(passes(model))
            sent.append({n: t.messages - before.get(n, 0) for n, t in mesh.traffic.items()})
        assert_same(*results)
        assert {n: m for n, m in sent[0].items() if "norm" in n} == {
            n: m for n, m in sent[1].items() if "norm" in n
        }
        assert sum(sent[1].values()) > sum(sent[0].values())

    run_threads(2, rank)


def test_frozen_layers_at_the_beginning_do_not_run_again():
    model = model_of(projection(), recompute=4)
    whole = model.segments
    model.freeze("conv2d0", "batchnorm1", "residual3")
    first = min(model.graph.trained)
    assert model.cuts[0] == first > 1
    assert whole is not model.segments
    got = passes(model)
    model.cut(())
    model.statistics.begin_step()
    assert_same(passes(model), got)


def test_a_pass_for_inference_repeats_nothing():
    model = model_of(projection(), recompute=3)
    x = np.ones((2, *IMAGE), "float32")
    np.testing.assert_array_equal(model.predict(x), model_of(projection()).predict(x))
    expected = passes(model, training=False)
    model.cut(())
    assert_same(passes(model, training=False), expected)


def names_before_cuts(model: Model) -> list[str]:
    return [model.graph.nodes[cut - 1].name for cut in model.cuts[1:]]


def test_checkpoints_are_the_ends_of_named_layers_and_blocks():
    net = create_net("resnet20", 10, (32, 32, 3))
    ends = [f"stage{s}.{b}.bn2" for s in (1, 2, 3) for b in (0, 1, 2)]
    ends[-1] = "stage3.2.conv2"  # its batch norm is computed by the only reader
    for names in (["stage?.?"], ["stage1.*", "stage2.*", "stage3"], ["stage*.relu"]):
        model = Model(net, (32, 32, 3), recompute=names)
        net = create_net("resnet20", 10, (32, 32, 3))
        chosen = names_before_cuts(model)
        assert chosen == (ends if "stage3" not in names else [*ends[:6], ends[-1]])
    model = Model(net, (32, 32, 3), recompute="stage1.0.relu1")
    assert names_before_cuts(model) == ["stage1.0.conv1"]
    vgg = Model(create_net("vgg11", 10, (32, 32, 3)), (32, 32, 3), recompute=["*relu1"])
    assert len(vgg.cuts) >= 2


@each("name", ["projection", "pooled branches", "views"])
def test_parts_save_about_equally_many_bytes(name):
    model = model_of(NETS[name](), recompute=3)
    assert len(model.segments.parts) == 2
    kept = forecast_memory(model, 32, cuts=()).kept
    bounds = [*model.cuts, len(kept)]
    parts = [sum(kept[a:b]) for a, b in pairwise(bounds)]
    assert max(parts) <= sum(kept) / 3 + 2 * max(kept)


def test_auto_needs_the_least_memory_or_the_least_computation_within_the_limit():
    keeping, model = (
        Model(create_net("resnet20", 10, (32, 32, 3)), (32, 32, 3), recompute=way)
        for way in (None, "auto")
    )
    whole, least = (forecast_memory(m, 32, slots=1) for m in (keeping, model))
    assert least.peak < 0.6 * whole.peak
    ends = [model.cuts[-1]]
    for share in (0.75, 0.9, 1.0):
        model.memory_limit = int(share * whole.resident)
        model.choose_segments(32, slots=1)
        assert forecast_memory(model, 32, slots=1).resident <= model.memory_limit
        ends.append(model.cuts[-1] if model.cuts else 0)
    assert ends == sorted(ends, reverse=True)
    assert len(set(ends)) == len(ends)
    assert ends[-1] == 0


def test_the_least_memory_is_named_and_is_possible():
    model = Model(create_net("resnet20", 10, (32, 32, 3)), (32, 32, 3), recompute="auto")
    model.memory_limit = 1
    with pytest.raises(ValueError, match="memory_limit must be at least .* for 8 samples") as error:
        model.choose_segments(8)
    least = int(str(error.value).split()[6].replace(",", ""))
    model.memory_limit = least
    model.choose_segments(8)
    assert forecast_memory(model, 8).resident == least
    model.memory_limit = least - 1
    with pytest.raises(ValueError, match=f"{least:,} B"):
        model.choose_segments(8)


@each(
    ("arguments", "message"),
    [
        ({"recompute": "conv9"}, "Model.recompute: unknown layer 'conv9'; did you mean 'conv2d"),
        ({"recompute": 1}, "Model: recompute must be at least 2, got 1"),
        ({"recompute": 99}, "Model: recompute must be at most 7, the parts into which this"),
        ({"recompute": []}, "Model: recompute must be a number of parts, names"),
        ({"recompute": 2.5}, "Model: recompute must be a number of parts, names"),
        ({"recompute": "linear7"}, "Model.recompute: linear7 is the end of the network"),
        ({"recompute": 2, "memory_limit": 5}, 'Model: memory_limit requires recompute="auto"'),
        ({"recompute": "auto", "memory_limit": 0}, "Model: memory_limit must be at least 1"),
    ],
)
def test_what_cannot_be_recomputed_is_refused(arguments, message):
    with pytest.raises((TypeError, ValueError)) as error:
        Model(chain(), IMAGE, **arguments)
    assert message in str(error.value)


def test_the_summary_shows_what_is_recomputed():
    lines = Model(chain(), IMAGE, recompute=["tanh1", "relu3"]).summary(4).splitlines()
    shown = {line.split()[0]: line.split("B  ")[-1].strip() for line in lines if "part" in line}
    assert shown["conv2d0"] == "part 1"
    assert shown["tanh1"] == "part 1, output kept"
    assert "part 2" in shown["conv2d2"]
    assert "linear5" not in shown
    assert any(line.startswith("recomputed ") and "of forward" in line for line in lines)
    assert not any("recomputed" in line for line in Model(chain(), IMAGE).summary(4).splitlines())


def test_with_several_micro_batches_in_flight_the_last_part_is_recomputed_too():
    model = Model(create_net("resnet20", 10, (32, 32, 3)), (32, 32, 3), recompute="auto")
    one, four = (Forecast(model, 8, 1, in_flight) for in_flight in (1, 4))
    model.choose_segments(8, slots=1, in_flight=4)
    nodes = len(model.graph.nodes)
    assert model.cuts[-1] == nodes
    assert four.memory(model.cuts).peak < four.memory(model.cuts[:-1]).peak
    kept = sum(one.memory(()).kept)
    assert four.memory(()).peak == pytest.approx(one.memory(()).peak + 3 * kept, rel=0.01)


class Doubled(Layer):
    """Saves nothing, and notes how many outputs of such layers exist."""

    saves = ()
    new_results = ("output",)

    def __init__(self, outputs: list[weakref.ref], alive: list[int]) -> None:
        super().__init__()
        self.outputs, self.alive = outputs, alive

    def forward(self, *xs: np.ndarray, context: StepContext) -> tuple[np.ndarray, None]:
        y = 2 * xs[0]
        self.outputs.append(weakref.ref(y))
        self.alive.append(sum(ref() is not None for ref in self.outputs))
        return y, None

    def backward(self, dy: np.ndarray, saved: None) -> np.ndarray:
        return 2 * dy


def test_values_within_a_segment_are_freed_after_their_last_reader_again():
    outputs: list[weakref.ref] = []
    alive: list[int] = []
    body = [Doubled(outputs, alive) for _ in range(5)]
    model = Model(Sequential(Linear(4), *body, Sigmoid(), Linear(3)), (4,), backend="numpy")
    model.cut((1, 7))
    y, residuals = model.forward(np.ones((2, 4), "float32"), StepContext(training=True))
    model.backward(np.ones_like(y), residuals)
    # the input and the output of a layer, each time
    assert len(alive) == 10
    assert max(alive) <= 2
