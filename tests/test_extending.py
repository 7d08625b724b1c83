"""The code blocks of docs/extending.md run, do what they say, and are as short as promised."""

from __future__ import annotations

import ast
import inspect
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn import layers
from pydtnn.callbacks import Callback
from pydtnn.comm import create_communicator, run_threads
from pydtnn.comm.schedules import steps
from pydtnn.comm.schedules.executor import Scheduled
from pydtnn.data import ArrayDataset, Dataset
from pydtnn.kernels import create_backend
from pydtnn.layers import Conv2d, Flatten, GlobalAvgPool2d, Layer, Linear, Sequential, collectives
from pydtnn.losses import Loss
from pydtnn.model import Model, pipeline
from pydtnn.optimizers import SGD, Optimizer
from pydtnn.parallel.compression import Compressor
from pydtnn.parallel.exchange import AllReduce, GradientExchange
from pydtnn.parallel.mesh import Mesh
from pydtnn.parallel.option import option
from pydtnn.parallel.schemes import (
    GRAPHS,
    SCHEMES,
    Gossip,
    LocalSGD,
    Partition,
    ShardedOptimizer,
    swap,
)
from pydtnn.tools.schedules.check import check
from pydtnn.tools.testing import check_layer, check_loss, check_plan, check_scheme
from pydtnn.training.trainer import Trainer
from pydtnn.utils.lazy import Named
from tests.each import each

DOC = Path(__file__).parent.parent / "docs" / "extending.md"
BLOCKS = dict(re.findall(r"```python\n# (\w+)\n(.*?)```", DOC.read_text(), re.DOTALL))
LIMITS = {"layer": 12, "optimizer": 8, "schedule": 3, "scheme": 8, "gossip": 10, "sharded": 15}
LIMITS |= {"compressor": 3, "top_k": 6, "collective": 8, "dataset": 9, "loss": 5, "callback": 5}
LIMITS |= {"filter_parallel": 22, "pipeline_schedule": 4, "squeeze_excite": 42}
LIBRARY = {"scheme": LocalSGD, "gossip": Gossip, "sharded": ShardedOptimizer}
"""What the library has of which the blocks show the code."""


def run(block: str, old: str = "", new: str = "") -> Any:
    """Execute a block, with a replacement, and return what it defines."""
    names: dict[str, Any] = {"np": np, "Layer": Layer, "Optimizer": Optimizer}
    names |= {"GradientExchange": GradientExchange, "Partition": Partition, "option": option}
    names |= (
        {"GRAPHS": GRAPHS, "swap": swap, "Compressor": Compressor}
        | vars(steps)
        | dict(Named("pydtnn.layers", layers.__all__))
    )
    names |= {"check_plan": check_plan}
    names |= {name: getattr(collectives, name) for name in ("AllGather", "AllReduce")}
    if block == "check_plan":
        names["FilterConv2d"] = run("filter_parallel")
    names |= {"check_scheme": check_scheme, "LocalSGD": LocalSGD, "SGD": SGD}
    names |= {"forward": pipeline.forward, "backward": pipeline.backward}
    names |= {"Dataset": Dataset, "Loss": Loss, "Callback": Callback}
    before = dict(names)
    exec(BLOCKS[block].replace(old, new), names)
    del names["__builtins__"]
    *_, last = (name for name, value in names.items() if before.get(name) is not value)
    return names[last]


def lines_of_code(source: str) -> int:
    """Count lines without blank ones and docstrings."""
    documented = (ast.ClassDef, ast.FunctionDef)
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node):
            first = node.body[0]
            docstrings |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = enumerate(source.splitlines(), start=1)
    return sum(bool(text.strip()) and number not in docstrings for number, text in lines)


