"""Every example runs, alone or over ranks, and the README shows the quickstart as it is."""

import ast
import os
import re
import subprocess
import sys

import pytest

from tests.digits import needs_digits
from tests.launch import ROOT

CLASSIFIERS = sorted(path for path in (ROOT / "examples").glob("*.py") if path.stem != "gpt")


@needs_digits
@pytest.mark.few(1)
@pytest.mark.parametrize("path", CLASSIFIERS, ids=lambda path: path.stem)
def test_an_example_runs_and_learns(path, tmp_path):
    if "pydtnn.tools" in path.read_text():
        pytest.importorskip("pydtnn.tools")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(path)]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    accuracies = re.findall(r"accuracy'?:? ([\d.]+)", done.stdout)  # the last one is the result
    assert accuracies, done.stdout
    assert float(accuracies[-1]) > 0.85


@pytest.mark.long
def test_a_gpt_learns_to_continue_a_text(tmp_path):
    (tmp_path / "text").write_text("one two three four five six seven eight nine ten\n" * 400)
    command = [sys.executable, str(ROOT / "examples" / "gpt.py"), str(tmp_path / "text")]
    options = ["--steps=120", "--length=32", "--begin=one two thr", "--count=30"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "one two three four five six seven" in done.stdout
    perplexity = re.search(r"test perplexity ([\d.]+)", done.stdout)
    assert perplexity
    assert float(perplexity[1]) < 1.5


@needs_digits
@pytest.mark.long
@pytest.mark.parametrize("name", ["own_scheme", "asynchronous_scheme"])
def test_a_scheme_of_ones_own_runs_over_ranks(mpiexec, name):
    done = mpiexec(2, [str(ROOT / "examples" / f"{name}.py")])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 ranks: test accuracy 0.") == 1


def test_the_quickstart_is_short_and_stands_in_the_readme():
    source = (ROOT / "examples" / "quickstart.py").read_text()
    code = source.partition('"""\n\n')[2]
    assert f"```python\n{code}```" in (ROOT / "README.md").read_text()
    statements = {node.lineno for node in ast.walk(ast.parse(code)) if isinstance(node, ast.stmt)}
    assert len(statements) < 20
