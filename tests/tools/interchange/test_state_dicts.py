"""State dicts without PyTorch: layouts, matching, and arrays that do not fit."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pydtnn import layers, models
from pydtnn.model import Model
from pydtnn.models import create_net
from pydtnn.saving import load, save_model
from pydtnn.saving.weights import decode, encode, load_weights
from pydtnn.tools.interchange import load_state_dict, save_state_dict, state_dict
from pydtnn.tools.interchange.__main__ import main
from tests.each import each

SHAPE = (8, 9, 3)
Arrays = dict[str, np.ndarray]


def model(seed: int = 0, name: str = "cnn", classes: int = 5) -> Model:
    made = Model(create_net(name, classes, SHAPE), SHAPE, seed=seed)
    made.statistics.running[:] = np.float32(1 + seed / 7)
    return made


def assert_equal(found: Arrays, expected: Arrays) -> None:
    assert set(found) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def renumbered(arrays: Arrays) -> Arrays:
    """The arrays as of one `nn.Sequential`, whose names are numbers."""
    parts = [*dict.fromkeys(name.rpartition(".")[0] for name in arrays)]
    return {
        f"{parts.index(name.rpartition('.')[0])}.{name.rpartition('.')[2]}": array
        for name, array in arrays.items()
    }


@each("name", ["cnn", "resnet20", "mlp"])
@each(("by", "change"), [("names", lambda arrays: arrays), ("order", renumbered)])
def test_arrays_come_back_bit_for_bit(name, by, change):
    ours, other = model(0, name), model(1, name)
    report = load_state_dict(other, change(state_dict(ours)))
    assert encode(other.state()) == encode(ours.state())
    count = len(ours.state())
    assert str(report) == f"matched {count} of {count} arrays by {by}"


def test_layers_of_each_kind_are_matched_in_their_own_order():
    def made(seed: int) -> Model:
        net = layers.Sequential(
            layers.Conv2d(4, 1), layers.GroupNorm(2), layers.Conv2d(4, 1), layers.GroupNorm(2)
        )
        return Model(net, (2, 2, 4), seed=seed)

    ours, other = made(0), made(1)
    rng = np.random.default_rng(2)
    other.load({name: rng.normal(size=a.shape).astype("f4") for name, a in other.state().items()})
    entries = state_dict(other).items()
    convs, norms = ([e for e in entries if kind in e[0]] for kind in ("conv2d", "groupnorm"))
    assert load_state_dict(ours, renumbered(dict([*convs, *norms]))).by == "order"
    assert encode(ours.state()) == encode(other.state())


def test_names_and_layouts_are_those_of_pytorch():
    net = layers.Sequential(
        layers.Conv2d(4, (2, 1), name="conv"),
        layers.BatchNorm(name="bn"),
        layers.Flatten(),
        layers.Linear(5),
    )
    ours = Model(net, (3, 2, 2))
    arrays, state = state_dict(ours), ours.state()
    counters = [f"running_{what}" for what in ("mean", "var")] + ["num_batches_tracked"]
    assert [*arrays] == [
        f"{layer}.{what}"
        for layer, more in (("conv", []), ("bn", counters), ("linear3", []))
        for what in ("weight", "bias", *more)
    ]
    assert arrays["conv.weight"][1, 0, 1, 0] == state["conv.w"][1, 1, 0, 0]
    # Row 1, column 0, channel 2 of a map that is (4, 2, 2) there and (2, 2, 4) here.
    there, here = (2 * 2 + 1) * 2, (1 * 2 + 0) * 4 + 2
    assert arrays["linear3.weight"][3, there] == state["linear3.w"][3, here]
    assert arrays["bn.num_batches_tracked"].dtype == np.int64


def test_other_classes_and_a_smaller_stem_are_named_with_what_to_do(tmp_path):
    arrays = state_dict(model(1)) | {"fc2.weight": np.zeros((6, 128)), "fc2.bias": np.zeros(6)}
    with pytest.raises(ValueError, match=r"\(5, 128\), .*; strict=False, --partial or"):
        load_state_dict(model(), arrays)
    arrays = state_dict(model(1)) | {"conv1.weight": np.zeros((32, 3, 7, 7))}
    with pytest.raises(ValueError, match="depend on the size of images: use at least 64 x 64"):
        load_state_dict(model(), arrays)
    own = model(1).state() | {"conv1.w": np.zeros((32, 7, 7, 3), "float32")}
    (tmp_path / "net.safetensors").write_bytes(encode(own))
    with pytest.raises(ValueError, match="depend on the size of images: use at least 64 x 64"):
        load_weights(model(), tmp_path / "net.safetensors")


DAMAGES: dict[str, tuple[Callable[[Arrays], Any], str]] = {
    "missing": (
        lambda a: a.pop("fc2.bias"),
        "arrays do not fit the model (matched by names): fc2.b is missing",
    ),
    "extra": (lambda a: a.update({"aux.weight": np.zeros(3)}), "aux.weight is extra"),
    "transposed": (
        lambda a: a.update({"fc1.weight": a["fc1.weight"].T}),
        "fc1.weight has shape (256, 128) instead of (128, 256), as if transposed",
    ),
    "not finite": (lambda a: a["fc2.bias"].fill(np.nan), "fc2.b must be finite, got nan"),
}


@each(("damage", "suffix"), [*((name, "") for name in DAMAGES), ("extra", ".safetensors")])
def test_arrays_that_do_not_fit_are_refused_in_a_sentence_and_the_model_stays(
    damage, suffix, tmp_path
):
    change, message = DAMAGES[damage]
    arrays, ours = {name: array.copy() for name, array in state_dict(model(1)).items()}, model()
    change(arrays)
    source: Any = arrays
    if suffix:
        source = tmp_path / f"net{suffix}"
        source.write_bytes(encode(arrays))
    before = encode(ours.state())
    with pytest.raises(ValueError, match="^load_state_dict: .*" + re.escape(message)):
        load_state_dict(ours, source)
    assert encode(ours.state()) == before


def test_a_new_head_keeps_its_weights_and_the_table_lists_what_does_not_fit():
    ours, other = model(0, "resnet8", classes=5), model(1, "resnet8", classes=7)
    arrays = renumbered(state_dict(other))
    del arrays["1.bias"]
    report = load_state_dict(ours, arrays, strict=False)
    lines = str(report).splitlines()
    assert lines[0] == "matched 44 of 47 arrays by order"
    assert [line.split()[:3] for line in lines[1:]] == [
        ["problem", "array", "here"],
        ["missing", "stem.bn.beta", "-"],
        ["wrong", "shape", "head.fc.w"],
        ["wrong", "shape", "head.fc.b"],
    ]
    assert "(5, 64)" in lines[3]
    assert "(7, 64)" in lines[3]
    initial = model(0, "resnet8").state()
    np.testing.assert_array_equal(ours.state()["head.fc.w"], initial["head.fc.w"])
    np.testing.assert_array_equal(ours.state()["stem.conv.w"], other.state()["stem.conv.w"])


def test_layers_of_another_branch_are_extra_and_the_others_are_matched():
    """Auxiliary classifiers lie between the stages of a network."""
    ours, other = model(0, "resnet20"), model(1, "resnet20")
    arrays = renumbered(state_dict(other))
    entries = [*arrays.items()]
    entries[60:60] = [("aux.weight", np.zeros((7, 16, 1, 1))), ("aux.bias", np.zeros(7))]
    with pytest.raises(ValueError, match=r"by order\): aux.weight is extra, aux.bias is extra"):
        load_state_dict(ours, dict(entries))
    report = load_state_dict(ours, dict(entries), strict=False)
    assert [misfit.theirs for misfit in report.misfits] == ["aux.weight", "aux.bias"]
    assert encode(ours.state()) == encode(other.state())


def test_names_behind_a_prefix_are_found_and_exact_ones_come_first():
    ours, other = model(0), model(1)
    arrays = {f"backbone.{name}": array for name, array in state_dict(other).items()}
    for options in ({}, {"rename": {"backbone": "", "teacher": None}}):
        ours.load(model(0).state())
        assert load_state_dict(ours, arrays, **options).by == "names"
        assert encode(ours.state()) == encode(other.state())
        arrays["teacher.weight"] = np.zeros(3)
    inner = Model(layers.Sequential(create_net("cnn", 5, SHAPE), name="body"), SHAPE)
    assert load_state_dict(inner, state_dict(other)).by == "names"
    arrays = {**state_dict(model(2)), **{f"ema.{name}": a for name, a in state_dict(other).items()}}
    report = load_state_dict(ours, arrays, strict=False)
    assert report.by == "names"
    assert all(misfit.theirs.startswith("ema.") for misfit in report.misfits)
    assert encode(ours.state()) == encode(model(2).state())


def test_two_prefixes_are_ambiguous():
    ours, arrays = model(0), {}
    for prefix, seed in (("student", 1), ("teacher", 2)):
        arrays |= {f"{prefix}.{name}": a for name, a in state_dict(model(seed)).items()}
    before = encode(ours.state())
    message = r"which begin with 'student.' and 'teacher.'; omit those of one of them by rename={'t"
    with pytest.raises(ValueError, match=message):
        load_state_dict(ours, arrays, strict=False)
    assert encode(ours.state()) == before
    load_state_dict(ours, arrays, rename={"teacher": None})
    assert encode(ours.state()) == encode(model(1).state())


def test_layers_that_could_be_several_are_listed_and_not_loaded():
    """An array of the same shape lies between those of the model."""

    def chain(seed: int) -> Model:
        sizes = {"in": 3, "a": 3, "b": 3, "out": 2}
        parts = [layers.Linear(size, name=name) for name, size in sizes.items()]
        return Model(layers.Sequential(*parts), (4,), seed=seed)

    ours, other = chain(0), chain(1)
    before = {name: array.copy() for name, array in ours.state().items()}
    entries = [*renumbered(state_dict(other)).items()]
    entries[6:6] = [("aux.weight", np.zeros((3, 3))), ("aux.bias", np.zeros(3))]
    with pytest.raises(ValueError, match=r"a\.w could be .*aux\.weight.* \(give names by rename"):
        load_state_dict(ours, dict(entries))
    report = load_state_dict(ours, dict(entries), strict=False)
    problems = {misfit.ours: misfit.problem for misfit in report.misfits}
    assert problems == dict.fromkeys(("a.w", "a.b", "b.w", "b.b"), "ambiguous")
    for name, array in ours.state().items():
        kept = before if name in problems else other.state()
        np.testing.assert_array_equal(array, kept[name])


def test_layers_in_another_order_than_those_of_their_shapes_are_not_loaded():
    parts = [layers.Linear(size, bias=False, name=f"l{i}") for i, size in enumerate((3, 2, 3))]
    ours = Model(layers.Sequential(*parts), (3,))
    shapes = [(3, 3), (3, 2), (2, 3), (9, 9)]  # the last two of ours the other way round
    arrays = {f"a{i}.weight": np.ones(shape) for i, shape in enumerate(shapes)}
    with pytest.raises(ValueError, match=r"l0\.w could be a0\.weight .*, l1\.w could be a2\.w"):
        load_state_dict(ours, arrays, strict=False)


def test_the_order_of_layers_of_equal_shapes_is_not_known_in_safetensors(tmp_path):
    """Their names are sorted: "body" comes before "stem"."""

    def pair() -> Model:
        return Model(
            layers.Sequential(layers.Linear(3, name="first"), layers.Linear(3, name="second")), (3,)
        )

    path, theirs = tmp_path / "net.safetensors", state_dict(pair())
    for names in (("stem", "body"), ("layers.9", "layers.10")):
        new = dict(zip(("first", "second"), names, strict=True))
        arrays = {f"{new[k.partition('.')[0]]}.{k.partition('.')[2]}": a for k, a in theirs.items()}
        path.write_bytes(encode(arrays))
        if names[0] == "stem":
            with pytest.raises(ValueError, match=r"first\.w could be body.weight, stem.weight"):
                load_state_dict(pair(), path)
        else:
            assert load_state_dict(pair(), path).by == "order"
        assert load_state_dict(pair(), arrays).by == "order"


def test_weights_of_a_vision_transformer_of_timm_are_read_and_written():
    def vit(seed: int) -> Model:
        net = functools.partial(models.vit, 6, 1, 2)
        return Model(create_net(net, 3, (8, 8, 3)), (8, 8, 3), seed=seed)

    ours, other = vit(0), vit(1)
    state, block = other.state(), "block0.attention"
    named = {
        "patch_embed.proj": "embedding.conv",
        "blocks.0.norm1": "block0.norm1",
        "blocks.0.attn.qkv": f"{block}.in_proj",
        "blocks.0.attn.proj": f"{block}.out_proj",
        "blocks.0.norm2": "block0.norm2",
        "blocks.0.mlp.fc1": "block0.fc1",
        "blocks.0.mlp.fc2": "block0.fc2",
        "norm": "head.norm",
        "head": "head.fc",
    }
    arrays = {"cls_token": state["embedding.class.token"].reshape(1, 1, 6)}
    arrays["pos_embed"] = state["embedding.position.w"][np.newaxis]
    for theirs, name in named.items():
        weight, bias = ("gamma", "beta") if "norm" in name else ("w", "b")
        arrays[f"{theirs}.weight"] = state[f"{name}.{weight}"]
        arrays[f"{theirs}.bias"] = state[f"{name}.{bias}"]
    filters = arrays["patch_embed.proj.weight"]
    arrays["patch_embed.proj.weight"] = np.moveaxis(filters, -1, 1)
    assert load_state_dict(ours, arrays).by == "names"
    assert encode(ours.state()) == encode(other.state())
    assert_equal(state_dict(ours, like=arrays), arrays)


TOKENS, LENGTH, DEPTH, WIDTH = 11, 6, 2, 8


def gpt(seed: int) -> Model:
    options = {"depth": DEPTH, "heads": 2, "width": WIDTH}
    return Model(create_net("gpt", TOKENS, (LENGTH,), **options), (LENGTH,), seed=seed)


def in_the_names_of_gpt_2(made: Model, transposed: bool) -> Arrays:
    """As Hugging Face stores them, whose matrices are ``(inputs, outputs)``, or as nanoGPT."""
    state, arrays = made.state(), {}

    def add(theirs: str, ours: str, matrix: bool = False) -> None:
        weight, bias = ("w", "b") if matrix else ("gamma", "beta")
        array = state[f"{ours}.{weight}"]
        arrays[f"transformer.{theirs}.weight"] = array.T if matrix and transposed else array
        arrays[f"transformer.{theirs}.bias"] = state[f"{ours}.{bias}"]

    arrays["transformer.wte.weight"] = state["token.w"]
    arrays["transformer.wpe.weight"] = state["position.w"]
    for i in range(DEPTH):
        add(f"h.{i}.ln_1", f"block{i}.norm1")
        add(f"h.{i}.attn.c_attn", f"block{i}.attention.in_proj", matrix=True)
        add(f"h.{i}.attn.c_proj", f"block{i}.attention.out_proj", matrix=True)
        add(f"h.{i}.ln_2", f"block{i}.norm2")
        add(f"h.{i}.mlp.c_fc", f"block{i}.fc1", matrix=True)
        add(f"h.{i}.mlp.c_proj", f"block{i}.fc2", matrix=True)
        arrays[f"transformer.h.{i}.attn.bias"] = np.tril(np.ones((1, 1, LENGTH, LENGTH), bool))
    add("ln_f", "norm")
    arrays["lm_head.weight"] = state["token.w"]
    return arrays


@each(
    ("prefix", "transposed", "names"),
    [("transformer.", True, "hugging_face"), ("", False, "nanogpt")],
)
def test_weights_of_gpt_2_are_read_and_written(prefix, transposed, names, tmp_path):
    ours, other = gpt(0), gpt(1)
    arrays = {
        name.replace("transformer.", prefix): array
        for name, array in in_the_names_of_gpt_2(other, transposed).items()
    }
    assert load_state_dict(ours, arrays).by == "names"
    assert encode(ours.state()) == encode(other.state())
    assert list(state_dict(ours, like=arrays)) == list(arrays)
    assert_equal(state_dict(ours, like=arrays), arrays)
    path, of_all = tmp_path / "model.safetensors", (".attn.bias", "lm_head.weight")
    save_state_dict(ours, path, names=names)
    expected = {k.removeprefix(prefix): a for k, a in arrays.items() if not k.endswith(of_all)}
    assert_equal(decode(path.read_bytes()), expected)
    load_state_dict(again := gpt(0), path)
    assert encode(again.state()) == encode(other.state())
    arrays["lm_head.weight"] = arrays["lm_head.weight"] + 1
    with pytest.raises(ValueError, match=r"lm_head.weight must be equal to .*wte.weight, as both"):
        load_state_dict(gpt(0), arrays)


def test_a_library_without_the_network_and_two_kinds_of_names_are_refused():
    with pytest.raises(ValueError, match=r"names: no network of timm has the layers of this model"):
        state_dict(gpt(0), names="timm")
    with pytest.raises(ValueError, match=r"unknown names 'hugging'; did you mean 'hugging_face'"):
        state_dict(gpt(0), names="hugging")
    with pytest.raises(ValueError, match="like and names exclude each other"):
        state_dict(gpt(0), names="nanogpt", like={})


@each(
    ("arrays", "message"),
    [
        ({}, "expected tensors by name, got none"),
        ({"w": [1.0]}, "expected tensors by name, got list for 'w'"),
        ({"a.weight": np.zeros((1, 1))}, "arrays do not fit the model (matched by order): conv1.w"),
    ],
)
def test_other_objects_are_refused(arrays, message):
    with pytest.raises(ValueError, match="^load_state_dict: " + re.escape(message)):
        load_state_dict(model(), arrays)


def test_an_index_of_links_into_a_cache_is_read(tmp_path):
    # The Hugging Face hub stores snapshots as links to files that are named by their checksums.
    snapshot, blobs, others = (tmp_path / name for name in ("snapshots", "blobs", "others"))
    for folder in (snapshot, blobs, others):
        folder.mkdir()
    arrays = {"weight": np.ones((3, 4), "f4"), "bias": np.arange(3, dtype="f4")}
    for name, array in arrays.items():
        save_file({name: array}, blobs / name)
        (snapshot / f"{name}.safetensors").symlink_to(f"../blobs/{name}")
    text = json.dumps({"weight_map": {name: f"{name}.safetensors" for name in arrays}})
    (blobs / "index").write_text(text)
    index = snapshot / "model.safetensors.index.json"
    index.symlink_to("../blobs/index")
    model = Model(layers.Linear(3), (4,))
    load_state_dict(model, index)
    np.testing.assert_array_equal(model.predict(np.ones((1, 4), "f4")), [[4, 5, 6]])
    (others / "bias").write_bytes((blobs / "bias").read_bytes())
    (snapshot / "bias.safetensors").unlink()
    (snapshot / "bias.safetensors").symlink_to("../others/bias")
    with pytest.raises(ValueError, match="a link to .*others/bias; replace it by a copy"):
        load_state_dict(model, index)
    parts = {"bias": "weight.safetensors", "weight": "weight.safetensors"}
    (blobs / "index").write_text(json.dumps({"weight_map": parts}))
    with pytest.raises(ValueError, match="files do not contain bias; download again"):
        load_state_dict(model, index)


def test_an_unknown_suffix_is_refused(tmp_path):
    message = "expected a state dict in a file .safetensors, .pt, .pth, .bin, .ckpt, got "
    (tmp_path / "net.npz").write_bytes(b"")
    for call in (load_state_dict, save_state_dict):
        with pytest.raises(ValueError, match=re.escape(message)):
            call(model(), tmp_path / "net.npz")


class Unordered(layers.Block):
    """Linear layers behind features whose order differs between the uses, or is not known."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def wire(self, graph: Any, *inputs: Any) -> Any:
        flat = graph.add(layers.Flatten(name="flatten"), *inputs)
        if self.kind == "sliced":
            flat = graph.add(layers.Slice(slice(0, 6), name="slice"), flat)
        if self.kind == "grouped":
            flat = graph.add(layers.GroupNorm(2, name="groups"), flat)
        if self.kind == "folded":
            image = graph.add(layers.Reshape((2, 3, -1), name="fold"), flat)
            flat = graph.add(layers.Flatten(), graph.add(layers.ReLU(), image))
        shared = layers.Linear(2, name="fc")
        y = graph.add(shared, flat)
        if self.kind == "shared":
            other = graph.add(layers.Flatten(), graph.add(layers.Conv2d(12, (3, 2)), *inputs))
            y = graph.add(layers.Add(), y, graph.add(shared, other))
        return y