def problem(seed: int = 0) -> ArrayDataset:
    """A linear classification that every rule should get better at."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(96, 5)).astype("float32")
    return ArrayDataset(x, (x @ rng.normal(size=(5, 3))).argmax(axis=1))


def losses(optimizer: Optimizer, exchange: GradientExchange, epochs: int = 4) -> list[float]:
    model = Model(Sequential(Linear(3)), (5,), backend="numpy", dtype="float64")
    trainer = Trainer(model, optimizer, exchange=exchange)
    return [logs["loss"] for logs in trainer.fit(problem(), epochs=epochs, global_batch_size=16)]


@each(("block", "limit"), LIMITS.items())
def test_an_extension_is_as_short_as_promised(block, limit):
    assert lines_of_code(BLOCKS[block]) <= limit


@each("block", ["layer", "parameters"])
def test_the_layers_have_right_gradients(block):
    check_layer(run(block)(), (4, 4, 3))


def test_the_optimizer_rule_learns():
    history = losses(run("optimizer")(lr=0.02), AllReduce(create_communicator("serial")))
    assert history[-1] < 0.7 * history[0]


def test_the_schedule_sets_the_learning_rate():
    schedule = run("schedule")
    optimizer = SGD(schedule)
    losses(optimizer, AllReduce(create_communicator("serial")), epochs=2)
    assert optimizer.iterations == 12
    assert optimizer.lr_now == schedule(11)


@each("block", LIBRARY)
def test_the_schemes_learn_and_end_with_equal_parameters(block):
    scheme = run(block)

    def rank(comm: Any) -> tuple[list[float], np.ndarray]:
        exchange = scheme(comm)
        history = losses(SGD(0.2), exchange)
        return history, exchange.buckets[0].values.copy()

    (first, weights), *others = run_threads(3, rank)
    assert first[-1] < 0.7 * first[0]
    for history, other in others:
        assert history == first
        np.testing.assert_array_equal(other, weights)


def test_the_scheme_that_counts_its_steps_saves_the_number(monkeypatch):
    scheme = run("accumulate")
    check_scheme(scheme, ranks=[1, 2])
    monkeypatch.delattr(scheme, "state")
    monkeypatch.delattr(scheme, "load")
    with pytest.raises(AssertionError, match=r"state\(\) and load\(\) must include"):
        check_scheme(scheme, ranks=[1])


def test_the_scheme_takes_its_option():
    comm = create_communicator("serial")
    assert run("scheme")(comm, period=4).period == 4
    with pytest.raises(ValueError, match="LocalSGD: period must be at least 1, got 0"):
        run("scheme")(comm, period=0)


class Plain(ast.NodeTransformer):
    """Leaves the code of a class, without annotations and docstrings."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        for arg in (*node.args.args, *node.args.kwonlyargs):
            arg.annotation = None
        return self.visit_ClassDef(node)

    def visit_ClassDef(self, node: Any) -> Any:
        self.generic_visit(node)
        node.body = node.body[1:] if ast.get_docstring(node) else node.body
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.Assign:
        assert node.value is not None
        return ast.copy_location(ast.Assign([node.target], node.value), node)


def code(source: str) -> str:
    return ast.unparse(Plain().visit(ast.parse(source)))


@each("block", LIBRARY)
def test_the_library_has_what_the_block_shows(block):
    source = inspect.getsource(LIBRARY[block])
    assert code(source) == code(BLOCKS[block])


def test_the_table_of_schemes_has_all_of_them():
    section = DOC.read_text().partition("## A parallel scheme")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `(\w+)` \| ", section, re.MULTILINE)
    assert {*SCHEMES} <= {*named}


def test_the_report_on_a_scheme_can_be_read(capsys):
    report = run("check")
    assert [row.ranks for row in report.rows] == [1, 3]
    assert "LocalSGD: 57 parameters" in capsys.readouterr().out


def test_the_reference_of_a_scheme_is_compared():
    assert run("reference").__name__ == "local_sgd"  # the block has called check_scheme
    with pytest.raises(AssertionError, match="those of the reference after step 8"):
        run("reference", "period=8", "period=9")


def test_the_parallel_layer_equals_serial_training(capsys):
    report = run("check_plan")
    assert [row.mesh for row in report.rows] == [{"filter": 3}, {"data": 2, "filter": 2}]
    assert max(max(row.differences.values()) for row in report.rows) < 1e-12
    table = re.search(r"```text\n(plan: .*?)```", DOC.read_text(), re.DOTALL)
    assert table is not None
    shown = [line.split()[0] for line in table[1].splitlines()]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == shown
    filters = run("filter_parallel")
    filters.backward_steps = without_sum
    with pytest.raises(AssertionError, match="own: the gradient of the input"):
        check_plan([Conv2d(3, 1), filters(3, 3, name="own")], (5, 5, 2), meshes=[{"filter": 2}])


