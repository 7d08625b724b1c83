"""Errors planted into the library, one at a time, that tests must find: ``make mutants``.

Each is a replacement of text in one file and a test that fails with it. Some are errors that all
tests have once passed; the others were chosen before the tests were read.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from pydtnn.utils.threads import cores_here

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 300


class Mutant(NamedTuple):
    """Text of a file that occurs once, what replaces it, and the test that fails then."""

    file: str
    before: str
    after: str
    test: str


MUTANTS = {
    # prices
    "a bias whose gradient is free": Mutant(
        "pydtnn/layers/linear.py",
        "flops * (dw + self.needs_dx) + outputs * db,",
        "flops * (dw + self.needs_dx),",
        "tests/layers/test_cost.py::"
        "test_the_operations_of_a_linear_layer_are_those_of_its_products",
    ),
    "a layer's filters that groups do not divide": Mutant(
        "pydtnn/layers/conv.py",
        "channels % self.groups or self.filters % self.groups",
        "channels % self.groups",
        "tests/layers/test_conv.py::test_options_that_do_not_fit_the_input_are_told",
    ),
    "a geometry's filters that groups do not divide": Mutant(
        "pydtnn/kernels/geometry.py",
        "self.channels % self.groups or self.filters % self.groups",
        "self.channels % self.groups",
        "tests/kernels/test_conv.py::test_a_geometry_that_kernels_do_not_compute_is_refused",
    ),
    "a fan of all groups": Mutant(
        "pydtnn/layers/conv.py",
        "fan_in=taps * channels // self.groups,",
        "fan_in=taps * channels,",
        "tests/layers/test_conv.py::test_weights_know_how_many_inputs_and_outputs_each_element_has",
    ),
    "a fan of all groups of a transposed convolution": Mutant(
        "pydtnn/layers/conv_transpose.py",
        "fan_in=max(taps * channels // (self.groups * prod(self.stride)), 1),",
        "fan_in=max(taps * channels // prod(self.stride), 1),",
        "tests/layers/test_conv.py::test_weights_know_how_many_inputs_and_outputs_each_element_has",
    ),
    "a product of momenta that does not go back": Mutant(
        "pydtnn/optimizers/adaptive.py",
        "done, product = self._product if self._product[0] <= step else (0, 1.0)",
        "done, product = self._product",
        "tests/test_optimizers.py::"
        "test_the_product_of_nadams_momenta_does_not_depend_on_the_steps_before",
    ),
    # predictions
    "chunks in progress without limit": Mutant(
        "pydtnn/perfmodel/formulas/placed.py",
        "max(moving, working, first / active)",
        "max(moving, working)",
        "tests/perfmodel/formulas/test_placed.py::"
        "test_chunks_of_long_arrays_overlap_as_in_the_replay",
    ),
    "a rank that copies the messages of its host": Mutant(
        "pydtnn/perfmodel/formulas/placed.py",
        "between.sent / group.per_host",
        "between.sent",
        "tests/perfmodel/formulas/test_placed.py::"
        "test_each_rank_copies_its_own_messages_between_hosts",
    ),
    "ranks that share cores for nothing": Mutant(
        "pydtnn/perfmodel/timing.py",
        "self.slowdown = messages.slowdown",
        "self.slowdown = 1.0",
        "tests/perfmodel/test_projection.py::"
        "test_ranks_that_share_cores_compute_longer_by_the_same_factor",
    ),
    "a forecast that reads tokens": Mutant(
        "pydtnn/layers/embedding.py",
        "if self.backend.has_values and wrong.any():",
        "if wrong.any():",
        "tests/kernels/test_dry.py::test_a_forecast_does_not_depend_on_what_memory_contains",
    ),
    "a forecast that reads lengths": Mutant(
        "pydtnn/layers/attention.py",
        "if self.backend.has_values and wrong.any():",
        "if wrong.any():",
        "tests/kernels/test_dry.py::test_a_forecast_does_not_depend_on_what_memory_contains",
    ),
    # lifetimes of arrays
    "a sum over the gradient that the caller passes": Mutant(
        "pydtnn/model/execution.py",
        "sums.add(node, _in_model_dtype(graph, g), new=False)",
        "sums.add(node, _in_model_dtype(graph, g), new=True)",
        "tests/model/test_graph.py::"
        "test_gradients_of_outputs_that_other_layers_read_are_not_overwritten",
    ),
    "a new array's sum over the gradient that the caller passes": Mutant(
        "pydtnn/model/execution.py",
        "out = so_far if own else dx if new else",
        "out = so_far if own or new else",
        "tests/model/test_graph.py::"
        "test_gradients_of_outputs_that_other_layers_read_are_not_overwritten",
    ),
    "outputs that are kept after their last reader": Mutant(
        "pydtnn/model/execution.py",
        "            values[index] = None\n",
        "            pass\n",
        "tests/model/test_model.py::test_a_forward_pass_alone_frees_every_array_after_its_last_use",
    ),
    "saved arrays that are kept after their backward": Mutant(
        "pydtnn/model/execution.py",
        "        residuals[node.index] = None\n",
        "",
        "tests/model/test_model.py::test_backward_frees_what_forward_kept_as_it_goes",
    ),
    "gradients that are kept after their backward": Mutant(
        "pydtnn/model/execution.py",
        "self.arrays.pop(node.index, (None, False))[0]",
        "self.arrays.get(node.index, (None, False))[0]",
        "tests/model/test_model.py::test_backward_frees_every_gradient_after_its_last_use",
    ),
    "saved arrays of layers that are not trained": Mutant(
        "pydtnn/model/recompute.py",
        "            if index in self._trained:\n                self.residuals[index] = saved\n"
        "            return\n",
        "            self.residuals[index] = saved\n            return\n",
        "tests/model/test_freeze.py::test_layers_that_run_no_backward_keep_nothing",
    ),
    "dropped values that are kept within a segment": Mutant(
        "pydtnn/model/recompute.py",
        "                values.pop(i, None)\n",
        "                pass\n",
        "tests/model/test_recompute.py::"
        "test_values_within_a_segment_are_freed_after_their_last_reader_again",
    ),
}


def check(mutants: Sequence[Mutant]) -> None:
    """Raise ValueError if the text of a mutant does not occur once, or a test fails without it."""
    for file, before, *_ in mutants:
        if (count := (ROOT / file).read_text().count(before)) != 1:
            raise ValueError(f"{file}: expected a text that occurs once, got {count} of\n{before}")
    done = run_tests(ROOT, sorted({mutant.test for mutant in mutants}))
    if done.returncode:
        raise ValueError(f"expected tests that pass without mutants, got\n{done.stdout}")


def run_tests(folder: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run tests in a checkout until one fails."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        + ["-m", "not long", *tests],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )


def shadow(folder: Path, mutant: Mutant) -> None:
    """Create a checkout of links in a folder, with the mutant in the place of one file."""
    package = mutant.file.partition("/")[0]
    for entry in ROOT.iterdir():
        if entry.name != package and not entry.name.startswith("."):
            (folder / entry.name).symlink_to(entry)
    for path in (ROOT / package).rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            link = folder / path.relative_to(ROOT)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    target = folder / mutant.file
    source = target.read_text()
    target.unlink()
    target.write_text(source.replace(mutant.before, mutant.after))


def killed(mutant: Mutant) -> bool:
    """Return whether the test of a mutant, which passes without it, fails, crashes or hangs."""
    with tempfile.TemporaryDirectory() as folder:
        shadow(Path(folder), mutant)
        try:
            done = run_tests(Path(folder), [mutant.test])
        except subprocess.TimeoutExpired:
            return True
    if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise ValueError(f"expected a test that is not long, got {mutant.test}")
    return done.returncode != 0


def report(name: str, mutant: Mutant) -> bool:
    """Print and return whether a mutant is killed."""
    begin = time.perf_counter()
    found = killed(mutant)
    seconds = time.perf_counter() - begin
    print(f"{'killed' if found else 'SURVIVED':8} {seconds:5.1f} s  {name}", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests of all mutants; return 1 if one survives."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants; by default all")
    parser.add_argument("--jobs", type=int, default=len(cores_here()), help="at a time")
    options = parser.parse_args(arguments)
    chosen = {name: MUTANTS[name] for name in options.names or MUTANTS}
    check([*chosen.values()])
    with ThreadPoolExecutor(options.jobs) as pool:
        found = sum(pool.map(report, chosen, chosen.values()))
    print(f"{found} of {len(chosen)} killed")
    return int(found < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
