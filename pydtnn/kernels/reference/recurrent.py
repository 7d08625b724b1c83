"""Reference kernels of recurrent layers: the steps, from the terms of the input.

The terms of the input, ``x w' + b`` of all steps, are one matrix product, and so are the gradients
of `w` and `u`: these are products of `Linear`. The kernels here contain what depends on the step
before.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydtnn.kernels.reference.family import Array, KernelFamily


class RecurrentKernels(KernelFamily):
    """States ``h (N, T, H)`` of LSTMs and GRUs.

    `u` (G H, H) and `b` (G H,) belong to the state before; `gates` (N, T, G H) contains the terms
    of the input and then the gates, i, f, g, o of an LSTM or r, z, n of a GRU. `first` are the
    states before the first step, h (N, H), and c (N, H) of an LSTM; zeros without them. With
    `reverse`, the steps go from the last time to the first. With `lengths` (N,) of int64, only the
    first times of a sample exist: states and gradients of the others are 0.

    References
    ----------
    Hochreiter and Schmidhuber, "Long short-term memory", Neural Computation 9(8), 1997; with forget
    gates: Gers et al., "Learning to forget", 2000. Cho et al., "Learning phrase representations
    using RNN encoder-decoder for statistical machine translation", EMNLP 2014, with the reset gate
    behind the product, as in cuDNN and PyTorch.
    """

    def lstm_forward(
        self,
        gates: Array,
        u: Array,
        b: Array,
        *,
        out: Array,
        cells: Array,
        first: Sequence[Array] = (),
        reverse: bool = False,
        lengths: Array | None = None,
    ) -> None:
        """Compute ``c = f c' + i g`` into `cells` and ``h = o tanh(c)`` into `out`."""
        xp = self.xp
        h, c = first or (xp.zeros_like(out[:, 0]), xp.zeros_like(out[:, 0]))
        for t in self._times(out, reverse):
            a = xp.split(gates[:, t] + h @ u.T + b, 4, axis=-1)
            i, f, g, o = (
                self._sigmoid(a[0]),
                self._sigmoid(a[1]),
                xp.tanh(a[2]),
                self._sigmoid(a[3]),
            )
            c = self._existing(f * c + i * g, t, lengths)
            h = self._existing(o * xp.tanh(c), t, lengths)
            gates[:, t] = xp.concatenate([i, f, g, o], axis=-1)
            cells[:, t], out[:, t] = c, h

    def lstm_backward(
        self,
        dy: Array,
        gates: Array,
        cells: Array,
        u: Array,
        *,
        out: Array,
        first: Sequence[Array] = (),
        dfirst: Sequence[Array] = (),
        reverse: bool = False,
        lengths: Array | None = None,
    ) -> None:
        """Compute the gradients of the terms of the input and of the state, which are equal.

        Those of `first` are stored in `dfirst`.
        """
        xp = self.xp
        dh = dc = xp.zeros_like(dy[:, 0])
        for t in self._times(dy, not reverse):
            i, f, g, o = xp.split(gates[:, t], 4, axis=-1)
            before = self._before(cells, t, reverse, first[1] if first else None)
            tanh, dh = xp.tanh(cells[:, t]), dy[:, t] + dh
            dc = dc + dh * o * (1 - tanh**2)
            da = [
                dc * g * i * (1 - i),
                dc * before * f * (1 - f),
                dc * i * (1 - g**2),
                dh * tanh * o * (1 - o),
            ]
            out[:, t] = self._existing(xp.concatenate(da, axis=-1), t, lengths)
            dh, dc = out[:, t] @ u, self._existing(dc * f, t, lengths)
        if dfirst:
            dfirst[0][...], dfirst[1][...] = dh, dc

    def gru_forward(
        self,
        gates: Array,
        u: Array,
        b: Array,
        *,
        out: Array,
        products: Array,
        first: Sequence[Array] = (),
        reverse: bool = False,
        lengths: Array | None = None,
    ) -> None:
        """Compute ``n = tanh(a + r (h' u' + b))`` and ``h = (1 - z) n + z h'`` into `out`.

        `products` (N, T, H) receives ``h' u' + b`` of n.
        """
        xp = self.xp
        (h,) = first or (xp.zeros_like(out[:, 0]),)
        for t in self._times(out, reverse):
            a, q = xp.split(gates[:, t], 3, axis=-1), xp.split(h @ u.T + b, 3, axis=-1)
            r, z = self._sigmoid(a[0] + q[0]), self._sigmoid(a[1] + q[1])
            n = xp.tanh(a[2] + r * q[2])
            h = self._existing((1 - z) * n + z * h, t, lengths)
            gates[:, t] = xp.concatenate([r, z, n], axis=-1)
            products[:, t], out[:, t] = q[2], h

    def gru_backward(
        self,
        dy: Array,
        gates: Array,
        y: Array,
        products: Array,
        u: Array,
        *,
        out: Array,
        dproducts: Array,
        first: Sequence[Array] = (),
        dfirst: Sequence[Array] = (),
        reverse: bool = False,
        lengths: Array | None = None,
    ) -> None:
        """Compute the gradients of the terms of the input, and into `dproducts` of the state.

        Both (N, T, 3 H); those of `first` are stored in `dfirst`.
        """
        xp = self.xp
        dh = xp.zeros_like(dy[:, 0])
        for t in self._times(dy, not reverse):
            r, z, n = xp.split(gates[:, t], 3, axis=-1)
            before = self._before(y, t, reverse, first[0] if first else None)
            dh = dy[:, t] + dh
            dn = dh * (1 - z) * (1 - n**2)
            dr, dz = dn * products[:, t] * r * (1 - r), dh * (before - n) * z * (1 - z)
            out[:, t] = self._existing(xp.concatenate([dr, dz, dn], axis=-1), t, lengths)
            dq = xp.concatenate([dr, dz, dn * r], axis=-1)
            dproducts[:, t] = self._existing(dq, t, lengths)
            dh = dproducts[:, t] @ u + self._existing(dh * z, t, lengths)
        if dfirst:
            dfirst[0][...] = dh

    @staticmethod
    def _times(y: Array, reverse: bool) -> range:
        length = y.shape[1]
        return range(length - 1, -1, -1) if reverse else range(length)

    def _before(self, states: Array, t: int, reverse: bool, first: Array | None) -> Array:
        """Return the states (N, H) of the step before time `t`."""
        other = t + 1 if reverse else t - 1
        if 0 <= other < states.shape[1]:
            return states[:, other]
        return self.xp.zeros_like(states[:, 0]) if first is None else first

    def _existing(self, value: Array, t: int, lengths: Array | None) -> Array:
        """Replace what belongs to samples that have ended by 0."""
        return value if lengths is None else self.xp.where((t < lengths)[:, None], value, 0)

    def _sigmoid(self, x: Array) -> Array:
        return (1 + self.xp.tanh(x / 2)) / 2