def test_the_layer_of_elements_in_a_plan_equals_serial_training():
    names = {**Named("pydtnn.layers", layers.__all__), "check_plan": check_plan}
    names["Scale"] = run("parameters")
    exec(BLOCKS["follow"] + BLOCKS["check_follow"], names)


def test_the_layer_in_a_plan_equals_serial_training():
    block = run("squeeze_excite")
    check_layer(block(3), (5, 4, 3), seed=1)
    exec(
        BLOCKS["check_squeeze_excite"],
        {
            **Named("pydtnn.layers", layers.__all__),
            "check_plan": check_plan,
            "SqueezeExcite": block,
        },
    )
    net = [Conv2d(4, 3, padding=1), block(3, name="se"), Flatten(), Linear(3)]
    block.follow = lambda layer, draft, cut: draft.same(cut.axis, cut) or cut.dim in (0, 1)
    with pytest.raises(AssertionError, match="se"):  # each rank has the means of its stripe
        check_plan(net, (7, 6, 2), "spatial", meshes=[{"spatial": 2}])


def without_sum(layer: Any, dy: Any, saved: Any, *, joint: bool) -> Any:
    """A backward pass that omits the sum of the ranks' terms."""
    yield collectives.AllReduce(np.zeros(1), "filter")
    return layer.backward(dy[..., layer.part].copy(), saved)


@pytest.mark.few(1)
@pytest.mark.parametrize("block", ["compressor", "top_k"])
def test_the_compressors_keep_a_scheme_s_promises(block):
    scheme = partial(AllReduce, sums=run(block))  # top_k sends one element of each bucket here
    check_scheme(
        scheme, ranks=[3], equal_to_serial=False, optimizer=lambda: SGD(0.02, momentum=0.5)
    )


def test_what_is_not_among_the_largest_is_sent_later():
    def rank(comm: Any) -> list[float]:
        return losses(SGD(0.2), AllReduce(comm, sums=run("top_k")), epochs=12)

    history, *_ = run_threads(2, rank)
    assert history[-1] < 0.7 * history[0]


def test_the_collective_adds_up():
    star = run("collective")

    def rank(comm: Any) -> list[float]:
        x = np.arange(5.0) + comm.rank
        Scheduled(comm, star).allreduce(x)
        return x.tolist()

    for size in (1, 2, 5):
        check(star, range(size))
        assert run_threads(size, rank) == [[size * (i + (size - 1) / 2) for i in range(5)]] * size


def test_the_schedule_of_a_pipeline_keeps_one_wave_and_trains_as_one_rank():
    waves = run("pipeline_schedule")
    actions = [str(action) for action in pipeline.actions_of(waves, 1, 2, 3)]
    assert actions == [
        *("forward 0", "forward 1", "backward 0", "backward 1"),
        "forward 2",
        "backward 2",
    ]
    done = pipeline.check(waves, 3, 7)
    assert done.in_flight == (3, 3, 3)

    def rank(comm: Any) -> list[float]:
        mesh = Mesh(comm, pipeline=comm.size)
        net = Sequential(Linear(4), Linear(3))
        own = {"mesh": mesh, "pipeline_schedule": waves}
        model = Model(net, (5,), backend="numpy", dtype="float64", **own)
        options = {"micro_batches": 4} if comm.size > 1 else {}
        trainer = Trainer(model, "sgd", mesh=mesh, **options)
        trainer.fit(problem(), epochs=2, global_batch_size=16)
        return trainer.losses

    [alone] = run_threads(1, rank)
    for found in run_threads(2, rank):
        assert found == pytest.approx(alone, rel=1e-12)


def test_the_model_is_built_for_classes_and_a_shape():
    net = run("model")(7, (12, 10, 3))
    assert Model(net, (12, 10, 3), backend="numpy").output_shape == (7,)


def test_the_block_that_is_wired_by_hand_trains():
    block = run("wire")
    net = Sequential(Conv2d(4, 3), block(2, 3, name="dense"), GlobalAvgPool2d(), Linear(2))
    model = Model(net, (6, 6, 1), backend="numpy", dtype="float64", fuse=False)
    names = [layer.name for layer in model.layers if str(layer.name).startswith("dense.")]
    first = ["dense.batchnorm", "dense.relu", "dense.conv2d", "dense.concat"]
    assert names == [*first, *(f"{name}_1" for name in first)]
    assert model.layers["dense.concat_1"].output_shape == (4, 4, 4 + 2 * 3)
    rng = np.random.default_rng(0)
    data = ArrayDataset(rng.normal(size=(32, 6, 6, 1)), np.arange(32) % 2)
    first, *_, last = Trainer(model, SGD(0.3)).fit(data, epochs=8, batch_size=8)
    assert last["loss"] < first["loss"]


