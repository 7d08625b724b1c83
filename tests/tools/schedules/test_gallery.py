"""The pictures of schedules in the manual are those that the commands beside them draw."""

import re

import numpy as np
import pytest

from pydtnn.tools.schedules.allreduce import main as of_allreduce
from pydtnn.tools.schedules.pipeline import main as of_pipeline
from tests.each import each
from tests.launch import ROOT

COMMANDS = re.findall(
    r"^python -m pydtnn (\S+) (draw .+) --output (\S+)$",
    (ROOT / "docs" / "gallery.md").read_text(),
    re.M,
)
REDUCED = ("gpipe", "eager", "doubling", "ring", "zb_v")
"""Pictures that have another size in the manual, and one that takes long."""

BLOCK = 8
"""Pixels whose mean is compared, as fonts and fewer colours change single ones."""


def means(path):
    image = pytest.importorskip("matplotlib.image").imread(path)[..., :3]
    height, width = (size // BLOCK * BLOCK for size in image.shape[:2])
    blocks = image[:height, :width].reshape(height // BLOCK, BLOCK, width // BLOCK, BLOCK, 3)
    return blocks.mean((1, 3), dtype=np.float64)


@each("command", [one for one in COMMANDS if not re.search("|".join(REDUCED), one[-1])])
def test_a_picture_in_the_manual_is_what_its_command_draws(command, tmp_path):
    module, words, name = command
    main = of_allreduce if module == "comm" else of_pipeline
    assert main([*words.split(), "--output", str(tmp_path / "new" / name)]) == 0
    (published,) = (ROOT / "docs").rglob(name)
    assert abs(means(tmp_path / "new" / name) - means(published)).max() < 0.06
