"""Convolution, batch norm and activation, of which many networks for images consist."""

from __future__ import annotations

from pydtnn.layers import BatchNorm, Conv2d, Layer, Net, ReLU, Sequential

Pair = int | tuple[int, int]


def unit(
    filters: int,
    kernel: Pair,
    *,
    stride: int = 1,
    padding: Pair = 0,
    groups: int = 1,
    epsilon: float = 1e-5,
    activation: type[Layer] | None = ReLU,
    name: str | None = None,
) -> Sequential:
    """Convolution without bias, batch norm and an activation.

    Parameters
    ----------
    filters : int
    kernel, padding : int or pair
    stride, groups : int
    epsilon : float
        Of batch norm.
    activation : class of Layer, optional
        None for a linear unit.
    name : str, optional

    Returns
    -------
    Sequential
        With the layers "conv", "bn" and, unless it is linear, "relu".
    """
    conv = Conv2d(
        filters, kernel, stride=stride, padding=padding, groups=groups, bias=False, name="conv"
    )
    parts: list[Net] = [conv, BatchNorm(epsilon=epsilon, name="bn")]
    if activation is not None:
        parts.append(activation(name="relu"))
    return Sequential(*parts, name=name)
