"""Recurrent networks that predict each token of a sequence from those before it."""

from __future__ import annotations

from functools import partial
from typing import Any

from pydtnn.layers import GRU, LSTM, Dropout, Embedding, Linear, Sequential
from pydtnn.models.tokens import check_tokens
from pydtnn.utils.validate import check_int


def char_rnn(
    classes: int,
    input_shape: tuple[int, ...],
    *,
    kind: str = "lstm",
    width: int = 256,
    layers: int = 2,
    dropout: float = 0.0,
) -> Sequential:
    """An embedding of tokens, recurrent layers, and logits of the next token at each position.

    Parameters
    ----------
    classes : int
        Number of different tokens K.
    input_shape : tuple of int
        ``(T,)``, the length of a sequence.
    kind : str
        "lstm" or "gru".
    width : int
        Features of a token, and of the state of each layer.
    layers : int
    dropout : float
        Rate after each recurrent layer.

    Returns
    -------
    Sequential
        Gives logits ``(N, T, K)`` of the next token at each position, from tokens ``(N, T)``.

    Raises
    ------
    ValueError
        If the input is not a sequence of tokens, or there is no such kind.

    References
    ----------
    Graves, "Generating sequences with recurrent neural networks", 2013 (arXiv:1308.0850), section
    3. Zaremba, Sutskever and Vinyals, "Recurrent neural network regularization", 2014
    (arXiv:1409.2329), for dropout between layers.
    """
    check_tokens("char_rnn", input_shape)
    kinds: dict[str, Any] = {"lstm": LSTM, "gru": GRU}
    if kind not in kinds:
        raise ValueError(f"char_rnn: kind must be lstm or gru, got {kind!r}")
    check_int("char_rnn", "width", width, at_least=1)
    recurrent = kinds[kind](width, layers=layers, dropout=dropout, name=kind)
    last = [Dropout(dropout, name="dropout")] if dropout else []
    return Sequential(
        Embedding(classes, width, name="token"),
        recurrent,
        *last,
        Linear(classes, name="head"),
    )


char_lstm = partial(char_rnn, kind="lstm")
char_gru = partial(char_rnn, kind="gru")
