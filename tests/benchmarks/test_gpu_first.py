"""The first thing to start on a GPU, on a simulated one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.each import each
from tests.simulated.backend import installed, why_not
from tests.simulated.cupy import SimulatedCupy

SMALL = ("--here", "--model", "mlp", "--size", "4", "--work", "mlp-8")

simulated = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


@pytest.fixture
def first(monkeypatch):
    """The program, its measurements short."""
    monkeypatch.setenv("PYDTNN_TUNING", "fixed")
    from tests.gpu_check import first as gpu_first
    from tests.gpu_check import first_checks as gpu_first_checks

    for name, value in {"COPIED": 512, "COPIES": 2, "TURNS": (2, 2), "WITH_TORCH": False}.items():
        monkeypatch.setattr(gpu_first_checks, name, value)
    return gpu_first


@pytest.fixture
def gpu(first, monkeypatch):
    """Let the backend be made of a simulated GPU."""
    from tests.gpu_check import first_checks as gpu_first_checks

    device = SimulatedCupy(eager=True)
    monkeypatch.setattr(
        device.cuda.runtime, "memGetInfo", lambda: (1 << 30, 1 << 31), raising=False
    )
    known = gpu_first_checks.libraries
    stand_in = SimpleNamespace(
        usable_cupy=lambda: device,
        load=lambda name: SimpleNamespace(path=f"lib{name}.so"),
        WANTED=known.WANTED,
        Unavailable=known.Unavailable,
    )
    monkeypatch.setattr(gpu_first_checks, "libraries", stand_in)
    monkeypatch.setattr(gpu_first_checks, "compile_with_nvrtc", lambda *_: b"")
    with installed(device):
        yield device


SAID = {
    "gpu": "1024 of 2048 MB free",
    "compilers": "NVRTC compiles norm.cu in",
    "kernels": "bfloat16: map, sums and product are right",
    "convolutions": "backward_filter float16: graph ",
    "graphs": "work is captured, and its replays are right",
    "nccl": "one rank, captured and replayed",
    "steps": ", one CUDA graph",
    "bandwidth": " GB/s",
    "speed": "mlp-8 bfloat16, ours: ",
}


@simulated
@each("name", SAID)
def test_each_check_says_what_it_saw(first, gpu, capsys, name):
    assert set(first.CHECKS) == set(SAID)
    assert first.main([name, *SMALL]) == 0
    assert SAID[name] in capsys.readouterr().out


@simulated
def test_what_is_computed_wrongly_is_told_and_the_rest_goes_on(first, gpu, monkeypatch, capsys):
    from tests.gpu_check import first_checks as gpu_first_checks

    monkeypatch.setitem(gpu_first_checks.ERROR, "float32", -1.0)
    assert first.main(["convolutions", *SMALL]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "winograd WRONG (winograd: error " in lines[0]
    assert "WRONG" not in lines[3]
    assert lines[-1].startswith("FAILED: Wrong: forward float32 graph, ")


@simulated
def test_work_that_cannot_be_captured_is_a_failure(first, gpu, monkeypatch, capsys):
    def forbidden(stream, mode=None):
        raise RuntimeError("not permitted")

    monkeypatch.setattr("tests.simulated.cupy.streams.Stream.begin_capture", forbidden)
    assert first.main(["graphs", *SMALL]) == 1
    told = capsys.readouterr().out
    assert told.startswith("FAILED: Wrong: ")
    assert "not permitted" in told


def test_a_check_is_a_process_that_tells_its_last_words(first, capsys):
    assert first.main(["steps", "bandwidth", "--model", "no-such-model", "--limit", "50"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("steps ") and " s  FAILED: " in line for line in lines)
    assert any(line.startswith("    | ") and "Error" in line for line in lines)
    told = [line for line in lines if line.startswith(("steps ", "bandwidth "))]
    assert lines[lines.index("") + 1 :] == told[len(told) // 2 :]  # once more, without last words


def test_checks_that_there_are_not_are_refused(first, capsys):
    with pytest.raises(SystemExit, match="2"):
        first.main(["everything"])
    assert "no check everything; there are gpu, compilers, " in capsys.readouterr().err
