"""`each`: as `pytest.mark.parametrize`, but all values in one test, for cases of milliseconds.

    @each("dtype", ["float32", "float64"])
    @each("size, parts", [(7, 1), (7, 3), (1013, 4)])
    def test_parts_add_up_to_the_whole(size, parts, dtype): ...

Fixtures are made once for all cases, except that each case has a folder `tmp_path` of its own,
empty `capsys` and `caplog`, and that what it changes by `monkeypatch` is undone. The first case
that fails ends the test, and its values stand below the error; cases that skip themselves are left
out. Ranks that are threads share such fixtures: with `comm` only `tmp_path` is allowed. With the
fixture `backend` a simulated GPU runs one of `FEW_SIMULATED` cases, drawn by the name of the test.
Where the first `each` has `few` cases, `make test` runs so many, and the others are long.
"""

from __future__ import annotations

import functools
import inspect
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tests import gpu

FEW_SIMULATED = 8
"""Of so many cases that all backends have, one is run on a simulated GPU: its kernels have others,
in tests/kernels/cuda."""

PARTS = ["few", pytest.param("others", marks=pytest.mark.long)]

PER_PROCESS = ("capfd", "caplog", "capsys", "monkeypatch")


def each(names: str | Sequence[str], values: Iterable[Any], few: int = 0) -> Callable[..., Any]:
    """Call a test with each of the values, or rows of values, of its parameters `names`."""
    listed = re.findall(r"\w+", names) if isinstance(names, str) else [*names]
    values = [*values]
    if any(isinstance(value, type(pytest.param())) for value in values):
        raise pytest.UsageError("each: a case cannot have marks: use pytest.mark.parametrize.")
    rows = [dict(zip(listed, [row] if len(listed) == 1 else row, strict=True)) for row in values]

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        inner, rows_inside = getattr(test, "cases", (test, [{}]))
        cases = [outside | inside for outside in rows for inside in rows_inside]

        @functools.wraps(inner)
        def run(*args: Any, **fixtures: Any) -> None:
            skipped: list[BaseException] = []
            chosen = cases
            if few:
                some = {int((i + 0.5) * len(cases) / few) for i in range(few)}
                others = fixtures.pop("part") == "others"
                chosen = [case for i, case in enumerate(cases) if (i in some) != others]
            if getattr(fixtures.get("backend"), "name", "") == "cuda" and gpu.why_not():
                order = np.random.default_rng(zlib.crc32(inner.__qualname__.encode()))
                number = -(-len(chosen) // FEW_SIMULATED)
                chosen = [chosen[i] for i in order.permutation(len(chosen))[:number]]
            for number, case in enumerate(chosen):
                try:
                    with _afresh(fixtures, number) as own:
                        inner(*args, **own, **case)
                except pytest.skip.Exception as skip:
                    skipped.append(skip)
                except BaseException as error:
                    error.add_note(", ".join(f"{name} = {case[name]!r}" for name in case))
                    raise
            if len(skipped) == len(chosen):
                raise skipped[0]

        signature = inspect.signature(test)
        if not cases or {*listed} - {*signature.parameters}:
            raise pytest.UsageError(f"{test.__qualname__}: no parameters or no values of {names}.")
        if "comm" in signature.parameters and {*signature.parameters} & {*PER_PROCESS}:
            raise pytest.UsageError(f"{test.__qualname__}: ranks share {', '.join(PER_PROCESS)}.")
        left = [one for name, one in signature.parameters.items() if name not in listed]
        marks = getattr(test, "pytestmark", [])
        if few:
            left.append(inspect.Parameter("part", inspect.Parameter.KEYWORD_ONLY))
            marks = [*marks, pytest.mark.parametrize("part", PARTS).mark]
        run.__dict__.update(
            pytestmark=marks,
            cases=(inner, cases),
            __signature__=signature.replace(parameters=left),
        )
        return run

    return decorate


@contextmanager
def _afresh(fixtures: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """Give the fixtures of a case, without what earlier ones have left in them."""
    own = dict(fixtures)
    if "tmp_path" in own:
        own["tmp_path"] = own["tmp_path"] / f"case{number}"
        own["tmp_path"].mkdir(exist_ok=True)  # another rank may have made it
    for name in {"capsys", "capfd"} & {*own}:
        own[name].readouterr()
    if "caplog" in own:
        own["caplog"].clear()
    with pytest.MonkeyPatch.context() as patch:
        if "monkeypatch" in own:
            own["monkeypatch"] = patch
        yield own
