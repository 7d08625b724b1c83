"""Options of virtual ranks."""

from __future__ import annotations

from dataclasses import dataclass

from pydtnn.cli.options import VIRTUAL, option


@dataclass(frozen=True)
class VirtualOptions:
    """Options of the configuration that run it on virtual ranks."""

    virtual_ranks: int | None = option(
        VIRTUAL,
        int,
        "train on this number of ranks that are threads of this process, with the times of "
        "--platform: docs/virtual-ranks.md",
        at_least=1,
        at_most=4096,
    )
    platform: str | None = option(
        VIRTUAL,
        str,
        "name of a platform, or path/to/file.yaml, also for predictions; by default this job's "
        "ranks, measured in a few seconds",
        metavar="FILE",
    )
    compute: str | None = option(
        VIRTUAL,
        str,
        "times of computation measured on this machine, in this file, to which missing ones are "
        "added; by default those of --platform",
        metavar="FILE",
    )
    disturb: str | None = option(
        VIRTUAL,
        str,
        "slow ranks, jitter, slow links and ranks that fail, in a YAML file",
        metavar="FILE",
    )

    timing_only: bool = option(
        VIRTUAL,
        False,
        "with --virtual-ranks: predict the time of steps, with kernels that do nothing, and exit",
    )

    def check_virtual(self) -> None:
        """Raise ValueError if virtual ranks have no platform, or an option has no effect."""
        if self.virtual_ranks is not None and self.platform is None:
            raise ValueError(
                "train: --virtual-ranks requires --platform; name a platform such as cpu-1gbit, or "
                "write a file with python -m pydtnn.calibrate"
            )
        for label, given in (
            ("--compute", self.compute is not None),
            ("--disturb", self.disturb is not None),
            ("--timing-only", self.timing_only),
        ):
            if given and self.virtual_ranks is None:
                raise ValueError(f"train: {label} requires --virtual-ranks N")
