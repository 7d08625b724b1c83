"""Recurrent kernels against the reference on every instruction set, and the reference itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from pydtnn.kernels import Backend
from pydtnn.kernels.reference import RecurrentKernels
from tests.each import each
from tests.kernels.checks import numeric_gradient, same_for_all_threads
from tests.kernels.guarded import assert_guards_hold, guarded

REFERENCE = RecurrentKernels(np)
TOLERANCE = {np.float32: 2e-5, np.float64: 1e-12}
"""In norm, at least that of one state: sums of up to 600 products in chains of up to 9 steps."""

CELLS = {"lstm": 4, "gru": 3}
"""Gates of a cell."""

SIZES = [  # samples, steps, units; more than DEPTH gates, more than DEPTH states
    *((1, 1, 1), (0, 3, 5), (3, 1, 7), (1, 5, 13), (2, 4, 16), (5, 3, 17), (7, 9, 31), (13, 2, 64)),
    *((29, 4, 67), (6, 2, 150), (3, 2, 600)),
]
VARIANTS: dict[str, dict[str, bool]] = {
    "plain": {},
    "reverse": {"reverse": True},
    "states": {"states": True},
    "reverse, states": {"reverse": True, "states": True},
    "lengths": {"lengths": True},
    "reverse, lengths": {"reverse": True, "lengths": True},
}


def operands(cell: str, size: tuple[int, int, int], variant: dict[str, bool]) -> dict[str, Any]:
    """Float64 arrays, with terms of the input and products of a deviation of about 1."""
    rng, (n, steps, units) = np.random.default_rng(sum(size)), size
    rows = CELLS[cell] * units
    made: dict[str, Any] = {
        "gates": rng.standard_normal((n, steps, rows)),
        "u": rng.standard_normal((rows, units)) / units**0.5,
        "b": rng.standard_normal(rows),
        "dy": rng.standard_normal((n, steps, units)),
    }
    if "states" in variant:
        made["first"] = rng.standard_normal((2 if cell == "lstm" else 1, n, units))
    if "lengths" in variant:
        made["lengths"] = rng.integers(0, steps + 1, n)
    return made


def run(
    recurrent: RecurrentKernels,
    cell: str,
    arrays: dict[str, Any],
    dtype: Any,
    *,
    reverse: bool = False,
) -> dict[str, np.ndarray]:
    """Both kernels on guarded copies, into outputs full of NaN."""

    def empty(like: np.ndarray) -> np.ndarray:
        return guarded(np.full(like.shape, np.nan, dtype))

    gates, u, b, dy = (guarded(arrays[name].astype(dtype)) for name in ("gates", "u", "b", "dy"))
    first = [guarded(state.astype(dtype)) for state in arrays.get("first", ())]
    options = {"first": first, "reverse": reverse, "lengths": arrays.get("lengths")}
    y, kept, dgates, dfirst = empty(dy), empty(dy), empty(gates), [empty(s) for s in first]
    results = {"y": y, "kept": kept, "gates": gates, "dgates": dgates}
    results |= {f"dfirst{i}": state for i, state in enumerate(dfirst)}
    if cell == "lstm":
        recurrent.lstm_forward(gates, u, b, out=y, cells=kept, **options)
        recurrent.lstm_backward(dy, gates, kept, u, out=dgates, dfirst=dfirst, **options)
    else:
        dproducts = results["dproducts"] = empty(gates)
        recurrent.gru_forward(gates, u, b, out=y, products=kept, **options)
        recurrent.gru_backward(
            *(dy, gates, y, kept, u),
            **{"out": dgates, "dproducts": dproducts, "dfirst": dfirst},
            **options,
        )
    for array in results.values():
        assert_guards_hold(array)
    if "lengths" in arrays:  # gates after the end are not defined
        ended = np.arange(dy.shape[1]) >= arrays["lengths"][:, None]
        for name in ("y", "dgates"):
            assert not results[name][ended].any()
        for name in ("gates", "kept"):
            results[name][ended] = 0
    return results


@each("dtype", [np.float32, np.float64])
@each("size, variant", [*zip(SIZES * 2, [*VARIANTS] * 4, strict=False)])
@each("cell", CELLS)
def test_steps_agree_with_the_reference(cell, size, variant, dtype, cpu_backend):
    chosen = VARIANTS[variant]
    arrays, reverse = operands(cell, size, chosen), "reverse" in chosen
    rounded = {k: v.astype(dtype) if k != "lengths" else v for k, v in arrays.items()}
    expected = run(REFERENCE, cell, rounded, np.float64, reverse=reverse)
    for name, value in run(cpu_backend.recurrent, cell, arrays, dtype, reverse=reverse).items():
        error, norm = (np.linalg.norm(a) for a in (value - expected[name], expected[name]))
        assert error <= TOLERANCE[dtype] * max(norm, 1), name


@each("variant", VARIANTS)
@each("cell", CELLS)
def test_the_gradients_of_the_reference_are_those_of_its_outputs(cell, variant):
    chosen = VARIANTS[variant]
    arrays, reverse = operands(cell, (2, 3, 4), chosen), "reverse" in chosen
    found = run(REFERENCE, cell, arrays, np.float64, reverse=reverse)

    def loss(changed: dict[str, Any]) -> np.ndarray:
        y = run(REFERENCE, cell, arrays | changed, np.float64, reverse=reverse)["y"]
        return y * arrays["dy"]

    terms = numeric_gradient(lambda a: loss({"gates": a}), arrays["gates"], 1.0)
    np.testing.assert_allclose(found["dgates"], terms, atol=1e-8)
    dproducts = found.get("dproducts", found["dgates"])
    biases = numeric_gradient(lambda b: loss({"b": b}), arrays["b"], 1.0)
    np.testing.assert_allclose(dproducts.sum(axis=(0, 1)), biases, atol=1e-8)
    if "states" in chosen:
        states = numeric_gradient(lambda s: loss({"first": s}), arrays["first"], 1.0)
        for i, state in enumerate(states):
            np.testing.assert_allclose(found[f"dfirst{i}"], state, atol=1e-8)


@each("cell", CELLS)
def test_results_do_not_depend_on_the_number_of_threads(cell, cpu_backend):
    arrays = operands(cell, (40, 3, 210), {"states": True})

    def results(backend: Backend) -> list[np.ndarray]:
        return [*run(backend.recurrent, cell, arrays, np.float32).values()]

    same_for_all_threads(cpu_backend, results)


def test_large_terms_saturate_without_overflow(cpu_backend):
    for cell in CELLS:
        arrays = operands(cell, (3, 2, 9), {})
        arrays["gates"] *= 1e4
        expected = run(REFERENCE, cell, arrays, np.float64)
        for name, value in run(cpu_backend.recurrent, cell, arrays, np.float64).items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-12, atol=1e-15)
