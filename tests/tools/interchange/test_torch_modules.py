"""Models of modules of PyTorch: outputs, gradients and statistics are those of the module."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest

from pydtnn import ArrayDataset, Trainer, load
from pydtnn.layers import DotProductAttention, Dropout, StepContext
from pydtnn.tools.interchange.torch_modules import Traced, find_origins, from_torch, to_torch
from tests.each import each

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from torch.utils._pytree import tree_flatten, tree_map  # noqa: E402

from tests.tools.interchange.random_modules import Attention, masks, random_module  # noqa: E402

nn, F = torch.nn, torch.nn.functional

pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")


class Images(nn.Module):
    """A bottleneck with a squeeze, an addition in place, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8, eps=1e-3, momentum=0.3)
        self.depthwise = nn.Conv2d(8, 8, 3, padding="same", groups=8)
        self.squeeze = nn.Conv2d(8, 4, 1)
        self.excite = nn.Conv2d(4, 8, 1)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8 * 2 * 2, 5)

    def forward(self, x: Any) -> Any:
        x = F.relu_(self.bn(self.stem(x)))
        s = F.adaptive_avg_pool2d(x, 1)
        s = torch.sigmoid(self.excite(F.silu(self.squeeze(s))))
        y = F.hardswish(self.depthwise(x) * s)
        y += x
        y = F.max_pool2d(y, 2)
        return self.head(self.drop(torch.flatten(y, 1)))


class Segments(nn.Module):
    """A U-Net of one level with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU())
        self.middle = nn.Conv2d(4, 6, 3, padding=1)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.last = nn.Conv2d(8, 3, 1)

    def forward(self, x: Any) -> Any:
        a = self.down(x)
        b = F.leaky_relu(self.middle(F.avg_pool2d(a, 2)), 0.1)
        y = self.last(torch.cat([a, self.up(b)], dim=1))
        return {"map": y, "level": b.mean((2, 3))}


class Tokens(nn.Module):
    """A GPT with a matrix of tokens that is that of the logits, too."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(11, 8), nn.Embedding(9, 8)  # of 6 positions
        self.ln, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm = nn.RMSNorm(8, eps=1e-6)
        self.logits = nn.Linear(8, 11, bias=False)
        self.logits.weight = self.wte.weight

    def forward(self, tokens: Any) -> Any:
        n, t = tokens.shape
        x = self.wte(tokens) + self.wpe(torch.arange(t))
        q, k, v = self.qkv(self.ln(x)).split(8, dim=-1)
        q, k, v = (a.view(n, t, 2, 4).transpose(1, 2) for a in (q, k, v))
        rate = 0.25 if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, 8))
        return self.logits(self.norm(x))


class Signals(nn.Module):
    """Two bidirectional layers of recurrence, their last states, and frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(6, 5, batch_first=True)
        self.head = nn.Linear(5, 2)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 5))
        self.lstm.requires_grad_(False)

    def forward(self, x: Any) -> Any:
        y, _ = self.lstm(x)
        _, last = self.gru(y)
        return self.head(last[-1] * self.scale)


class Patches(nn.Module):
    """A ViT of PyTorch's own encoder, with a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(1, 5, 8))
        options = {"dim_feedforward": 16, "dropout": 0.0, "norm_first": True}
        self.block = nn.TransformerEncoderLayer(8, 2, batch_first=True, **options)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.block(x)[:, 0])


class Custom(nn.Module):
    """A module whose forward is a function."""

    def __init__(self, function: Any, **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *x: Any) -> Any:
        return self.function(self, *x)


MODULES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "images": (Images, (3, 8, 8)),
    "segments": (Segments, (2, 8, 6)),
    "signals": (Signals, (7, 4)),
    "patches": (Patches, (3, 8, 8)),
    "tokens": (Tokens, (6,)),
}


def create(name: str, *, training: bool = True, seed: int = 0) -> tuple[Any, Any]:
    """Return a module of `MODULES` in float64, and an example of three samples."""
    torch.manual_seed(seed)
    kind, shape = MODULES[name]
    module = kind().double().train(training)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 1.5)
    example = torch.randn(3, *shape).double()
    return module, torch.randint(11, (3, *shape)) if name == "tokens" else example


def last_channels(y: Any) -> np.ndarray:
    y = y.detach().numpy()
    y = y if y.ndim > 1 else y.reshape(-1, 1)
    return np.moveaxis(y, 1, -1) if y.ndim > 3 else y


def outputs(module: Any, *x: Any) -> list[Any]:
    return tree_flatten(module(*x))[0]


