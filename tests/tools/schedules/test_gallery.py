"""The pictures of schedules in the manual are those that the commands beside them draw."""

import re

import numpy as np
import pytest

from pydtnn.tools.schedules.allreduce import main as of_allreduce
from pydtnn.tools.schedules.pipeline import main as of_pipeline
from tests.each import each
from tests.launch import ROOT

BLOCK = 8
"""Pixels whose mean is compared, as fonts and fewer colours change single ones."""


def means(path):
    image = pytest.importorskip("matplotlib.image").imread(path)[..., :3]
    height, width = (size // BLOCK for size in image.shape[:2])
    blocks = image[: height * BLOCK, : width * BLOCK].reshape(height, BLOCK, width, BLOCK, 3)
    return blocks.mean((1, 3), dtype=np.float64)


@each("name", ["hierarchical", "torus", *(f"pipeline_{n}" for n in ("1f1b", "zb_h1", "chimera"))])
def test_a_picture_in_the_manual_is_what_its_command_draws(name, tmp_path, capsys):
    command = rf"^python -m pydtnn (\S+) (draw .+) --output {name}.png$"
    ((module, words),) = re.findall(command, (ROOT / "docs/gallery.md").read_text(), re.M)
    main, picture = of_allreduce if module == "comm" else of_pipeline, tmp_path / "new" / "a.png"
    assert main([*words.split(), "--output", str(picture)]) == 0
    assert not capsys.readouterr().out
    (published,) = (ROOT / "docs").rglob(f"{name}.png")
    assert abs(means(picture) - means(published)).max() < 0.06
