"""The two halves of backward, which pipeline schedules without bubbles run one after the other."""

from __future__ import annotations

from pydtnn.layers.base import Layer
from pydtnn.layers.node import Node
from pydtnn.model.execution import BackwardPass, deliver
from pydtnn.model.passes import Hook, Pass, Run
from pydtnn.utils.observer import HALVES


def in_halves(layer: Layer) -> bool:
    """Return whether a layer computes the gradients of inputs and of parameters apart."""
    own = type(layer).backward_inputs is not Layer.backward_inputs
    return own and not layer.communicates(training=True, joint=False)


def has_halves(layer: Layer) -> bool:
    """Return whether a layer's first half of backward leaves something to the second."""
    return in_halves(layer) and layer.trainable


def suffix(node: Node) -> str:
    """Return what follows the name of a node in the first half of backward."""
    return HALVES[0] if has_halves(node.layer) else ""


class FirstHalf(Hook):
    """A layer in two halves leaves in the residuals what its second half requires."""

    def backward(self, run: Run) -> Run:
        """Run the first half of such a layer, and all of another one."""
        return lambda node, state: (_first if has_halves(node.layer) else run)(node, state)


def _first(node: Node, state: BackwardPass) -> Pass:
    layer = node.layer
    dxs, left = layer.backward_inputs(layer.accept(state.take(node)), state.residuals[node.index])
    state.residuals[node.index] = left
    deliver(node, state, dxs)
    return
    yield  # a generator, as passes of layers that communicate


class SecondHalf(Hook):
    """Nodes run whose first half has left something."""

    def parameters(self, run: Run) -> Run:
        """Run no other node."""

        def second(node: Node, state: BackwardPass) -> Pass:
            if state.residuals[node.index] is not None:
                yield from run(node, state)

        return second


def second_half(node: Node, state: BackwardPass) -> Pass:
    """Compute the gradients of a node's parameters."""
    left, state.residuals[node.index] = state.residuals[node.index], None
    node.layer.backward_parameters(left)
    return
    yield
