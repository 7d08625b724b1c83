"""Networks that are cut: the same bytes on 1, 2 and 4 processes, and what they cost.

    python -m benchmarks.comm.exact_mesh --output benchmarks/results/exact_mesh.txt  # needs MPI

Every network is trained on 4 ranks of a mesh by `--parallel exact=true` on 1, 2 and 4 processes,
and without it on 4, and serially. Runs of a network alternate. The time of a step is the lowest of
all turns, from the report of the run; a ratio is that of the times of a row.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common.report import Report

MPIRUN = Path(sys.executable).with_name("mpirun")
WORDS = ["--dataset=text:length=128", "--validation-split=0.02"]
IMAGES = ["--dataset=synthetic:samples=640,test_samples=16"]
GPT = "gpt_nano:depth=4,heads=4,width=128"
DEEP = "gpt_nano:depth=8,heads=4,width=128,tied=false"
VIT = "from models.vit import vit\ndef small(*given): return vit(128, 4, 4, *given)\n"
CASES = {
    "GPT, tensor": (GPT, WORDS, 16, "tensor=4"),
    "GPT, context": (GPT, WORDS, 16, "context=4"),
    "GPT, data x tensor": (GPT, WORDS, 16, "data=2,tensor=2"),
    "mixture of experts, expert": (f"moe_{GPT}", WORDS, 16, "expert=4"),
    "ViT, tensor": ("FILE:small", IMAGES, 32, "tensor=4"),
    "ResNet-20, spatial": ("resnet20", IMAGES, 64, "spatial=4"),
    "ResNet-20, filter": ("resnet20", IMAGES, 64, "filter=4"),
    **{
        f"GPT of 8 blocks, {name}": (DEEP, WORDS, 32, f"pipeline=4:micro_batches=8,schedule={name}")
        for name in ("zb_v", "chimera", "dualpipe")
    },
}


def train(processes: int, batch: int, options: list[str]) -> tuple[float, str]:
    """Return the time of a step in ms, and the checksum of the weights."""
    with tempfile.TemporaryDirectory() as name:
        saved = Path(name) / "w.safetensors"
        done = subprocess.run(
            [
                *(str(MPIRUN), "-np", str(processes), sys.executable, "-m", "pydtnn.train"),
                *(f"--save={saved}", f"--output-dir={name}/run", "--epochs=1", "--lr=0.01"),
                *(f"--global-batch-size={batch}", "--tuning=fixed", *options),
            ],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            sys.exit(f"exact_mesh: {' '.join(options)}: {done.stderr}")
        ((time, unit),) = re.findall(r"^time per step +measured (\S+) (\w+);", done.stdout, re.M)
        milliseconds = float(time) * {"us": 1e-3, "ms": 1, "s": 1e3}[unit]
        return milliseconds, hashlib.sha256(saved.read_bytes()).hexdigest()[:12]


def main() -> None:
    """Print a row for each network."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5, help="runs of each kind")
    parser.add_argument("--only", default="", help="networks whose names contain this")
    parser.add_argument("--output", type=Path, help="write the table to this file as well")
    args = parser.parse_args()
    report = Report(args.output)
    heads = ("serial", "4 plain", "1 exact", "2 exact", "4 exact")
    columns = "".join(f"{head:>9}" for head in heads)
    report.line(f"{'ms per step':<28}{columns}  4 / 4 plain, 1 / serial, checksums")
    different = 0
    with tempfile.TemporaryDirectory() as folder:
        file, text = Path(folder) / "vit.py", Path(folder) / "text.txt"
        file.write_text(VIT)
        text.write_text("To be or not to be, that is the question: " * 2000)
        for name, (model, data, batch, mesh) in CASES.items():
            if args.only not in name:
                continue
            own = [f"--model={model.replace('FILE', str(file))}", *data, "--steps-per-epoch=10"]
            own += [f"--data-dir={text}"] * (data is WORDS)
            exact = f"--parallel={mesh}{',' if ':' in mesh else ':'}exact=true"
            kinds = [(1, []), (4, [f"--parallel={mesh}"]), *((n, [exact]) for n in (1, 2, 4))]
            runs = [
                [train(n, batch, [*own, *more]) for n, more in kinds] for _ in range(args.turns)
            ]
            times = [min(row[kind][0] for row in runs) for kind in range(len(kinds))]
            sums = {row[kind][1] for row in runs for kind in (2, 3, 4)}
            different += len(sums) > 1
            report.line(
                f"{name:<28}{''.join(f'{t:>9.1f}' for t in times)}"
                f"  {times[4] / times[1]:>11.2f}, {times[2] / times[0]:>10.2f}, {' '.join(sums)}"
            )
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
