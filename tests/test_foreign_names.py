"""Names that users of other libraries type work, or are answered with ours in one sentence."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pydtnn
from pydtnn import callbacks, data, layers, losses, metrics, optimizers, schedules
from pydtnn.callbacks import Callback
from pydtnn.comm import Communicator, Serial
from pydtnn.data import ArrayDataset, Dataset, Loader
from pydtnn.layers import Conv2d, Layer, Linear, MaxPool2d, ReLU, Sequential
from pydtnn.layers.initializers import get_initializer
from pydtnn.losses import get_loss
from pydtnn.metrics import get_metric
from pydtnn.model import Model
from pydtnn.optimizers import SGD, Optimizer, RMSProp
from pydtnn.parallel.exchange import AllReduce
from pydtnn.schedules import get_schedule
from pydtnn.training.trainer import Trainer
from pydtnn.utils.errors import MissingNameError
from pydtnn.utils.lazy import Named
from pydtnn.utils.names import foreign_names
from tests.each import each
from tests.test_imports import python

NAMES = foreign_names()

X, Y = np.random.default_rng(0).normal(size=(12, 4)), np.arange(12) % 3


class CrossEntropyLoss:
    """That of another library: an object that can be called."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        raise AssertionError("called")


class DataLoader:
    """That of another library."""


