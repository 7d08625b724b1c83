"""The nominal work of a layer: arithmetic, and bytes between kernels and memory."""

from __future__ import annotations

from typing import NamedTuple


class Cost(NamedTuple):
    """Floating-point operations and bytes moved by a pass in training, forward and backward.

    An addition, multiplication, comparison, division, square root or elementary function is one
    operation, counted as in the definition of a layer: fast algorithms perform fewer. Bytes are
    those of each sweep of a kernel over an array of the size of a map or a matrix: an array that is
    read twice counts twice, one that stays in registers or in the first cache between two uses does
    not count again. Operations and bytes per channel are not counted.
    """

    flops_forward: int
    flops_backward: int
    bytes_forward: int
    bytes_backward: int

    def __add__(self, other: object) -> Cost:
        """Return the sum of two costs."""
        if not isinstance(other, Cost):
            return NotImplemented
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))

    def of_pass(self, backward: bool) -> tuple[int, int]:
        """Return the operations and the bytes of one of both passes."""
        flops, nbytes = self[int(backward) :: 2]
        return flops, nbytes

    def with_second_forward(self) -> Cost:
        """Return the cost of a pass whose forward runs again in backward."""
        return self + Cost(0, self.flops_forward, 0, self.bytes_forward)


NO_COST = Cost(0, 0, 0, 0)
"""The cost of a pass that only passes arrays on."""


def per_element(
    elements: tuple[int, int], itemsize: int, forward: int, backward: int, *, saved: int = 1
) -> Cost:
    """Return the cost of an operation on each element of the output.

    Parameters
    ----------
    elements : (int, int)
        Of the inputs, and of the output.
    itemsize : int
        Length of an element, in B.
    forward, backward : int
        Operations per element.
    saved : int, default 1
        Arrays like the output that backward reads besides dy.
    """
    inputs, outputs = elements
    return Cost(
        forward * outputs,
        backward * outputs,
        (inputs + outputs) * itemsize,
        ((1 + saved) * outputs + inputs) * itemsize,
    )
