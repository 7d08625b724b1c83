"""Selection of the instruction set of the compiled kernels."""

from __future__ import annotations

import os

import pydtnn.kernels.cpu._isa as _isa

EMULATED = "amx_emulated"
"""`amx` with its instructions emulated, for tests: it must be asked for by name."""

INSTRUCTION_SETS = ("generic", "avx2", "avx512", "avx512_bf16", "amx", EMULATED)
"""Names, narrowest first; the index is the number in the compiled kernels."""

PAIRING = ("avx512_bf16", "amx", EMULATED)
"""Those that multiply pairs of bfloat16."""

ISA_VARIABLE = "PYDTNN_ISA"


def available() -> tuple[str, ...]:
    """Instruction sets that were built and that this CPU runs, the widest last."""
    return tuple(name for name in INSTRUCTION_SETS if name != EMULATED and runs(name))


def runs(name: str) -> bool:
    """Return whether an instruction set was built and this CPU runs it."""
    return name in INSTRUCTION_SETS and _isa.available(number(name))


def select_isa(name: str | None = None) -> str:
    """Choose the instruction set to use.

    Parameters
    ----------
    name : str, optional
        One of `INSTRUCTION_SETS`; by default the environment variable ``PYDTNN_ISA``, otherwise the
        widest one available.

    Returns
    -------
    str
        A member of ``available()``, or `EMULATED`.

    Raises
    ------
    ValueError
        If the instruction set is unknown, was not built, or the CPU does not have it.
    RuntimeError
        If all kernels were compiled for other CPUs.
    """
    if not available():
        raise RuntimeError(
            "the kernels have been compiled for other CPUs than this one: compile them here, or "
            "those of all by `PYDTNN_BUILD=all pip install .`"
        )
    source = "create_backend: isa" if name else ISA_VARIABLE
    name = name or os.environ.get(ISA_VARIABLE) or available()[-1]
    if not runs(name):
        raise ValueError(
            f"{source} must be an instruction set that this machine has, got {name!r}; "
            f"use one of {', '.join(available())}"
        )
    return name


def number(name: str) -> int:
    """Return the number of instruction set `name` in the compiled kernels."""
    return INSTRUCTION_SETS.index(name)


def of_float64(name: str) -> str | None:
    """Return whose kernels float64 has with instruction set `name`: not all have their own.

    None if kernels of float64 were not built.
    """
    return (*INSTRUCTION_SETS, None)[_isa.of_doubles(number(name))]  # -1: none