class DataFrame:
    """That of another library."""


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the expressions below refer to; they change none of it."""
    model = Model(Sequential(Linear(4), ReLU(), Linear(3)), (4,), backend="numpy")
    dataset = ArrayDataset(X, Y)
    trainer = Trainer(model, SGD(0.1), exchange=AllReduce(Serial()))
    known: dict[str, Any] = {
        **Named("pydtnn.layers", layers.__all__),
        **Named("pydtnn.optimizers", optimizers.__all__),
        **Named("pydtnn.callbacks", callbacks.__all__),
        **Named("pydtnn.data", data.__all__),
    }
    return {
        **{name: value for name, value in known.items() if not name.startswith("_")},
        **{"pydtnn": pydtnn, "layers": layers, "losses": losses, "metrics": metrics},
        **{"optimizers": optimizers, "callbacks": callbacks, "schedules": schedules, "data": data},
        **{"model": model, "trainer": trainer, "dataset": dataset, "optimizer": trainer.optimizer},
        **{
            "layer": model.layers[0],
            "p": model.parameters["linear0.w"],
            "block": Sequential(ReLU()),
        },
        **{"loader": Loader(dataset, global_batch_size=4), "X": X, "Y": Y, "np": np},
        **{"Model": Model, "Trainer": Trainer, "net": lambda: Sequential(Linear(3))},
        **{"get_loss": get_loss, "get_metric": get_metric, "get_initializer": get_initializer},
        **{"get_schedule": get_schedule, "torch": SimpleNamespace(DataLoader=DataLoader)},
        **{"CrossEntropyLoss": CrossEntropyLoss, "pandas": SimpleNamespace(DataFrame=DataFrame)},
        "loss": get_loss("mse"),
    }


WORKS: dict[str, Any] = {
    "pydtnn.Sequential": Sequential,
    "pydtnn.Dense": Linear,
    "pydtnn.CrossEntropyLoss": losses.CategoricalCrossEntropy,
    "pydtnn.save_weights.__module__": "pydtnn.saving.weights",
    "layers.MaxPooling2D": MaxPool2d,
    "len(Sequential([ReLU(), Linear(3)]).parts)": 2,
    "MaxPool2d(2, 2).stride": (2, 2),
    "type(Trainer(Model(net(), (4,)), 'RMSprop').optimizer)": RMSProp,
    "Trainer(Model(net(), (4,)), 'sgd', metrics=['acc']).objective.names": ("loss", "acc"),
    "type(get_loss(losses.MSELoss))": losses.MeanSquaredError,
    "get_initializer('kaiming_normal') == get_initializer('he_normal')": True,
    "str(model.summary()) == repr(model.summary())": True,
    "Model(net(), (4,), dtype=np.float64).dtype.name": "float64",
    "dataset[-1][0].tolist()": X[11].tolist(),
    "model.layers['relu1'] is model.layers[1]": True,
}
"""Names of each kind, and what they give."""

ANSWERED: dict[str, tuple[type[Exception], str]] = {
    "pydtnn.set_seed(0)": (AttributeError, r"seed=0\)"),
    "pydtnn.nn": (AttributeError, "layers are in pydtnn.layers"),
    "layers.BatchNorm2d": (AttributeError, r"use pydtnn.layers.BatchNorm\(\)"),
    "pydtnn.Sequentiall": (AttributeError, "did you mean 'Sequential'"),
    "model.compile()": (AttributeError, r"use Trainer\(model, optimizer, loss="),
    "model.to('cuda')": (AttributeError, "backend='cuda'"),
    "optimizer.zero_grad()": (AttributeError, "not needed: Trainer.fit"),
    "Conv2d(3, 16, 3)": (TypeError, "the size of the input is known"),
    "Linear(in_features=3)": (TypeError, "omit it: the size of the input is known"),
    "Linear(4, activation='relu')": (TypeError, r"add a layer such as ReLU\(\)"),
    "trainer.fit(dataset, validation_data=dataset)": (TypeError, "as `validation`"),
    "Trainer(model, SGD(0.1), epochs=3)": (TypeError, "pass it to Trainer.fit"),
    "layers.Sequental": (AttributeError, "did you mean 'Sequential'"),
    "Linear(784, 10)": (TypeError, r"\(features\), got 2; omit it: the size of the input"),
    "Conv2d(16, 3, stirde=2)": (TypeError, "did you mean 'stride'"),
    "Reshape(7, 7, 64)": (TypeError, r"at most 1 argument without a name \(shape\), got 3"),
    "Adam(iter([p]))": (TypeError, "the trainer passes the model's"),
    "Model(inputs=1, outputs=2)": (TypeError, r"use Model\(net, input_shape\)"),
    "Model([ReLU()], (4,))": (TypeError, "Sequential"),
    "Model(net(), (4,), dtype='fp16')": (ValueError, "use 'float16'"),
    "Trainer(model, SGD(0.1), 'mse')": (TypeError, "loss='mse'"),
    "Trainer(model, SGD)": (TypeError, r"make one: SGD\(\.\.\.\)"),
    "Trainer(model, 'adadelta')": (ValueError, "docs/extending.md"),
    "Trainer(model, SGD(0.1), loss=CrossEntropyLoss())": (TypeError, "use 'cross_entropy'"),
    "Trainer(model, SGD(0.1), metrics='accuracy')": (TypeError, r"\['accuracy'\]"),
    "model.parameters()": (TypeError, r"model.parameters.values\(\)"),
    "model.parameters['linear0.v']": (KeyError, "did you mean 'linear0.w'"),
    "model(X)": (TypeError, r"model.predict\(x\)"),
    "trainer.logs['loss']": (KeyError, "before the first step"),
    "trainer.fit(X, Y)": (TypeError, r"ndarray; use ArrayDataset\(x, y\)"),
    "trainer.fit([(X[0], 0)])": (TypeError, "list; use ArrayDataset.*Dataset with read"),
    "trainer.fit(torch.DataLoader())": (TypeError, "DataLoader; use ArrayDataset.*with read"),
    "trainer.fit(pandas.DataFrame())": (TypeError, "DataFrame; use ArrayDataset.*of a frame"),
    "trainer.fit(loader)": (TypeError, "Loader; use ArrayDataset.*Dataset with read"),
    "dataset[:3]": (TypeError, r"dataset.subset\(indices\)"),
    "dataset[12]": (IndexError, r"in 0\.\.11, got 12"),
    "model.load('x')": (TypeError, r"pydtnn.load\(path\)"),
    "pydtnn.models.ResNet50": (AttributeError, "did you mean 'resnet50'"),
    "np.asarray(dataset)": (TypeError, "dataset.read"),
}
"""Refusals of each kind."""


@each("expression", WORKS)
def test_a_name_with_our_meaning_works(expression, names):
    assert eval(expression, {**names}) == WORKS[expression]


@each("expression", ANSWERED)
def test_another_name_is_answered_in_one_sentence(expression, names):
    error, words = ANSWERED[expression]
    with pytest.raises(error, match=words) as caught:
        eval(expression, {**names})
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert len(sentence) < 300
    assert not sentence.endswith(".")


ASSIGNMENTS = {
    "optimizer.learning_rate = 0.1": "optimizer.lr = value",
    "model.trainable = False": "model.freeze",
    "dataset.transform = abs": "augment=",
}


@each("statement", ASSIGNMENTS)
def test_an_attribute_without_effect_cannot_be_set(statement, names):
    with pytest.raises(AttributeError, match=f"cannot set .*{ASSIGNMENTS[statement]}"):
        exec(statement, {**names})


def test_imports_under_other_names_work():
    imported: dict[str, Any] = {}
    exec("from pydtnn import SGD\nfrom pydtnn.layers import Conv2D as C, Dense", imported)
    assert (imported["SGD"], imported["C"], imported["Dense"]) == (SGD, Conv2d, Linear)


# -- methods of callbacks


METHODS = {
    "on_batch_end": (lambda self, trainer: None, r"never called; use on_step_end\(trainer\)"),
    "on_epoch_ends": (lambda self, trainer: None, "did you mean 'on_epoch_end'"),
    "on_epoch_end": (lambda self, epoch, logs=None: None, r"must take \(self, trainer\), got \(se"),
}


@each("name", METHODS)
def test_a_method_that_is_never_called_is_refused(name):
    function, words = METHODS[name]
    function.__name__ = name
    model = Model(Linear(3), (4,), backend="numpy")
    with pytest.raises(TypeError, match=f"^Mine: .*{words}"):
        Trainer(model, SGD(0.1), callbacks=[type("Mine", (Callback,), {name: function})()])


def test_a_callback_may_have_methods_that_it_calls_itself():
    class Reports(Callback):
        seen: float = 0

        def on_step_end(self, trainer: Any, *, factor: float = 2.0) -> None:
            self.on_loss(factor * trainer.logs["loss"])

        def on_loss(self, value: float) -> None:
            self.seen = value

    reports, model = Reports(), Model(Linear(3), (4,), backend="numpy")
    (logs,) = Trainer(model, SGD(0.1), callbacks=[reports]).fit(ArrayDataset(X, Y), batch_size=6)
    assert reports.seen == 2 * logs["loss"]


# -- logs


def test_a_missing_value_of_the_logs_says_what_there_is():
    sentences = []

    class Look(Callback):
        def on_epoch_end(self, trainer: Any) -> None:
            for name in ("val_accuracy", "acuracy"):
                with pytest.raises(MissingNameError) as caught:
                    trainer.logs[name]
                sentences.append(str(caught.value))
            assert trainer.logs.get("val_accuracy") is None
            assert "val_loss" not in trainer.logs

    model = Model(Linear(3), (4,), backend="numpy")
    trainer = Trainer(model, SGD(0.1), callbacks=[Look()])
    (logs,) = trainer.fit(ArrayDataset(X, Y), batch_size=6)
    assert "pass a validation set to Trainer.fit" in sentences[0]
    assert "did you mean 'accuracy'?" in sentences[1]
    assert repr({**logs}) == repr(logs)
    for same in (copy.deepcopy(logs), pickle.loads(pickle.dumps(logs))):
        with pytest.raises(KeyError):
            same["val_loss"]


def test_the_history_gives_the_values_of_all_epochs():
    trainer = Trainer(Model(Linear(3), (4,), backend="numpy"), "sgd")
    history = trainer.fit(ArrayDataset(X, Y), epochs=3, batch_size=6)
    assert history["loss"] == [logs["loss"] for logs in trainer.history]
    assert history.history["accuracy"] == history["accuracy"]  # as Keras
    assert [*history[1:]] == [*history][1:]
    with pytest.raises(KeyError, match="pass a validation set to Trainer.fit"):
        history["val_loss"]


# -- what is valid, but probably not meant


def test_an_image_whose_channels_come_first_is_warned_of_and_others_are_not():
    for shape, last in (((3, 32, 32), "32, 32, 3"), ((1, 28, 28), "28, 28, 1")):
        with pytest.warns(UserWarning, match=rf"use \({last}\), and ArrayDataset\(x, y,"):
            Model(Sequential(Conv2d(4, 1), ReLU()), shape, backend="numpy")
    for shape in ((32, 32, 3), (3, 32, 8), (1, 64, 3), (3, 5, 5)):
        Model(Sequential(Conv2d(4, 1), ReLU()), shape, backend="numpy")


@each(
    ("last", "loss"), [(layers.Softmax, "cross_entropy"), (layers.Sigmoid, "binary_cross_entropy")]
)
def test_probabilities_for_a_loss_of_logits_are_warned_of(last, loss):
    model = Model(Sequential(Linear(3), last()), (4,), backend="numpy")
    with pytest.warns(UserWarning, match=f"the model ends with {last.__name__}, .* takes logits"):
        Trainer(model, "sgd", loss=loss)
    Trainer(model, "sgd", loss="mse", metrics=["mse"])


# -- the mechanism


class Custom(Layer):
    """A user's layer: its attributes and arguments are its own."""

    def __init__(self, width: int, *, units: int = 1) -> None:
        super().__init__()
        self.width, self.units = width, units

    @property
    def broken(self) -> int:
        return self.missing_part  # type: ignore[attr-defined,no-any-return]

    def forward(self, *xs: Any, context: Any) -> Any:
        return xs[0], None

    def backward(self, dy: Any, saved: Any) -> Any:
        return dy


