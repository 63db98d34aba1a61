"""Where kernels begin and end."""

from souffle.partition.souffle_rule import (
    Subprogram,
    loops_beyond_a_wave,
    one_kernel_per_stage,
    partition_persistent,
    partition_souffle,
)

__all__ = ["Subprogram", "loops_beyond_a_wave", "one_kernel_per_stage", "partition_persistent", "partition_souffle"]
