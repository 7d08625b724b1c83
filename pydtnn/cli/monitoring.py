"""Options of what is checked and written while a run trains."""

from __future__ import annotations

from dataclasses import dataclass

from pydtnn.cli.options import OBSERVATION, option


@dataclass(frozen=True)
class MonitoringOptions:
    """Options of the comparison of ranks, and of files for TensorBoard."""

    check_equal: int | None = option(
        OBSERVATION,
        int,
        "steps between comparisons of the parameters and the optimizer's state of all ranks; by "
        "default 100 where these must be equal; with 0 they are not compared",
        at_least=0,
    )
    tensorboard: bool = option(
        OBSERVATION,
        False,
        "write curves, the graph of layers and hyper-parameters for TensorBoard to the folder "
        "tensorboard of the run; requires the package tensorboardX",
    )
    tensorboard_histograms: int | None = option(
        OBSERVATION,
        int,
        "with --tensorboard: epochs between histograms of parameters and gradients",
        at_least=1,
    )

    def check_tensorboard(self) -> None:
        """Raise ValueError if an option of TensorBoard has no effect."""
        if self.tensorboard_histograms is not None and not self.tensorboard:
            raise ValueError("train: --tensorboard-histograms requires --tensorboard")