def test_attributes_that_are_missing_stay_missing():
    layer = Custom(3, units=2)
    assert not hasattr(layer, "weight")
    assert getattr(layer, "weight", 7) == 7
    assert not hasattr(layer, "_private")
    with pytest.raises(AttributeError, match="no attribute 'missing_part'"):
        layer.broken  # noqa: B018
    for same in (copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert (same.width, same.units) == (3, 2)


def test_arguments_of_ones_own_classes_are_checked_by_their_own_signature():
    assert Custom(3, units=4).units == 4
    with pytest.raises(TypeError, match=r"^Custom: expected at most 1 argument without a name \("):
        Custom(3, 4)  # type: ignore[misc]
    with pytest.raises(TypeError, match="unknown argument of Custom 'unit'; did you mean 'units'?"):
        Custom(3, unit=4)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'width'"):
        Custom()  # type: ignore[call-arg]
    assert str(inspect.signature(Custom)) == "(width: 'int', *, units: 'int' = 1) -> 'None'"


def test_options_that_are_passed_on_are_not_checked():
    class Passes(Optimizer):
        def __init__(self, lr: Any = 0.1, **options: Any) -> None:
            super().__init__(lr, clip_norm=options.pop("max_norm", None), **options)

        def update(self, w: Any, g: Any, *, lr: Any, decay: Any, step: Any) -> None:  # type: ignore[override]
            w -= lr * g

    assert Passes(max_norm=2.0).clip_norm == 2.0


def test_an_import_and_a_training_read_no_table():
    code = """
import sys, numpy, pydtnn
print([m for m in sys.modules if m.startswith("pydtnn.")])
from pydtnn import ArrayDataset, Model, Trainer, layers
model = Model(layers.Sequential(layers.Linear(3), layers.ReLU()), (4,))
pairs = ArrayDataset(numpy.zeros((12, 4)), numpy.arange(12) % 3)
Trainer(model, "sgd", progress=False).fit(pairs, pairs, epochs=2)
from pydtnn.utils.names import foreign_names
print(foreign_names.cache_info().currsize)
"""
    loaded = ["pydtnn.utils", "pydtnn.utils.version", "pydtnn.utils.moved"]
    assert python(code).splitlines() == [str(loaded), "0"]


# -- the tables


ROOT = Path(__file__).parent.parent
OBJECTS = {"model": Model, "trainer": Trainer, "optimizer": Optimizer, "dataset": Dataset}
OBJECTS |= {"layer": Layer, "loader": Loader, "Layer": Layer, "Trainer": Trainer, "Model": Model}
OBJECTS |= {"Callback": Callback, "comm": Communicator}


@cache
def exists(path: str) -> bool:
    """Whether a dotted name of this library exists; attributes may be set by ``__init__``."""
    first, *rest = path.split(".")
    if first in OBJECTS:
        kind, name = OBJECTS[first], rest[0]
        own = inspect.getsource(kind)
        return hasattr(kind, name) or f"self.{name}" in own or f"    {name} :" in own
    value: Any = pydtnn
    for name in rest:
        if inspect.ismodule(value) and (ROOT / value.__name__.replace(".", "/")).is_dir():
            __import__(f"{value.__name__}.{name}") if name in modules(value) else None
        value = getattr(value, name, None)
    return value is not None


def modules(package: Any) -> set[str]:
    return {path.stem for path in Path(package.__file__).parent.iterdir() if path.stem[0] != "_"}


@pytest.mark.tools
def test_every_name_in_an_answer_exists(names):
    wrong = [
        f"{name}: {said}"
        for name, answer in {**NAMES["names"], **NAMES["values"]}.items()
        for said in unknown(answer, names)
    ]
    assert not wrong


def unknown(answer: str, names: dict[str, Any]) -> Iterator[str]:
    """Yield what an answer mentions that this library does not have."""
    for path in re.findall(rf"\b(?:pydtnn|{'|'.join(OBJECTS)})(?:\.[a-zA-Z_]\w*)+", answer):
        if not exists(path):
            yield path
    for document in re.findall(r"docs/\w+\.md", answer):
        if not (ROOT / document).exists():
            yield document
    for kind in re.findall(r"(?<![.\w])([A-Z]\w+)\(", answer):
        if not isinstance(names.get(kind) or getattr(pydtnn, kind, None), type):
            yield kind
    for said in re.findall(r"\buse (\w+)=", answer):
        if said not in parameters():
            yield f"{said}="


@cache
def parameters() -> set[str]:
    """The arguments of all layers and of the method that trains."""
    kinds = [
        Trainer.fit,
        *(v for v in Named("pydtnn.layers", layers.__all__).values() if isinstance(v, type)),
    ]
    return {name for one in kinds for name in inspect.signature(one).parameters}


@pytest.mark.tools
def test_every_alias_is_a_name_of_its_module():
    for name, ours in NAMES["aliases"].items():
        home, _, own = ours.rpartition(".")
        if home:
            value = getattr(__import__(home, fromlist=[own]), own)
            asked = name if value.__name__.islower() else name.capitalize()
            assert getattr(pydtnn, asked) is value


def test_a_class_in_another_case_is_that_class_and_has_one_home():
    homes: dict[str, str] = {}
    for home in (layers, losses, metrics, optimizers, schedules, callbacks, data):
        public = getattr(home, "__all__", None) or [n for n in vars(home) if n[0] != "_"]
        for name in public:
            value = getattr(home, name)
            own = hasattr(home, "__all__") or getattr(value, "__module__", "") == home.__name__
            if isinstance(value, type) and own:
                assert name.lower() not in {one.lower() for one in homes}
                homes[name] = home.__name__
                assert getattr(pydtnn, name) is value
                assert getattr(home, name[:-1] + name[-1].swapcase()) is value
    assert len(homes) > 100
    assert not {*map(str.lower, homes)} & {*NAMES["aliases"]}


def test_the_table_is_small():
    """Each name is one that beginners type first; others are answered with the nearest name."""
    assert sum(len(NAMES[table]) for table in ("names", "values", "options")) < 140
