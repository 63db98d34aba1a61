"""What is taken of what the compiler could do on chip, by the predicted time of whole networks (paper §5.4, §6.5)."""

from souffle.choice.joins import JoinTrials, with_parts
from souffle.choice.kernels import ChosenKernels, choose_kernels
from souffle.choice.patterns import PatternKernels
from souffle.choice.prices import KernelPrice, KernelPrices
from souffle.choice.schedules import KernelSchedules
from souffle.choice.stationary import StationaryWeights
from souffle.choice.trial import Trial
from souffle.choice.ways import accepted, ways_taken

__all__ = [
    "ChosenKernels",
    "JoinTrials",
    "KernelPrice",
    "KernelPrices",
    "KernelSchedules",
    "PatternKernels",
    "StationaryWeights",
    "Trial",
    "accepted",
    "choose_kernels",
    "ways_taken",
    "with_parts",
]
