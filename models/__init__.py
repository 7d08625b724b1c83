"""Networks from the literature: plain functions of (classes, input_shape) that return a net.

>>> from pydtnn.models import create_net, resnet20
>>> net = resnet20(10, (32, 32, 3))
>>> net = create_net("resnet20", 10, (32, 32, 3), shortcut="A")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydtnn.layers import Block, Layer, Net
from pydtnn.utils.lazy import Named, lazy
from pydtnn.utils.registry import Registry

if TYPE_CHECKING:
    from pydtnn.models.alexnet import alexnet
    from pydtnn.models.bert import bert, bert_base, bert_nano, bert_small
    from pydtnn.models.cnn import cnn, cnn1d, whitened_cnn
    from pydtnn.models.cosmoflow import cosmoflow
    from pydtnn.models.densenet import (
        cifar_densenet,
        densenet40,
        densenet100,
        densenet121,
        densenet161,
        densenet169,
        densenet201,
        imagenet_densenet,
    )
    from pydtnn.models.googlenet import googlenet
    from pydtnn.models.gpt import gpt, gpt2_small, gpt_nano, moe_gpt, moe_gpt_nano
    from pydtnn.models.inception import inception_v3
    from pydtnn.models.llama import llama, llama_nano
    from pydtnn.models.lstm import char_gru, char_lstm, char_rnn
    from pydtnn.models.mlp import mlp
    from pydtnn.models.mobilenet import mobilenet_v1, mobilenet_v2
    from pydtnn.models.resnet import (
        cifar_resnet,
        imagenet_resnet,
        resnet8,
        resnet18,
        resnet20,
        resnet32,
        resnet34,
        resnet44,
        resnet50,
        resnet56,
        resnet101,
        resnet110,
        resnet152,
        resnet1202,
        resnext50,
    )
    from pydtnn.models.t5 import t5, t5_nano, t5_small
    from pydtnn.models.transformer import transformer, transformer_base, transformer_nano
    from pydtnn.models.vgg import (
        vgg,
        vgg11,
        vgg11_bn,
        vgg13,
        vgg13_bn,
        vgg16,
        vgg16_bn,
        vgg19,
        vgg19_bn,
    )
    from pydtnn.models.vit import vit, vit_b16, vit_small, vit_tiny

MODELS = Named(
    __name__,
    [
        "mlp",
        "cnn",
        "cnn1d",
        "whitened_cnn",
        "alexnet",
        "vgg11",
        "vgg11_bn",
        "vgg13",
        "vgg13_bn",
        "vgg16",
        "vgg16_bn",
        "vgg19",
        "vgg19_bn",
        "resnet8",
        "resnet20",
        "resnet32",
        "resnet44",
        "resnet56",
        "resnet110",
        "resnet1202",
        "resnet18",
        "resnet34",
        "resnet50",
        "resnet101",
        "resnet152",
        "resnext50",
        "densenet40",
        "densenet100",
        "densenet121",
        "densenet161",
        "densenet169",
        "densenet201",
        "googlenet",
        "inception_v3",
        "gpt",
        "gpt_nano",
        "gpt2_small",
        "moe_gpt",
        "moe_gpt_nano",
        "llama",
        "llama_nano",
        "bert_base",
        "bert_small",
        "bert_nano",
        "transformer_base",
        "transformer_nano",
        "t5_small",
        "t5_nano",
        "char_lstm",
        "char_gru",
        "vit_tiny",
        "vit_small",
        "vit_b16",
        "mobilenet_v1",
        "mobilenet_v2",
        "cosmoflow",
    ],
)
"""Factories by name: each takes (classes, input_shape) and options of its own."""

MODEL: Registry[Net] = Registry(
    "model", MODELS, Layer | Block, "a layer, a block or a function of (classes, input_shape)"
)


def create_net(
    name: str | Callable[..., Net], classes: int, input_shape: Any, **options: Any
) -> Net:
    """Make the network called `name`.

    Parameters
    ----------
    name : str or callable
        A key of `MODELS`, ``path/to/file.py:function``, or a function like theirs.
    classes : int
        Logits of the output; of a regression, its targets.
    input_shape : tuple of int
        Shape of one sample, ``(H, W, C)`` for images, ``(D, H, W, C)`` for volumes, ``(L, C)`` for
        signals, ``(T,)`` for tokens; one shape for each input if there are several.
    **options
        The factory's own, such as ``shortcut="A"`` of the CIFAR ResNets.

    Returns
    -------
    Block or Layer

    Raises
    ------
    TypeError, ValueError
        For what makes no network, for an unknown name or option, with the nearest ones, and for an
        input that is too small.
    """
    return MODEL.find(name).make(options, classes, input_shape)


__all__ = [
    "MODELS",
    "alexnet",
    "bert",
    "bert_base",
    "bert_nano",
    "bert_small",
    "char_gru",
    "char_lstm",
    "char_rnn",
    "cifar_densenet",
    "cifar_resnet",
    "cnn",
    "cnn1d",
    "cosmoflow",
    "create_net",
    "densenet40",
    "densenet100",
    "densenet121",
    "densenet161",
    "densenet169",
    "densenet201",
    "googlenet",
    "gpt",
    "gpt2_small",
    "gpt_nano",
    "imagenet_densenet",
    "imagenet_resnet",
    "inception_v3",
    "llama",
    "llama_nano",
    "mlp",
    "mobilenet_v1",
    "mobilenet_v2",
    "moe_gpt",
    "moe_gpt_nano",
    "resnet101",
    "resnet110",
    "resnet1202",
    "resnet152",
    "resnet18",
    "resnet8",
    "resnet20",
    "resnet32",
    "resnet34",
    "resnet44",
    "resnet50",
    "resnet56",
    "resnext50",
    "t5",
    "t5_nano",
    "t5_small",
    "transformer",
    "transformer_base",
    "transformer_nano",
    "vgg",
    "vgg11",
    "vgg11_bn",
    "vgg13",
    "vgg13_bn",
    "vgg16",
    "vgg16_bn",
    "vgg19",
    "vgg19_bn",
    "vit",
    "vit_b16",
    "vit_small",
    "vit_tiny",
    "whitened_cnn",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = lazy(__name__)
