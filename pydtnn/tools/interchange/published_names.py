"""Names that torchvision, timm and Hugging Face give to the arrays of networks of `pydtnn.models`.

A rule translates the beginning of a name here into the beginning of a name there: ``#`` is a
number, which occurs again in the other name, ``#+1`` the next one, and ``*`` a word. ``q|k|v`` are
several arrays there, which are the rows of one here. Several arrays here may have one name there if
they are equal. Rules are tried in their order. A naming applies to a model if it translates the
names of all arrays.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pydtnn.tools.interchange.slots import ArraySlot
from pydtnn.utils.names import unknown

Rules = Mapping[str, str]


@dataclass(frozen=True)
class Naming:
    """Names and layouts of the arrays of a network in another library.

    Attributes
    ----------
    rules : mapping or callable
        Or a function of the names of a model's layers that returns them, where numbers there
        depend on the depth of the model.
    transposed : str
        Regular expression of the names there of matrices that are ``(inputs, outputs)``.
    leading : dict of str to int
        Axes of size 1 before the others of an array, by its name there.
    copies : dict of str to str
        Names there of second copies of arrays, and the names here.
    constants : str
        Regular expression of the names there of arrays that are computed here.
    library : str
        That has the network.
    """

    rules: Rules | Callable[[Sequence[str]], Rules]
    transposed: str = ""
    leading: Mapping[str, int] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    constants: str = ""
    library: str = "torchvision"

    def apply(self, slots: Sequence[ArraySlot]) -> list[ArraySlot] | None:
        """Return slots with the names and shapes there; None if an array has no name there."""
        layers = [*dict.fromkeys(slot.layer for slot in slots)]
        rules = self.rules(layers) if callable(self.rules) else self.rules
        compiled = [_compile(ours, theirs) for ours, theirs in rules.items()]
        named: list[ArraySlot] = []
        for slot in slots:
            found = (name for rule in compiled if (name := rule(slot.their_name)) is not None)
            name = next(found, None)
            if name is None:
                return None
            shape = (1,) * self.leading.get(name, 0) + slot.their_shape
            turned = re.fullmatch(self.transposed, name) is not None and len(shape) == 2
            named.append(slot.named(name, shape[::-1] if turned else shape, transposed=turned))
        return named


def _compile(ours: str, theirs: str) -> Callable[[str], str | None]:
    """Return a function that applies a rule to a name, and returns None if it does not apply."""
    escaped = re.escape(ours).replace(re.escape("#"), r"(\d+)").replace(re.escape("*"), r"(\w+)")
    pattern = re.compile(escaped)

    def rename(name: str) -> str | None:
        match = pattern.match(name)
        if match is None:
            return None
        words = iter(match.groups())

        def word(place: re.Match[str]) -> str:
            return str(int(next(words)) + 1) if place[0] == "#+1" else next(words)

        return re.sub(r"#\+1|[#*]", word, theirs) + name[match.end() :]

    return rename


RESNET = {
    "stem.conv.": "conv1.",
    "stem.bn.": "bn1.",
    "stage#.#.shortcut.conv.": "layer#.#.downsample.0.",
    "stage#.#.shortcut.bn.": "layer#.#.downsample.1.",
    "stage#.#.": "layer#.#.",
    "head.fc.": "fc.",
}

ALEXNET = {
    **{f"conv{i}.": f"features.{place}." for i, place in enumerate((0, 3, 6, 8, 10), start=1)},
    **{f"fc{i}.": f"classifier.{place}." for i, place in enumerate((1, 4, 6), start=1)},
}

DENSENET = {
    "stem.conv.": "features.conv0.",
    "stem.bn.": "features.norm0.",
    "block#.#.bn#.": "features.denseblock#.denselayer#+1.norm#.",
    "block#.#.conv#.": "features.denseblock#.denselayer#+1.conv#.",
    "transition#.bn.": "features.transition#.norm.",
    "transition#.conv.": "features.transition#.conv.",
    "head.bn.": "features.norm5.",
    "head.fc.": "classifier.",
}

PUBLISHED_DENSENET = {
    **DENSENET,
    "block#.#.bn#.": "features.denseblock#.denselayer#+1.norm.#.",
    "block#.#.conv#.": "features.denseblock#.denselayer#+1.conv.#.",
}
"""In the files that torchvision publishes, whose names it changes when it reads them."""

GOOGLENET = {
    "stem.": "",
    "block*.one.": "inception*.branch1.",
    "block*.three.reduce.": "inception*.branch2.0.",
    "block*.three.conv.": "inception*.branch2.1.",
    "block*.five.reduce.": "inception*.branch3.0.",
    "block*.five.conv.": "inception*.branch3.1.",
    "block*.pool.conv.": "inception*.branch4.1.",
    "auxiliary#.": "aux#.",
    "fc.": "fc.",
}

SQUARE = {
    "sequential0.": "branch1x1.",
    "sequential1.sequential#.": "branch5x5_#+1.",
    "sequential2.sequential#.": "branch3x3dbl_#+1.",
    "sequential3.sequential1.": "branch_pool.",
}

ROW = {
    **SQUARE,
    "sequential1.sequential#.": "branch7x7_#+1.",
    "sequential2.sequential#.": "branch7x7dbl_#+1.",
}

REDUCE_SQUARE = {
    "sequential0.": "branch3x3.",
    "sequential1.sequential#.": "branch3x3dbl_#+1.",
}

REDUCE_ROW = {
    "sequential0.sequential#.": "branch3x3_#+1.",
    "sequential1.sequential#.": "branch7x7x3_#+1.",
}

WIDE = {
    "sequential0.": "branch1x1.",
    "sequential1.sequential0.": "branch3x3_1.",
    "sequential1.branches1.sequential0.": "branch3x3_2a.",
    "sequential1.branches1.sequential1.": "branch3x3_2b.",
    "sequential2.sequential#.": "branch3x3dbl_#+1.",
    "sequential2.branches2.sequential0.": "branch3x3dbl_3a.",
    "sequential2.branches2.sequential1.": "branch3x3dbl_3b.",
    "sequential3.sequential1.": "branch_pool.",
}

BLOCKS = {
    **{"square0": ("5b", SQUARE), "square1": ("5c", SQUARE), "square2": ("5d", SQUARE)},
    "reduce0": ("6a", REDUCE_SQUARE),
    **{"row0": ("6b", ROW), "row1": ("6c", ROW), "row2": ("6d", ROW), "row3": ("6e", ROW)},
    "reduce1": ("7a", REDUCE_ROW),
    **{"wide0": ("7b", WIDE), "wide1": ("7c", WIDE)},
}

INCEPTION = {
    "stem.conv1.": "Conv2d_1a_3x3.",
    "stem.conv2.": "Conv2d_2a_3x3.",
    "stem.conv3.": "Conv2d_2b_3x3.",
    "stem.conv4.": "Conv2d_3b_1x1.",
    "stem.conv5.": "Conv2d_4a_3x3.",
    **{
        f"{block}.{ours}": f"Mixed_{number}.{theirs}"
        for block, (number, branches) in BLOCKS.items()
        for ours, theirs in branches.items()
    },
    "auxiliary.conv1.": "AuxLogits.conv0.",
    "auxiliary.conv2.": "AuxLogits.conv1.",
    "auxiliary.fc.": "AuxLogits.fc.",
    "fc.": "fc.",
}

VIT = {
    "embedding.class.token": "class_token",
    "embedding.conv.": "conv_proj.",
    "embedding.position.weight": "encoder.pos_embedding",
    "block#.norm#.": "encoder.layers.encoder_layer_#.ln_#.",
    "block#.attention.": "encoder.layers.encoder_layer_#.self_attention.",
    "block#.fc1.": "encoder.layers.encoder_layer_#.mlp.0.",
    "block#.fc2.": "encoder.layers.encoder_layer_#.mlp.3.",
    "head.norm.": "encoder.ln.",
    "head.fc.": "heads.head.",
}

PUBLISHED_VIT = {
    **VIT,
    "block#.fc1.": "encoder.layers.encoder_layer_#.mlp.linear_1.",
    "block#.fc2.": "encoder.layers.encoder_layer_#.mlp.linear_2.",
}
"""In the files that torchvision publishes, whose names it changes when it reads them."""

TIMM_VIT = {
    "embedding.class.token": "cls_token",
    "embedding.conv.": "patch_embed.proj.",
    "embedding.position.weight": "pos_embed",
    "block#.norm#.": "blocks.#.norm#.",
    "block#.attention.in_proj_": "blocks.#.attn.qkv.",
    "block#.attention.out_proj.": "blocks.#.attn.proj.",
    "block#.fc#.": "blocks.#.mlp.fc#.",
    "head.norm.": "norm.",
    "head.fc.": "head.",
}

GPT = {
    "token.": "wte.",
    "position.": "wpe.",
    "block#.norm#.": "h.#.ln_#.",
    "block#.attention.in_proj_": "h.#.attn.c_attn.",
    "block#.attention.out_proj.": "h.#.attn.c_proj.",
    "block#.fc1.": "h.#.mlp.c_fc.",
    "block#.fc2.": "h.#.mlp.c_proj.",
    "norm.": "ln_f.",
}

GPT_COPIES = {"lm_head.weight": "token.w"}

GPT_CONSTANTS = r"h\.\d+\.attn\.(bias|masked_bias)"
"""Causal masks, which earlier versions of transformers store."""


LLAMA = {
    "token.": "model.embed_tokens.",
    "block#.norm1.": "model.layers.#.input_layernorm.",
    "block#.norm2.": "model.layers.#.post_attention_layernorm.",
    "block#.attention.": "model.layers.#.self_attn.",
    "block#.mlp.": "model.layers.#.mlp.",
    "norm.": "model.norm.",
    "logits.": "lm_head.",
}

LLAMA_CONSTANTS = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
"""Angles per position, which earlier versions of transformers store."""


BERT = {
    "token.weight": "bert.embeddings.word_embeddings.weight",
    "token.bias": "cls.predictions.bias",
    "segment.": "bert.embeddings.token_type_embeddings.",
    "encoder.position.": "bert.embeddings.position_embeddings.",
    "encoder.norm.": "bert.embeddings.LayerNorm.",
    "encoder.block#.attention.in_proj_": "bert.encoder.layer.#.attention.self.query|key|value.",
    "encoder.block#.attention.out_proj.": "bert.encoder.layer.#.attention.output.dense.",
    "encoder.block#.norm1.": "bert.encoder.layer.#.attention.output.LayerNorm.",
    "encoder.block#.fc1.": "bert.encoder.layer.#.intermediate.dense.",
    "encoder.block#.fc2.": "bert.encoder.layer.#.output.dense.",
    "encoder.block#.norm2.": "bert.encoder.layer.#.output.LayerNorm.",
    "head.transform.": "cls.predictions.transform.dense.",
    "head.norm.": "cls.predictions.transform.LayerNorm.",
    "head.pooler.": "bert.pooler.dense.",
    "head.logits.": "classifier.",
}

BERT_COPIES = {
    "cls.predictions.decoder.weight": "token.w",
    "cls.predictions.decoder.bias": "token.b",
}

T5_TABLE = "*coder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
"""Of which a stack has one."""

T5 = {
    "token.": "shared.",
    "logits.": "lm_head.",
    "*coder.norm.": "*coder.final_layer_norm.",
    "*coder.block#.norm1.": "*coder.block.#.layer.0.layer_norm.",
    "*coder.block#.attention.in_proj_": "*coder.block.#.layer.0.SelfAttention.q|k|v.",
    "*coder.block#.attention.out_proj.": "*coder.block.#.layer.0.SelfAttention.o.",
    "*coder.block#.attention.attention.positions": T5_TABLE,
    "decoder.block#.norm2.": "decoder.block.#.layer.1.layer_norm.",
    "decoder.block#.cross.q_proj.": "decoder.block.#.layer.1.EncDecAttention.q.",
    "decoder.block#.cross.kv_proj.": "decoder.block.#.layer.1.EncDecAttention.k|v.",
    "decoder.block#.cross.out_proj.": "decoder.block.#.layer.1.EncDecAttention.o.",
    "decoder.block#.norm3.": "decoder.block.#.layer.2.layer_norm.",
    "encoder.block#.norm2.": "encoder.block.#.layer.1.layer_norm.",
    "decoder.block#.fc1.": "decoder.block.#.layer.2.DenseReluDense.wi.",
    "decoder.block#.fc2.": "decoder.block.#.layer.2.DenseReluDense.wo.",
    "encoder.block#.fc1.": "encoder.block.#.layer.1.DenseReluDense.wi.",
    "encoder.block#.fc2.": "encoder.block.#.layer.1.DenseReluDense.wo.",
}

T5_GATED = {
    **{ours: theirs.replace("wi.", "wi_0.") for ours, theirs in T5.items()},
    "decoder.block#.gate.": "decoder.block.#.layer.2.DenseReluDense.wi_1.",
    "encoder.block#.gate.": "encoder.block.#.layer.1.DenseReluDense.wi_1.",
}

T5_COPIES = dict.fromkeys(
    ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"), "token.w"
)


def _vgg(layers: Sequence[str]) -> Rules:
    """Number convolutions and batch norms as torchvision does, which counts ReLU and pooling."""
    convolutions = [layer for layer in layers if re.fullmatch(r"stage\d+\.conv\d+", layer)]
    width = 3 if any(re.fullmatch(r"stage\d+\.bn\d+", layer) for layer in layers) else 2
    rules = {f"head.fc{i}.": f"classifier.{3 * (i - 1)}." for i in (1, 2, 3)}
    for i, layer in enumerate(convolutions):
        pools = int(layer.removeprefix("stage").partition(".")[0]) - 1
        rules[f"{layer}."] = f"features.{width * i + pools}."
        rules[f"{layer.replace('conv', 'bn')}."] = f"features.{width * i + pools + 1}."
    return rules


def _mobilenet(layers: Sequence[str]) -> Rules:
    """Number the blocks of all stages in one sequence."""
    blocks = [*dict.fromkeys(re.findall(r"^stage\d+\.\d+(?=\.)", "\n".join(layers), re.MULTILINE))]
    last = f"features.{len(blocks) + 1}"
    rules = {
        "stem.conv.": "features.0.0.",
        "stem.bn.": "features.0.1.",
        "head.conv.": f"{last}.0.",
        "head.bn.": f"{last}.1.",
        "head.fc.": "classifier.1.",
    }
    for i, block in enumerate(blocks, start=1):
        units = [unit for unit in ("expand", "depthwise") if f"{block}.{unit}.conv" in layers]
        there = f"features.{i}.conv"
        for j, unit in enumerate(units):
            rules[f"{block}.{unit}.conv."] = f"{there}.{j}.0."
            rules[f"{block}.{unit}.bn."] = f"{there}.{j}.1."
        rules[f"{block}.project.conv."] = f"{there}.{len(units)}."
        rules[f"{block}.project.bn."] = f"{there}.{len(units) + 1}."
    return rules


NAMINGS = (
    Naming(RESNET),
    Naming(_vgg),
    Naming(ALEXNET),
    Naming(DENSENET),
    Naming(PUBLISHED_DENSENET),
    Naming(GOOGLENET),
    Naming(INCEPTION),
    Naming(_mobilenet),
    Naming(VIT, leading={"class_token": 2, "encoder.pos_embedding": 1}),
    Naming(PUBLISHED_VIT, leading={"class_token": 2, "encoder.pos_embedding": 1}),
    Naming(TIMM_VIT, leading={"cls_token": 2, "pos_embed": 1}, library="timm"),
    Naming(
        GPT,
        transposed=r"h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight",
        copies=GPT_COPIES,
        constants=GPT_CONSTANTS,
        library="hugging_face",
    ),
    # matrices as in PyTorch
    Naming(GPT, copies=GPT_COPIES, constants=GPT_CONSTANTS, library="nanogpt"),
    Naming(LLAMA, copies=GPT_COPIES, constants=LLAMA_CONSTANTS, library="hugging_face"),
    Naming(BERT, copies=BERT_COPIES, library="hugging_face"),
    Naming(T5, copies=T5_COPIES, library="hugging_face"),
    Naming(T5_GATED, copies=T5_COPIES, library="hugging_face"),
)
"""All of them: two that differ in layouts only are distinguished by the shapes of the arrays."""

LIBRARIES = tuple(dict.fromkeys(naming.library for naming in NAMINGS))


def parts_of(name: str) -> list[str]:
    """Return the names of the arrays there of which one here consists.

    >>> parts_of("self.query|key.weight")
    ['self.query.weight', 'self.key.weight']
    """
    joined = re.search(r"\w+(\|\w+)+", name)
    if joined is None:
        return [name]
    return [name.replace(joined[0], part) for part in joined[0].split("|")]


def named_as_in(library: str, slots: Sequence[ArraySlot]) -> list[ArraySlot]:
    """Return slots with the names and layouts of the network of a library.

    Raises
    ------
    ValueError
        If there is no such library here, or it has no such network.
    """
    if library not in LIBRARIES:
        raise ValueError(unknown("names", library, LIBRARIES))
    for naming in NAMINGS:
        named = naming.apply(slots) if naming.library == library else None
        if named is not None:
            return named
    raise ValueError(
        f"names: no network of {library} has the layers of this model; use like= with a state dict"
    )