def test_the_model_with_two_inputs_and_outputs_trains():
    rng = np.random.default_rng(0)
    names: dict[str, Any] = {"Two": run("several"), "images": rng.normal(size=(24, 6, 6, 2))}
    names |= {"numbers": rng.normal(size=(24, 5)), "kinds": np.arange(24) % 3}
    names |= {"sizes": rng.normal(size=(24, 1)), "ArrayDataset": ArrayDataset, "SGD": SGD}
    exec(BLOCKS["train_several"], names | {"Model": Model, "Trainer": Trainer}, names)
    first, second = names["trainer"].history
    assert second["loss"] < first["loss"]
    values = ("output0.loss", "output0.accuracy", "output1.loss", "output1.mae")
    assert [n for n in first if n.startswith("output")] == [*values]
    assert (names["kind"].shape, names["size"].shape) == ((24, 3), (24, 1))


def test_the_data_set_trains_and_is_normalised_as_it_is_told(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(6):
        np.save(tmp_path / f"{i}.npy", rng.integers(256, size=(8, 8, 3), dtype="uint8"))
    np.save(tmp_path / "labels.npy", np.arange(6) % 2)
    folder = run("dataset")
    train = folder(tmp_path)
    test = folder(tmp_path, like=train)
    model = Model(Sequential(Flatten(), Linear(train.classes)), train.input_shape, backend="numpy")
    (logs,) = Trainer(model, SGD(0.01)).fit(train, test, batch_size=2)
    assert logs["val_loss"] < logs["loss"]
    whole = train.normalize(train.read(np.arange(6))[0])
    np.testing.assert_allclose(whole.mean(axis=(0, 1, 2)), 0, atol=1e-6)
    assert test.statistics is train.statistics


def test_the_loss_has_the_right_gradient():
    loss, backend = run("loss")(), create_backend("numpy")
    y, target = np.array([[0.3, -4.0], [2.5, 0.1]]), np.zeros((2, 2))
    value, dy = loss(backend, y, target, 0.5)
    assert value == pytest.approx(0.3**2 / 2 + 3.5 + 2.0 + 0.1**2 / 2)
    np.testing.assert_allclose(dy, 0.5 * np.array([[0.3, -1.0], [1.0, 0.1]]))


def test_the_loss_keeps_its_promises():
    exec(BLOCKS["check_loss"], {"check_loss": check_loss, "Huber": run("loss")})


def test_the_kernel_replaces_that_of_the_library():
    names = {"np": np, "create_backend": create_backend, "Model": Model}
    names |= {"net": Sequential(Linear(3)), "shape": (5,)}
    exec(BLOCKS["kernel"] + BLOCKS["check_kernel"], names)
    calls = []
    forward = names["backend"].linear.forward
    names["backend"].linear.forward = lambda *a, **o: calls.append(1) or forward(*a, **o)
    logs = Trainer(names["model"], SGD(0.1)).fit(problem(), epochs=3, batch_size=16)
    assert logs[-1]["loss"] < logs[0]["loss"]
    assert len(calls) >= 18  # every step, those that are repeated included


def test_the_function_is_called_after_every_epoch(capsys):
    names = {"Trainer": Trainer, "SGD": SGD}
    names["model"] = Model(Sequential(Linear(3)), (5,), backend="numpy")
    exec(BLOCKS["function_callback"], names)
    names["trainer"].fit(problem(), epochs=2, batch_size=16)
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("epoch")]
    assert [line[:2] for line in lines] == ["1 ", "2 "]


def test_the_callback_ends_training_when_the_loss_is_flat():
    def epochs(lr: float) -> int:
        model = Model(Sequential(Linear(3)), (5,), backend="numpy")
        trainer = Trainer(model, SGD(lr), callbacks=[run("callback")()])
        return len(trainer.fit(problem(), epochs=5, batch_size=16))

    assert epochs(lr=0.1) == 5
    assert epochs(lr=0.0) == 2