@each(
    ("kind", "message"),
    [
        ("sliced", "fc: the order of its inputs in other programs must be known, and is not be"),
        ("folded", "fc: the order of its inputs in other programs must be known, and is not be"),
        ("shared", "fc_1: the order of its inputs in other programs must be that of fc"),
    ],
)
def test_features_of_unknown_order_are_refused(kind, message):
    ours = Model(Unordered(kind), (3, 2, 2))
    with pytest.raises(ValueError, match=re.escape(message)):
        state_dict(ours)


def test_weights_of_a_saved_model_are_exported_and_imported_by_the_command(tmp_path, capsys):
    saved, other = tmp_path / "net.pydtnn", tmp_path / "new.pydtnn"
    path = tmp_path / "w.safetensors"
    ours = model(3, "resnet8")
    save_model(ours, saved)
    assert main(["export", str(saved), str(path)]) == 0
    options = ["--model", "resnet8", "--shape", "8,9,3", "--classes", "5"]
    assert main(["import", str(path), str(other), *options]) == 0
    assert encode(load(other).state()) == encode(ours.state())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"wrote {path}: 77,")
    assert lines[1] == "matched 47 of 47 arrays by names"


@each(
    ("arguments", "message"),
    [
        (["import", "w.safetensors", "net"], "import: weights contain no network; give it"),
        (["import"], "the following arguments are required: source, folder; see python -m"),
    ],
)
def test_errors_of_the_command_are_one_line(arguments, message, capsys):
    assert main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"pydtnn interchange: {message}")
