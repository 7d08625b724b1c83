"""The page docs/interchange.md: its code runs, and its commands are those that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.tools.interchange.__main__ import EXAMPLES
from pydtnn.tools.interchange.onnx.exporting import OPSET
from pydtnn.tools.interchange.onnx.sequence_readers import READERS

PAGE = (Path(__file__).parents[3] / "docs" / "interchange.md").read_text()


def test_the_code_of_the_page_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")
    pytest.importorskip("onnx", reason="onnx is not installed; pip install onnx")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, names)
    shown = re.findall(r"^print.*\)  # (.*)", PAGE, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == shown
    x = np.ones((2, 6, 6, 3), "float32")
    np.testing.assert_array_equal(names["again"].predict(x), names["model"].predict(x))


def test_the_page_names_the_commands_the_operators_and_the_opset():
    def commands(text: str) -> list[str]:
        lines = re.sub(r"\\\n\s*", "", text).splitlines()
        return [line.strip() for line in lines if "-m pydtnn interchange" in line]

    (block,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    assert commands(block) == commands(EXAMPLES)
    operators = {name for name in READERS if name[0].isupper()}  # others are those of `from_torch`
    assert operators <= {*re.findall(r"\w+", PAGE)}
    assert f"opset {OPSET}" in PAGE
