"""Checks of the options that `--exact` requires or excludes."""

from __future__ import annotations


class ExactChecks:
    """Method of the configuration that compares its options with `exact`."""

    exact: bool
    global_batch_size: int | None
    accumulation: int
    compress: str | None
    tuning: str | None

    def check_exact(self) -> None:
        """Raise ValueError if `--exact` is set and cannot be combined with the other options."""
        for option, wrong, instead in (
            ("--global-batch-size", self.global_batch_size is None, "set the number of samples"),
            ("--accumulation", self.accumulation > 1, "omit it and use more --shards"),
            ("--compress", self.compress is not None, "omit it"),
            ("--tuning measure", self.tuning == "measure", "use fixed or direct"),
        ):
            if self.exact and wrong:
                verb = "requires" if self.global_batch_size is None else "cannot be combined with"
                raise ValueError(f"train: --exact {verb} {option}; {instead}")