def compare_with_module(module: Any, x: Any, turned: int = 0) -> int:
    """Compare a model with its module in training without dropout; return compared parameters.

    The batch is the second axis of the last `turned` outputs.
    """
    model = from_torch(module, x, dtype="float64")
    parts = [p for p in module.modules() if isinstance(p, nn.Dropout) and p.p]
    rates = [layer.rate for layer in model.layers if isinstance(layer, Dropout)]
    assert sorted(p.p for p in parts) == sorted(rates)
    xs = x if isinstance(x, tuple) else (x,)
    traced, twin = Traced.of("test", module, x), copy.deepcopy(module)  # its statistics change
    origins = find_origins(traced)
    if rates:
        model = traced.model(dropout=False)
        traced.freeze(model, origins)
    for part in twin.modules():
        part.p = 0.0 if isinstance(part, nn.Dropout) else getattr(part, "p", None)
    theirs = outputs(twin, *tree_map(torch.clone, xs))
    places = len(theirs) - turned
    theirs = [y.movedim(int(i >= places), 0) for i, y in enumerate(theirs)]
    context = StepContext(training=module.training, samples=np.arange(len(theirs[0])))
    model.statistics.begin_step()
    inputs = zip(tree_flatten(xs)[0], traced.axes, strict=True)
    given: Any = tuple(last_channels(a.double().movedim(axis, 0)) for a, axis in inputs)
    y, residuals = model.forward(given if len(given) > 1 else given[0], context)
    ours = y if isinstance(y, tuple) else (y,)
    dys = [torch.randn(a.shape).double() for a in theirs]
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, last_channels(b), rtol=1e-8, atol=1e-8)
    if any(y.requires_grad for y in theirs):
        torch.autograd.backward(theirs, dys)
    given = tuple(last_channels(dy) for dy in dys)
    model.backward(given if len(given) > 1 else given[0], residuals)
    model.statistics.fold()
    named = {**dict(twin.named_parameters(remove_duplicate=False)), **dict(twin.named_buffers())}
    compared = 0
    flat = [
        np.zeros(named[n].numel()) if named[n].grad is None else named[n].grad.numpy().reshape(-1)
        for n in traced.tensors
    ]
    values = [named[n].detach().numpy().reshape(-1) for n in traced.tensors]
    state = model.state()
    for array, origin in origins.items():
        if "running_" in array and origin.parameters:
            expected = np.concatenate(values)[origin.places]
            np.testing.assert_allclose(state[array].reshape(-1), expected, rtol=1e-10, atol=1e-14)
        elif origin.trained:
            expected = np.concatenate(flat)[origin.places]
            found = model.parameters[array].grad.reshape(-1)
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)
            compared += len(expected)
        elif "running_" not in array:
            assert array in model.frozen
    return compared


@each("name", MODULES, few=3)
def test_outputs_gradients_and_statistics_are_those_of_the_module(name):
    module, x = create(name)
    module.train(name != "tokens")  # no dropout of weights
    unread = 3 * 8 if name == "tokens" else 0
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert compare_with_module(module, x) == trained - unread


SEEDS = [3, 15, 23, 33, 50, 59, 74, 85, 94, 104, 112, 120, 128, 139, 147, 156, 169, 179, 191]
"""Of random modules that are taken."""


@pytest.mark.few(3)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_module_computes_and_trains_the_same(seed):
    compare_with_module(*random_module(seed))


@each("name", MODULES, few=3)
def test_trained_weights_go_back_into_the_module(name, tmp_path):
    module, x = create(name)
    model = from_torch(module, x, dtype="float64")
    rng = np.random.default_rng(0)
    trained = {n for n in model.parameter_names if n not in model.frozen}
    model.load(
        {
            n: a + rng.normal(size=a.shape)
            if n in trained
            else abs(a) + (0.5 if "running" in n else 0)
            for n, a in model.state().items()
            if n in trained or "running" in n
        },
        strict=False,
    )
    from pydtnn.saving import save_model

    save_model(model, tmp_path / "net.pydtnn")
    again = load(tmp_path / "net.pydtnn")
    to_torch(again, module, x)
    expected = outputs(module.eval(), x)
    y = model.predict(last_channels(x.double()))
    for a, b in zip(y if isinstance(y, tuple) else (y,), expected, strict=True):
        np.testing.assert_allclose(a, last_channels(b), rtol=1e-7, atol=1e-9)


def test_a_model_of_a_module_is_trained_and_keeps_its_names_and_options():
    module, x = create("images")
    model = from_torch(module.float(), x.float())
    assert {"stem.w", "bn.gamma", "head.b"} <= {*model.parameter_names}
    assert [layer.rate for layer in model.layers if isinstance(layer, Dropout)] == [0.3]
    assert [s.momentum for s in model.statistics.statistics] == [0.3]
    data = ArrayDataset(last_channels(x.repeat(8, 1, 1, 1).float()), np.arange(24) % 5)
    history = Trainer(model, "sgd", progress=False).fit(data, epochs=3, batch_size=8)
    assert np.isfinite(history.history["loss"]).all()


