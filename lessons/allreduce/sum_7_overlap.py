"""7 Overlap: the sum begins before all gradients are known.

No sum is faster than the bandwidth bound, but it need not be waited for. Backward yields the
gradients of the last layer first; the rings of this layer start at once and make progress whenever
the computation of earlier layers is interrupted to look for messages that have arrived (lesson 03).
What is left at the end of backward is the ring of the first layer, which is n / L elements if L
layers are equal, and what the network could not send meanwhile. A message that has arrived waits
for the next look, so that looking rarely costs time, too. The bytes are those of step 5; there are
L times as many messages.
"""

from sum_5_ring import ring


def backward(comm, layers, passes):
    """Compute the gradients (n / L,) of layers, the last one first, and sum them over all ranks.

    Parameters
    ----------
    comm : Communicator
    layers : list of ndarray
    passes : list of iterator
        The parts of the backward pass of each layer, after which its gradient is complete.
    """
    rings = []  # pairs: a ring, and the message that it waits for
    for tag, (gradient, parts) in enumerate(zip(layers, passes, strict=True)):
        for _ in parts:
            rings = advance(rings)
        started = ring(comm, gradient, tag)
        rings.append((started, next(started, None)))
    for started, message in rings:  # nothing is left to compute
        while message:
            message = next(started, None)


def advance(rings):
    """Start the next round of rings whose message has arrived."""
    return [
        (started, next(started, None) if message and message.test() else message)
        for started, message in rings
    ]
