"""Throughput of pipelines that have lost a rank: ReCycle beside partitioning the network again.

    python -m benchmarks.recycle

For D pipelines of S stages with all ranks (1f1b, zb_h1), and without one, each step with as many
samples; in parentheses the throughput, of 1f1b with all ranks. "units" are
simulated: forward and each half of backward of a stage of the complete pipelines take 1, messages
nothing. "ms" are steps of virtual ranks with equal layers on `--platform`, where the network that
is partitioned again has stages of whole layers.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

from pydtnn.model.pipeline import check
from pydtnn.parallel.mesh import fewer

CASES = [(2, 2, 4), (2, 4, 4), (3, 2, 4), (8, 2, 4), (4, 4, 4), (4, 4, 8)]
"""Pipelines, stages, and micro-batches of each pipeline."""

LAYERS, WIDTH, SAMPLES = 24, 512, 128
"""Of the network, and of each micro-batch."""


def virtual(ranks: int, parallel: str, batch: int, platform: str) -> float:
    """Return the time of a step of virtual ranks, in ms."""
    command = [sys.executable, "-m", "pydtnn.train", "--model=mlp", "--progress=none"]
    command += [f'--model-options={{"hidden": {[WIDTH] * (LAYERS - 1)}}}', "--epochs=1"]
    command += [f"--dataset=synthetic:samples={2 * batch},test_samples=1,shape=[16,32,1]"]
    command += [
        f"--global-batch-size={batch}",
        f"--virtual-ranks={ranks}",
        f"--platform={platform}",
    ]
    text = subprocess.run([*command, f"--parallel={parallel}"], text=True, capture_output=True)
    found = re.search(r"virtual time per step +([\d.]+) ([um]?)s", text.stdout)
    if found is None:
        raise SystemExit(f"recycle: {text.stdout}{text.stderr}")
    return float(found[1]) * {"u": 1e-3, "m": 1.0, "": 1e3}[found[2]]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--platform", default="cpu-100gbit")
    platform = parser.parse_args().platform
    heads = ("1f1b", "zb_h1", "ReCycle", "partitioned again, 1f1b")
    print(f"{'D x S, m':12}{''.join(f'{head:>28}' for head in heads)}  as")
    for pipelines, stages, each in CASES:
        ranks, lost, all_of = pipelines * stages, stages + 1, pipelines * each
        axes = fewer({"data": pipelines, "pipeline": stages}, ranks - 1)
        schedule = f"recycle:{pipelines}x{stages}-{lost}"
        fewest = -(-all_of // axes["data"])
        part = -(-LAYERS // axes["pipeline"]) / (LAYERS / stages)
        units = [
            check("1f1b", stages, each).duration,
            check("zb_h1", stages, each).duration,
            check(schedule, ranks - 1, all_of).duration,
            check("1f1b", axes["pipeline"], fewest).duration * part,
        ]
        ways = [
            (ranks, f"data={pipelines},pipeline={stages}:micro_batches={each}"),
            (ranks, f"data={pipelines},pipeline={stages}:schedule=zb_h1,micro_batches={each}"),
            (ranks - 1, f"pipeline={ranks - 1}:schedule={schedule},micro_batches={all_of}"),
            (ranks - 1, ",".join(f"{a}={n}" for a, n in axes.items()) + f":micro_batches={fewest}"),
        ]
        times = [virtual(*way, all_of * SAMPLES, platform) for way in ways]
        cells = [
            f"{unit:.0f} units, {ms:.1f} ms ({100 * times[0] / ms:.0f} %)"
            for unit, ms in zip(units, times, strict=True)
        ]
        name, shown = f"{pipelines} x {stages}, {each}", "".join(f"{cell:>28}" for cell in cells)
        print(f"{name:12}{shown}  {axes['data']} x {axes['pipeline']}", flush=True)


if __name__ == "__main__":
    main()