@each("by_hand", [False, True])
@each(
    ("name", "causal", "window", "positions"),
    [
        ("causal", True, None, "NoneType"),
        ("hidden", True, None, "NoneType"),
        ("band", False, 2, "NoneType"),
        ("window", True, 3, "NoneType"),
        ("slopes", True, None, "LinearBiases"),
        ("distances", False, None, "RelativePositions"),
    ],
)
def test_masks_of_intervals_and_biases_of_distances_are_options(
    name, causal, window, positions, by_hand
):
    torch.manual_seed(0)
    module, x = Attention(4, masks(5)[name], 0.3, by_hand).double(), torch.randn(3, 5, 4).double()
    assert compare_with_module(module, x) == 4 * 12 + 12
    (found,) = (n for n in from_torch(module, x).layers if isinstance(n, DotProductAttention))
    assert (found.causal, found.window, found.scale) == (causal, window, 0.3)
    assert type(found.positions).__name__ == positions


def test_a_decoder_reads_a_sequence_of_another_length():
    torch.manual_seed(0)
    module = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True).double()
    mask = nn.Transformer.generate_square_subsequent_mask(4).double()
    custom = Custom(lambda m, x, y: m.a(x, y, tgt_mask=mask, tgt_is_causal=True), a=module)
    trained = sum(p.numel() for p in module.parameters())
    xs = torch.randn(3, 6, 8).double(), torch.randn(3, 4, 8).double()
    assert compare_with_module(custom, xs) == trained


def test_a_mask_of_keys_that_is_an_input_is_the_lengths_of_sequences():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).double()
    module = Custom(lambda m, x, hidden: m.a(x, src_key_padding_mask=hidden), a=layer)
    hidden = torch.arange(5) >= torch.tensor([[5], [3], [1]])
    x = torch.randn(3, 5, 8).double()
    assert compare_with_module(module, (x, hidden)) == sum(p.numel() for p in layer.parameters())
    model = from_torch(module, (x, hidden), dtype="float64")
    for wrong in ([0, 1, 0, 1, 1], [1, 0, 0, 0, 0], [1] * 5):
        with pytest.raises(ValueError, match="lengths must be whole numbers in 0..5, got"):
            model.predict((x[:1].numpy(), np.array([wrong], "float64")))
    both = Custom(lambda m, x, t: m.a(x, x, x, t == 0)[0] + m.b(t), a=layer.self_attn)
    both.b = nn.Embedding(3, 8)
    with pytest.raises(ValueError, match="1 x eq"):
        from_torch(both.double(), (x, torch.randint(3, (3, 5))))


@each(("kind", "both", "first"), [(nn.LSTM, True, False), (nn.GRU, False, True)])
def test_states_of_recurrent_layers_are_inputs_and_outputs(kind, both, first):
    torch.manual_seed(0)
    module = kind(4, 3, 2, bidirectional=both, batch_first=first).double()
    x, h, c = (torch.randn(n, 6, 4 - (n < 6)).double() for n in (6, 2 + 2 * both, 2 + 2 * both))
    hx = (h, c) if kind is nn.LSTM else h
    turned = len(tree_flatten(hx)[0]) + (not first)
    trained = sum(p.numel() for p in module.parameters())
    assert compare_with_module(module, (x, hx), turned) == trained


