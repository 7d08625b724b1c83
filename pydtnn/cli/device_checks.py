"""Checks of the options that depend on the device."""

from __future__ import annotations


class DeviceChecks:
    """Method of the configuration that compares its options with the device."""

    device: str
    comm: str
    allreduce: str
    cuda_aware: bool
    tf32: bool | None
    dtype: str
    virtual_ranks: int | None
    loader_threads: int

    def check_device(self) -> None:
        """Raise ValueError if an option requires another device, or other options."""
        cuda, schedule = self.device == "cuda", self.allreduce not in ("rule", "vendor")
        for wrong, sentence in (
            (self.comm == "nccl" and not cuda, "--comm nccl requires --device cuda"),
            (self.cuda_aware and not cuda, "--cuda-aware requires --device cuda"),
            (self.cuda_aware and self.comm != "mpi", "--cuda-aware requires --comm mpi"),
            (
                schedule and cuda and self.comm != "mpi",
                f"--allreduce {self.allreduce} with --device cuda requires --comm mpi: NCCL has "
                "its own allreduce",
            ),
            (
                schedule and self.cuda_aware,
                f"--allreduce {self.allreduce} cannot be combined with --cuda-aware: it sums in "
                "host memory; omit one of them",
            ),
            (self.virtual_ranks and cuda, "--virtual-ranks requires --device cpu or numpy"),
            (
                self.virtual_ranks and self.loader_threads > 1,
                "--virtual-ranks makes batches when they are needed; omit --loader-threads",
            ),
            (self.tf32 and not cuda, "--tf32 requires --device cuda"),
            (
                self.tf32 and self.dtype != "float32",
                f"--tf32 requires --dtype float32, got {self.dtype}",
            ),
        ):
            if wrong:
                raise ValueError(f"train: {sentence}")
