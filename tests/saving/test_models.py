"""A model that is loaded in another process computes what the saved one does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pydtnn
from pydtnn.data import ArrayDataset
from pydtnn.data.inputs import inputs_of
from pydtnn.layers import Layer, Linear, Sequential
from pydtnn.model import Model
from pydtnn.saving import load, save_model
from tests.each import each
from tests.saving.networks import Scale, residual, scaled, two


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def known(model: Model, **options: Any) -> Model:
    """A model that knows its inputs, as if it had been trained."""
    x = tuple(pixels(9, *shape) for shape in model.input_shapes)
    model.inputs = inputs_of(ArrayDataset(x if len(x) > 1 else x[0], np.arange(9) % 3, **options))
    return model


ELSEWHERE = """
import sys, numpy as np, pydtnn
for name in ("residual", "two"):
    model = pydtnn.load(f"{name}.pydtnn")
    data = np.load(f"{name}.npz")
    x = tuple(data[key] for key in sorted(data) if key.startswith("x"))
    outputs = model.predict(x if len(x) > 1 else x[0])
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    for k, y in enumerate(outputs):
        assert y.tobytes() == data[f"y{k}"].tobytes(), (y, data[f"y{k}"])
    assert repr(model).startswith("Model: input")
assert "tests" not in sys.modules
"""


def test_another_process_predicts_the_same_bytes_without_code_and_training_set(
    tmp_path: Path,
) -> None:
    for name, model in (("residual", known(residual())), ("two", known(two()))):
        save_model(model, tmp_path / f"{name}.pydtnn")
        x = tuple(pixels(7, *shape, seed=1) for shape in model.input_shapes)
        y = model.predict(x if len(x) > 1 else x[0])
        outputs = y if isinstance(y, tuple) else (y,)
        arrays = {f"x{k}": part for k, part in enumerate(x)}
        arrays |= {f"y{k}": part for k, part in enumerate(outputs)}
        np.savez(tmp_path / f"{name}.npz", **arrays)
    subprocess.run([sys.executable, "-c", ELSEWHERE], cwd=tmp_path, check=True)


@each("dtype", ["float64", "float32", "float16", "bfloat16"])
@each("make", [residual, two])
def test_models_of_all_types_come_back_bit_for_bit(make: Any, dtype: str, tmp_path: Path) -> None:
    model = known(make(dtype))
    save_model(model, tmp_path / "m.pydtnn")
    loaded = load(tmp_path / "m.pydtnn")
    assert loaded.dtype == model.dtype
    assert (
        repr(loaded).replace(", name='head'", "").split()
        == (
            repr(model).replace(", name='head'", "").replace(", initializer=zeros_like", "")
        ).split()
        or make is two
    )
    assert loaded.state().keys() == model.state().keys()
    x = tuple(pixels(3, *shape) for shape in model.input_shapes)
    x = x if len(x) > 1 else x[0]
    np.testing.assert_equal(loaded.predict(x), model.predict(x))


def test_a_model_that_is_not_fused_is_not_fused_when_loaded(tmp_path: Path) -> None:
    model = residual(fuse=False)
    save_model(model, tmp_path / "m")
    assert [type(layer) for layer in load(tmp_path / "m").layers] == [
        type(layer) for layer in model.layers
    ]


def test_a_model_is_loaded_for_another_backend_and_type(tmp_path: Path) -> None:
    model = known(residual())
    save_model(model, tmp_path / "m")
    other = load(tmp_path / "m", backend="numpy", dtype="float64")
    assert (other.backend.name, other.dtype) == ("numpy", np.float64)
    x = pixels(3, 6, 6, 1)
    np.testing.assert_allclose(other.predict(x), model.predict(x), rtol=1e-3, atol=1e-5)
    with pytest.raises(ValueError, match=r"^load: .*: dtype must be one of float32, .*, got int8$"):
        load(tmp_path / "m", dtype="int8")


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_model(known(residual()), tmp_path / name)
    for file in ("model.json", "weights.safetensors", "SHA256SUMS"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_loaded_model_can_be_saved_again_with_the_same_bytes(tmp_path: Path) -> None:
    save_model(known(two()), tmp_path / "a")
    save_model(load(tmp_path / "a"), tmp_path / "b")
    for file in ("model.json", "weights.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_normalisation_and_names_of_classes_come_back_exactly(tmp_path: Path) -> None:
    model = known(residual(), class_names=["cat", "dog", "hen"])
    save_model(model, tmp_path / "m")
    ours, loaded = model.inputs, load(tmp_path / "m").inputs
    assert ours is not None
    assert loaded is not None
    assert loaded.class_names == ("cat", "dog", "hen")
    for mine, theirs in zip(ours.parts, loaded.parts, strict=True):
        assert (mine.shape, mine.dtype, mine.range) == (theirs.shape, theirs.dtype, theirs.range)
        assert mine.statistics is not None
        assert theirs.statistics is not None
        np.testing.assert_array_equal(mine.statistics.mean, theirs.statistics.mean)
        np.testing.assert_array_equal(mine.statistics.std, theirs.statistics.std)


def test_a_custom_layer_is_passed_with_its_options(tmp_path: Path) -> None:
    model = scaled()
    save_model(model, tmp_path / "m")
    loaded = load(tmp_path / "m", backend="numpy", custom={"Scale": Scale})
    scale = loaded.layers[0]
    assert isinstance(scale, Scale)
    assert scale.rest == (3, 0.25)
    assert scale.more == {"list": [1, 2.5, None], "pair": (True, "a"), "infinite": float("inf")}
    assert repr(scale.gate) == "Linear(2, bias=False)"
    x = np.random.default_rng(0).normal(size=(3, 4))
    np.testing.assert_array_equal(loaded.predict(x), model.predict(x))
    full = f"{Scale.__module__}:Scale"
    assert load(tmp_path / "m", custom={full: Scale}).layers[0].name == scale.name


def test_a_custom_layer_that_is_not_passed_is_not_imported(tmp_path: Path) -> None:
    save_model(scaled(), tmp_path / "m")
    with pytest.raises(
        ValueError,
        match=r"^load: .*/m: layer scale0: Scale is not a layer of the library but "
        r"tests\.saving\.networks:Scale, .*pass custom=\{'Scale': Scale\}$",
    ):
        load(tmp_path / "m")
    with pytest.raises(TypeError, match=r"custom\['Scale'\] must be a class of layers, got 3"):
        load(tmp_path / "m", custom={"Scale": 3})  # type: ignore[dict-item]
    code = f"import sys, pydtnn\ntry: pydtnn.load({str(tmp_path / 'm')!r})\nexcept ValueError: pass"
    code += "\nassert not [name for name in sys.modules if name.startswith('tests')]"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_a_layer_of_a_script_is_stored_with_the_path_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from pydtnn.layers import Identity\n"
        "from pydtnn import Model\n"
        "from pydtnn.saving import save_model\n"
        "class Own(Identity):\n    pass\n"
        "save_model(Model(Own(), (3,)), 'own.pydtnn')\n"
    )
    subprocess.run([sys.executable, script.name], check=True, cwd=tmp_path)
    with pytest.raises(ValueError, match=r"Own is not a layer of the library but train\.py:Own"):
        load(tmp_path / "own.pydtnn")


@each(
    ("value", "given"),
    [(np.zeros(3), "ndarray"), (print, "builtin_function_or_method"), ({1: 2}, "dict")],
)
def test_an_option_that_cannot_be_saved_is_told_with_its_layer(
    value: object, given: str, tmp_path: Path
) -> None:
    model = Model(Sequential(Linear(2), Scale(1.0, key=[value])), (4,), backend="numpy")
    message = rf"^layer scale1: option more must be a number, text, .*, got {given}; "
    with pytest.raises(ValueError, match=message):
        save_model(model, tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_an_initializer_of_any_kind_is_not_saved(tmp_path: Path) -> None:
    net = Linear(2, initializer=lambda shape, fan_in, fan_out, rng: np.full(shape, 0.5))
    model = Model(net, (4,), backend="numpy")
    save_model(model, tmp_path / "m")
    options = json.loads((tmp_path / "m" / "model.json").read_text())["layers"][0]["options"]
    assert "initializer" not in options
    np.testing.assert_array_equal(load(tmp_path / "m").state()["linear.w"], 0.5)


def test_the_models_of_the_library_come_back(tmp_path: Path) -> None:
    for name, shape in (("mlp", (8, 8, 1)), ("resnet20", (16, 16, 3))):
        model = Model(pydtnn.models.create_net(name, 4, shape), shape, dtype="float32")
        save_model(model, tmp_path / name)
        x = np.random.default_rng(0).normal(size=(2, *shape))
        np.testing.assert_array_equal(load(tmp_path / name).predict(x), model.predict(x))


def test_a_loaded_model_can_be_trained_further(tmp_path: Path) -> None:
    save_model(known(residual()), tmp_path / "m")
    model = load(tmp_path / "m")
    before = model.state()["head.w"].copy()
    data = ArrayDataset(pixels(8, 6, 6, 1), np.arange(8) % 3)
    trainer = pydtnn.Trainer(model, pydtnn.optimizers.SGD(lr=0.1))
    assert np.isfinite(trainer.fit(data, batch_size=4)[0]["loss"])
    assert (model.state()["head.w"] != before).any()


def test_every_layer_of_the_library_has_a_name_that_loads_it() -> None:
    from pydtnn.saving.network import class_of, library, name_of

    for name, kind in library().items():
        assert name_of(kind) == name
        assert class_of(name, "layer", {}) is kind
    assert issubclass(library()["Conv2d"], Layer)
