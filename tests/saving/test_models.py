"""A model that is loaded in another process computes what the saved one does."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn import ArrayDataset, Model
from pydtnn.data.inputs import inputs_of
from pydtnn.layers import (
    Linear,
    LinearBiases,
    MultiHeadAttention,
    RelativePositions,
    Sequential,
)
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


@each("positions", [LinearBiases(), RelativePositions(6, 5, initializer="glorot_uniform")])
def test_attention_with_biases_is_loaded(positions, tmp_path):
    model = Model(MultiHeadAttention(2, window=3, positions=positions), (6, 8))
    save_model(model, tmp_path / "net.pydtnn")
    x = np.random.default_rng(0).normal(size=(2, 6, 8))
    again = load(tmp_path / "net.pydtnn")
    np.testing.assert_array_equal(again.predict(x), model.predict(x))
    assert repr(again.layers["attention"].positions) == repr(positions)


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


def test_another_process_predicts_the_same_bytes_without_code_and_training_set(tmp_path):
    for name, model in (("residual", known(residual())), ("two", known(two()))):
        save_model(model, tmp_path / f"{name}.pydtnn")
        x = tuple(pixels(7, *shape, seed=1) for shape in model.input_shapes)
        y = model.predict(x if len(x) > 1 else x[0])
        outputs = y if isinstance(y, tuple) else (y,)
        arrays = {f"x{k}": part for k, part in enumerate(x)}
        arrays |= {f"y{k}": part for k, part in enumerate(outputs)}
        np.savez(tmp_path / f"{name}.npz", **arrays)
    subprocess.run([sys.executable, "-c", ELSEWHERE], cwd=tmp_path, check=True)


@each(
    ("make", "dtype"),
    [
        (residual, "float64"),
        (residual, "bfloat16"),
        (partial(residual, fuse=False), "float32"),
        (two, "float16"),
        (two, "float32"),
    ],
)
def test_models_of_all_types_come_back_bit_for_bit(make, dtype, tmp_path):
    """With their classes and statistics; what is loaded can be saved again."""
    model = known(make(dtype), class_names=["cat", "dog", "hen"])
    save_model(model, tmp_path / "m")
    loaded = load(tmp_path / "m")
    assert loaded.dtype == model.dtype
    assert [type(layer) for layer in loaded.layers] == [type(layer) for layer in model.layers]
    texts = [repr(one).replace(", name='head'", "").split() for one in (loaded, model)]
    texts[1] = " ".join(texts[1]).replace(", initializer=zeros_like", "").split()
    assert texts[0] == texts[1] or make is two
    assert loaded.state().keys() == model.state().keys()
    x = tuple(pixels(3, *shape) for shape in model.input_shapes)
    x = x if len(x) > 1 else x[0]
    np.testing.assert_equal(loaded.predict(x), model.predict(x))
    assert loaded.inputs is not None
    assert loaded.inputs.class_names == ("cat", "dog", "hen")
    save_model(loaded, tmp_path / "again")
    for name in ("model.json", "weights.safetensors") if make is two else ():
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "m" / name).read_bytes()


def test_a_model_is_loaded_for_another_backend_and_type(tmp_path):
    model = known(residual())
    save_model(model, tmp_path / "m")
    other = load(tmp_path / "m", backend="numpy", dtype="float64")
    assert (other.backend.name, other.dtype) == ("numpy", np.float64)
    x = pixels(3, 6, 6, 1)
    np.testing.assert_allclose(other.predict(x), model.predict(x), rtol=1e-3, atol=1e-5)
    with pytest.raises(ValueError, match=r"^load: .*: dtype must be one of float32, .*, got int8$"):
        load(tmp_path / "m", dtype="int8")


def test_a_custom_layer_is_passed_with_its_options(tmp_path):
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


def test_a_custom_layer_that_is_not_passed_is_not_imported(tmp_path):
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


def test_a_layer_of_a_script_is_stored_with_the_path_of_the_script(tmp_path):
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


@each(("value", "given"), [(np.zeros(3), "ndarray"), (print, "builtin_f"), ({1: 2}, "dict")])
def test_an_option_that_cannot_be_saved_is_told_with_its_layer(value, given, tmp_path):
    model = Model(Sequential(Linear(2), Scale(1.0, key=[value])), (4,), backend="numpy")
    message = rf"^layer scale1: option more must be a number, text, .*, got {given}.*; "
    with pytest.raises(ValueError, match=message):
        save_model(model, tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_an_initializer_of_any_kind_is_not_saved(tmp_path):
    net = Linear(2, initializer=lambda shape, fan_in, fan_out, rng: np.full(shape, 0.5))
    model = Model(net, (4,), backend="numpy")
    save_model(model, tmp_path / "m")
    options = json.loads((tmp_path / "m" / "model.json").read_text())["layers"][0]["options"]
    assert "initializer" not in options
    np.testing.assert_array_equal(load(tmp_path / "m").state()["linear.w"], 0.5)
