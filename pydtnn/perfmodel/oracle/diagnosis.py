"""What limits a strategy: the largest part of its time, with the layer that contributes most."""

from __future__ import annotations

from pydtnn.perfmodel.projection import Projection


def bottleneck(projection: Projection) -> str:
    """Return the part of a step that takes the most time, in words.

    Parameters
    ----------
    projection : Projection

    Returns
    -------
    str
        Such as "compute (stage1.0.conv2 4 %)" or "sums of gradients".
    """
    step = projection.step
    compute = step.forward + step.backward + step.recomputed
    parts = {
        "compute": compute,
        "exchanges of layers": step.layers_exposed,
        "sums of gradients": step.gradients_exposed,
        "waits for stages": step.idle,
        "update": step.update,
        "Python": step.other,
        "loader": projection.loader,
    }
    name = max(parts, key=lambda part: parts[part])
    if name == "compute":
        layer = max(step.layers, key=lambda one: one.compute)
        return f"compute ({layer.name} {100 * layer.compute / projection.seconds:.0f} %)"
    if name == "exchanges of layers":
        layer = max(step.layers, key=lambda one: one.exchange)
        return f"exchanges ({layer.name} {100 * layer.exchange / projection.seconds:.0f} %)"
    return name


def largest_tensor(projection: Projection) -> str:
    """Return the largest part of the memory of a rank, in words."""
    memory = projection.memory
    parts = {
        "activations": memory.activations,
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.slots,
        "buffers": memory.other,
    }
    return max(parts, key=lambda part: parts[part])
