"""PyTorch's side of the benchmarks of a GPU, on the CPU: the same training, and nothing breaks."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")


@pytest.fixture(autouse=True)
def float32():
    torch.set_default_dtype(torch.float32)  # as in the benchmarks' own processes


@pytest.mark.parametrize(("peer", "dtype"), [("eager", "float32"), ("compiled", "bfloat16")])
def test_the_peer_makes_steps(peer, dtype, monkeypatch):
    from benchmarks.gpu.work import WORK, Theirs

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # it takes a minute
    side, turns = Theirs(WORK["mlp-8"], dtype, "cpu", peer), [2, 1, 0]
    before = [p.detach().clone() for p in side.net.parameters()]
    side.turns(lambda seconds: turns.pop(0))
    assert any((a != b).any() for a, b in zip(before, side.net.parameters(), strict=True))


@pytest.mark.parametrize("augment", ["crop:4,flip", "none"])
def test_pytorch_is_fed_the_same_images(augment):
    from benchmarks.gpu.recipe import OnTorch
    from pydtnn.data import Loader, create_augmentations, load_dataset

    train, _ = load_dataset("synthetic")
    train = train.subset(np.arange(50))
    options = {"global_batch_size": 20, "augment": create_augmentations(augment), "seed": 3}
    with Loader(train, **options) as ready, Loader(train, raw=True, **options) as raw:
        pairs = list(zip(ready.epoch(1), OnTorch(raw, "cpu").epoch(1), strict=True))
    assert len(pairs) == 3
    for batch, (x, y) in pairs:
        assert x.is_contiguous(memory_format=torch.channels_last)
        assert x.dtype == torch.float32
        images = x.permute(0, 2, 3, 1).numpy()
        np.testing.assert_allclose(images, batch.x, rtol=0, atol=1e-5)  # float32, rounded twice
        np.testing.assert_array_equal(y.numpy(), batch.y)


def test_both_sides_of_the_recipe_learn_the_same():
    from benchmarks.gpu.recipe import Recipe, ours, theirs

    losses = {"ours": [], "eager": []}
    recipe = Recipe("synthetic", "mlp", "", 300, 2, "float32", "cpu")
    found = ours(recipe, losses["ours"].append), theirs(recipe, losses["eager"].append, "eager")
    mine, other = ([line["loss"] for line in side] for side in losses.values())
    assert len(mine) == 2
    np.testing.assert_allclose(mine, other, rtol=1e-3)  # six steps of float32
    assert abs(found[0]["accuracy"] - found[1]["accuracy"]) < 0.01
    assert all(set(side) == {"accuracy", "seconds", "first", "evaluation"} for side in found)
