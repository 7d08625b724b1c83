"""Training on text from the command line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from pydtnn.saving import load
from pydtnn.train import main

OPTIONS = ("--model=gpt_nano", "--dataset=text", "--dataset-options={length: 16}", "--epochs=1")
OPTIONS += ("--metrics=perplexity", "--optimizer=adamw", "--lr=0.003", "--global-batch-size=8")
OPTIONS += ("--threads=1", "--tuning=fixed")


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text"
    path.write_text("one two three four\n" * 60)
    return f"--data-dir={path}"


def test_a_gpt_trains_on_text_and_its_saved_model_predicts(tmp_path, text):
    out, saved = tmp_path / "run", tmp_path / "saved"
    assert main([*OPTIONS, text, f"--output-dir={out}", f"--save={saved}"]) == 0
    history = json.loads((out / "history.json").read_text())
    last = history[-1] if isinstance(history, list) else {k: v[-1] for k, v in history.items()}
    assert last["perplexity"] == pytest.approx(math.exp(last["loss"]), rel=1e-4)
    assert last["val_perplexity"] < 100  # 256 before training
    assert last["tokens_per_second"] > 0
    model = load(saved)
    assert model.predict(np.full((2, 16), 32, "float32")).shape == (2, 16, 256)


@pytest.mark.tools
def test_a_gpt_trains_on_packed_documents(tmp_path, text, capsys):
    data = "--dataset=documents", "--dataset-options={length: 16, separator: three}"
    assert main([*OPTIONS, *data, text, f"--output-dir={tmp_path / 'run'}"]) == 0
    assert " tokens/s  " in capsys.readouterr().out
