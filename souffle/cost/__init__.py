"""How long stages take on a GPU that is not at hand."""

from souffle.cost.counting import Work
from souffle.cost.device import CostDevice, Figure, cost_device, device_of_arch, figures_of, product_names
from souffle.cost.kernel import MEDIAN_ERROR, KernelForecast
from souffle.cost.predict import (
    CountedFunction,
    Prediction,
    Terms,
    count_stage,
    estimated_registers,
    predict_counted,
    predict_stage,
    predict_work,
)
from souffle.cost.work import work_of

__all__ = [
    "MEDIAN_ERROR",
    "CostDevice",
    "CountedFunction",
    "Figure",
    "KernelForecast",
    "Prediction",
    "Terms",
    "Work",
    "cost_device",
    "count_stage",
    "device_of_arch",
    "estimated_registers",
    "figures_of",
    "predict_counted",
    "predict_stage",
    "predict_work",
    "product_names",
    "work_of",
]
