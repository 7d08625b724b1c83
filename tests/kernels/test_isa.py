"""The choice of an instruction set."""

import platform
import re
from pathlib import Path

import numpy as np
import pytest

from pydtnn.kernels import create_backend
from pydtnn.kernels.cpu._linear import LinearKernels
from pydtnn.kernels.cpu.isa import (
    EMULATED,
    INSTRUCTION_SETS,
    ISA_VARIABLE,
    available,
    number,
    of_float64,
    runs,
    select_isa,
)
from tests.conftest import repeats


def test_the_widest_set_is_the_default_which_the_environment_lowers_and_an_argument_overrides(
    monkeypatch,
):
    assert available()[0] == "generic"
    assert {*available()} <= {*INSTRUCTION_SETS}
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    assert select_isa() == create_backend("cpu").isa == available()[-1]
    for name in available():
        monkeypatch.setenv(ISA_VARIABLE, name)
        assert create_backend("cpu").isa == name
    monkeypatch.setenv(ISA_VARIABLE, "sse9")
    for name in available():
        assert create_backend("cpu", isa=name).isa == name
    with pytest.raises(ValueError, match="PYDTNN_ISA must be .*'sse9'; use one of generic"):
        create_backend("cpu")
    with pytest.raises(ValueError, match="'sse9'; use one of generic"):
        create_backend("cpu", isa="sse9")


def test_emulated_instructions_must_be_asked_for():
    assert EMULATED not in available()
    if runs(EMULATED):
        assert create_backend("cpu", isa=EMULATED).isa == EMULATED
    else:
        with pytest.raises(ValueError, match="must be an instruction set that this machine has"):
            create_backend("cpu", isa=EMULATED)


def test_a_variant_that_was_not_built_is_refused():
    for name in available():
        LinearKernels(number(name))
    with pytest.raises(ValueError, match="not built"):
        LinearKernels(len(INSTRUCTION_SETS))
    if platform.machine() != "x86_64":
        with pytest.raises(ValueError, match="not built"):
            LinearKernels(number("avx2"))


def test_float64_has_the_kernels_of_the_widest_set_that_was_built_with_them():
    assert of_float64("generic") == "generic"
    sets = [name for name in available() if name in ("generic", "avx2", "avx512")]
    assert of_float64(sets[-1]) == sets[-1] == of_float64(available()[-1])  # the native one
    for name in sets:
        found = of_float64(name)
        assert found in sets
        assert number(found) <= number(name)
        x = np.random.default_rng(1).standard_normal((7, 65))
        w = np.random.default_rng(2).standard_normal((33, 65))
        y, expected = np.empty((7, 33)), np.empty((7, 33))
        LinearKernels(number(name)).forward(x, w, None, y, 1)
        LinearKernels(number(found)).forward(x, w, None, expected, 1)
        np.testing.assert_array_equal(y, expected)
        np.testing.assert_allclose(y, x @ w.T, rtol=1e-12, atol=1e-12)  # another order of sums


def test_every_instruction_that_a_variant_is_compiled_with_is_asked_of_the_cpu():
    root = Path(__file__).resolve().parents[2]
    setup = (root / "setup.py").read_text()
    used = {name.partition("-")[0] for name in re.findall(r'"-m([\w-]+)"', setup)}
    header = (root / "pydtnn/kernels/cpu/src/available.h").read_text()
    _, _, function = header.partition("int isa_available(int isa)")
    asked = {
        *re.findall(r'cpu_supports\("(\w+)"\)', function),
        *re.findall(r"has_(\w+)\(\)", function),
    }
    assert {"avx2", "f16c", "lzcnt", "avx512cd", "amx"} <= used
    assert used == asked


def test_kernels_that_were_compiled_for_other_cpus_say_so(monkeypatch):
    monkeypatch.setattr("pydtnn.kernels.cpu.isa.runs", lambda name: False)
    with pytest.raises(RuntimeError, match=r"for other CPUs than this one: .* `PYDTNN_BUILD=all"):
        create_backend("cpu")


def test_of_cases_that_run_the_same_kernels_one_remains():
    every = [of_float64(name) for name in available()]
    remaining = [of_float64(name) for name in available() if not repeats(name, 8)]
    assert sorted(map(str, remaining)) == sorted(map(str, {*every}))
    assert not any(repeats(name, 2) for name in available())
    assert not repeats(available()[-1], 4)
    assert not repeats("generic", 8)
