"""The error of Winograd's convolutions; `test_conv.py` and others run them on every geometry."""

import numpy as np
import pytest

from pydtnn.kernels.cpu.conv import candidates
from tests.each import each
from tests.kernels.geometries import geometry
from tests.kernels.test_conv import REFERENCE, cast, directions, operands, run

ERRORS = [
    *((((size, size), 16 * 32 // size, (3, 3), 1), (3, 1.1)) for size in (32, 16, 8)),
    *(
        (((32, 32), channels, (k, k), 2), (4,))
        for k, channels in ((3, 16), (3, 64), (5, 32), (7, 3))
    ),
    *((((20, 20), 64, kernel, 1), (2,)) for kernel in ((1, 3), (3, 1), (1, 5), (5, 1))),
    *((((20, 20), 64, kernel, 1), (3.2,)) for kernel in ((1, 7), (7, 1))),
    (((20, 20), 64, (5, 5), 1), (2.6,)),
]
"""Size, channels, kernel and stride; most error of each algorithm, in units of the direct one's.

That is 2.1 to 2.5 for F(4x4, 3x3) and for phases, 0.7 to 0.8 for F(2x2, 3x3), 1.7 for F(4, 3), 2.7
for F(5, 4), 2.2 for 5x5, here with a margin."""


@each("where, most", ERRORS)
def test_the_error_is_what_the_design_note_says(cpu_backend, rng, where, most):
    size, channels, kernel, stride = where
    shape = geometry(size, channels, 32, kernel, stride, tuple((k // 2, k // 2) for k in kernel))
    arrays = cast(operands(rng, max(4096 // size[0] ** 2, 4), shape), np.float32)
    arrays["b"][...] = 0
    names = candidates(shape)
    for direction, exact in directions(arrays, shape).items():
        direct, *others = (
            np.linalg.norm(run(cpu_backend.conv, direction, arrays, shape, algorithm=name) - exact)
            / np.linalg.norm(exact)
            for name in names
        )
        for name, own, bound in zip(names[1:], others, most, strict=True):
            assert own <= bound * direct, name
            assert own <= 2e-6
            assert own > direct or name not in ("winograd4", "polyphase") or kernel != (3, 3)


@each("kernel", [(1, 7), (5, 5)])
@each("change", [{"stride": 3}, {"groups": 2}, {"dilation": 2}])
def test_other_strides_groups_and_dilations_are_direct(cpu_backend, kernel, change):
    shape = geometry((9, 9), 4, 4, kernel, padding=4, **change)
    assert candidates(shape) == ("direct",)
    x, w, y = (np.zeros(s) for s in ((1, 9, 9, 4), shape.weight_shape, (1, *shape.output, 4)))
    with pytest.raises(ValueError, match="expected one of direct for .*, got winograd4"):
        cpu_backend.conv.forward(x, w, None, shape, out=y, algorithm="winograd4")


def test_an_outlier_costs_only_large_tiles_digits_of_outputs_that_do_not_read_it(cpu_backend):
    """What docs/performance.md says of F(4x4), of direct algorithms and of F(2x2)."""
    place = geometry((16, 16), 16, 16, (3, 3), padding=1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 16, 16, 16)).astype(np.float32)
    w = (rng.normal(size=(16, 3, 3, 16)) / 12).astype(np.float32)
    errors, reaches = {}, {}
    for value in (1e4, np.inf):
        x[0, 7, 6, 3] = value
        exact = np.empty((1, 16, 16, 16))
        with np.errstate(invalid="ignore"):
            REFERENCE.forward(x.astype(float), w.astype(float), None, place, out=exact)
        others = np.ones((16, 16), bool)
        others[6:9, 5:8] = False
        size = np.sqrt((exact[0, others] ** 2).mean())
        for algorithm in ("direct", "winograd2", "winograd4"):
            y = np.empty(exact.shape, np.float32)
            cpu_backend.conv.forward(x, w, None, place, out=y, algorithm=algorithm)
            if value == np.inf:
                reaches[algorithm] = (~np.isfinite(y)).any(axis=-1).sum()
            else:
                errors[algorithm] = np.abs(y - exact)[0, others].max() / size
    assert errors["direct"] < 1e-5
    assert errors["winograd2"] < 1e-5
    assert 1e-4 < errors["winograd4"] < 5e-3
    assert reaches["direct"] == 9
    assert 9 < reaches["winograd4"] <= 25