class Relative(nn.Module):
    """Two layers of attention with a table of distances, and a norm of squares, as in T5."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.tokens, self.table = nn.Embedding(7, 4), nn.Embedding(8, 2)
        self.w, self.causal = nn.Parameter(torch.rand(4) + 0.5), causal

    def forward(self, tokens: Any, others: Any) -> Any:
        x, back = self.tokens(tokens) + self.tokens(others), torch.arange(5)[:, None]
        back = back - torch.arange(5)
        buckets = back.clamp(min=0) if self.causal else 4 * (back < 0) + abs(back).clamp(max=2)
        terms = self.table(buckets).permute(2, 0, 1).unsqueeze(0)
        terms = terms.masked_fill(back < 0, -torch.inf) if self.causal else terms
        for _ in range(2):
            x = self.w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
            q = x.view(*x.shape[:2], 2, 2)
            scores = torch.einsum("bqhd,bkhd->bhqk", q, q) + terms
            x = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), q).flatten(2)
        return x


@each("causal", [False, True])
def test_tables_of_distances_and_tokens_are_shared(causal):
    torch.manual_seed(0)
    module, tokens = Relative(causal).double(), torch.randint(7, (2, 3, 5))
    assert compare_with_module(module, (*tokens,)) == 7 * 4 + 8 * 2 + 4


@each("equation", ["btd,do->bto", "...d,od->...o", "btd,dhk->bhtk", "bthk,hkd->btd", "od,btd->bot"])
def test_sums_over_axes_are_products_with_matrices(equation):
    torch.manual_seed(0)
    step = -1 if equation.startswith("od") else 1
    names = equation.replace("...", "bt").partition("->")[0].split(",")[::step]
    x, w = (torch.randn([" okhtbd".index(n) + 1 for n in name]).double() for name in names)
    module = Custom(lambda m, x: torch.einsum(equation, *(x, m.w)[::step]), w=nn.Parameter(w))
    assert compare_with_module(module, x) == w.numel()


def test_activations_without_a_layer_are_composed():
    torch.manual_seed(0)
    module = Custom(
        lambda m, x: F.mish(m.a(x)) * F.selu(m.a(x)) + F.softsign(m.a(x)) - m.a(x).abs(),
        a=nn.Linear(4, 5),
    )
    assert compare_with_module(module.double(), 3 * torch.randn(6, 4).double()) == 25


def test_a_mask_that_is_the_same_for_all_samples_is_the_causal_one():
    def forward(m: Any, x: Any) -> Any:
        n, t, c = x.shape
        q, k, v = m.a(x).split(c, dim=-1)
        later = torch.ones(t, t).triu(1).bool().expand(n, t, t)
        return (q @ k.transpose(1, 2)).masked_fill(later, -torch.inf).softmax(-1) @ v

    module = Custom(forward, a=nn.Linear(4, 12))
    model = from_torch(module, torch.randn(3, 5, 4))
    assert [n.causal for n in model.layers if isinstance(n, DotProductAttention)] == [True]


def test_dropout_of_the_weights_of_attention_is_read_in_training_mode():
    module, x = create("tokens")
    attention = [n for n in from_torch(module, x).layers if isinstance(n, DotProductAttention)]
    assert [(n.heads, n.causal, n.dropout) for n in attention] == [(2, True, 0.25)]


def _stale(m: Any, x: Any) -> Any:
    y = m.a(x)
    view = y.view(-1)
    y.relu_()
    return y + view.view(y.shape)


REFUSED: list[tuple[str, Any, str]] = [
    (
        "operators",
        Custom(lambda m, x: torch.fft.fft(m.a(x)).real + x.cumsum(1), a=nn.Linear(4, 4)),
        "1 x cumsum (the module itself)",
    ),
    ("product", Custom(lambda m, x: F.linear(x, m.a.weight * 2), a=nn.Linear(4, 4)), "a.weight"),
    ("shared", Custom(lambda m, x: m.a(m.a(x)), a=nn.BatchNorm1d(4)), "a.weight must be read once"),
    ("average", nn.BatchNorm1d(4, momentum=None), "batch_norm with momentum=None"),
    ("random", Custom(lambda m, x: x * torch.rand(4)), "which is random"),
    ("stale", Custom(_stale, a=nn.Linear(4, 4)), "relu_, which changes an array"),
    ("constant", Custom(lambda m, x: (x * 2, torch.ones(3, 4))), "got a constant"),
    ("norm", Custom(lambda m, x: m.a(x), a=nn.BatchNorm1d(4, affine=False)), "affine=False"),
    ("mask", Attention(4, masks(3)["even"], 1.0, True), "a mask must hide later positions"),
    ("quotient", Custom(lambda m, x: x / (x.tanh() + 1)), "a divisor that is not known to be"),
    ("clip", Custom(lambda m, x: x.clamp(-2, 3)), "Clip"),
]


@each(("name", "module", "sentence"), REFUSED)
def test_what_no_layer_does_is_refused_by_name(name, module, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        from_torch(module, torch.randn(3, 3, 4) if name == "mask" else torch.randn(3, 4))
    assert "from_torch: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_model_is_found(monkeypatch):
    from pydtnn.tools.interchange import torch_operators

    monkeypatch.setitem(torch_operators.OPERATORS, "gelu", torch_operators.OPERATORS["relu"])
    module, x = create("segments")
    with pytest.raises(ValueError, match=r"output 0 in evaluation differs by .* from the module's"):
        from_torch(module, x)


def test_bad_arguments_are_one_sentence():
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got 3"):
        from_torch(3, torch.zeros(1, 2))
    with pytest.raises(ValueError, match="equally many samples"):
        from_torch(nn.Linear(2, 2), (torch.zeros(1, 2), torch.zeros(2, 2)))
    with pytest.raises(ValueError, match=r"torch.export cannot export the module \("):
        from_torch(Custom(lambda m, x: x if x.sum() > 0 else -x), torch.zeros(2, 2))
    module, x = create("images")
    other = from_torch(create("segments")[0], create("segments")[1])
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ValueError, match="to_torch: the model must be one that from_torch makes"):
        to_torch(other, module, x)
    assert all(torch.equal(a, before[n]) for n, a in module.state_dict().items())
