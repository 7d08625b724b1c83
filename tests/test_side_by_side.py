"""The tests in several processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RUN = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests import side_by_side
side_by_side.OTHERS = (("tests/comm",), ("tests/cli",))
sys.exit(side_by_side.main(["-q", "-p", "no:cacheprovider", "-m", "not slow"]))
"""


FILES = ("tests/comm/test_ranks.py", "tests/cli/test_options.py", "tests/test_other.py")


@pytest.mark.few(1)
@pytest.mark.parametrize("failing", [None, *FILES])
def test_every_test_runs_once_and_a_failure_in_any_process_counts(
    failing: str | None, tmp_path: Path
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: is left out\n")
    for path in FILES:
        name = Path(path).stem
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(
            f"import pytest\ndef {name}():\n    open('{name}', 'x').close()\n"
            "    import os\n    assert 'PYTHONDONTWRITEBYTECODE' not in os.environ\n"
            f"    assert {path != failing}\n@pytest.mark.slow\ndef test_slow():\n    assert False\n"
        )
    done = subprocess.run([sys.executable, "-c", RUN], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == (failing is not None), done.stdout + done.stderr
    assert all((tmp_path / Path(path).stem).exists() for path in FILES)
    assert done.stdout.count("1 deselected") == 3
