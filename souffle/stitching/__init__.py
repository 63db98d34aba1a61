"""FusionStitching: the planners of kernels without a grid barrier, beside XLA's rules; templates; shared memory."""

from souffle.stitching.graph import Op, OpGraph, Read, graph_of
from souffle.stitching.kinds import Kind, kind_of
from souffle.stitching.plan import FusionError, FusionPattern, FusionPlan, Scheme, cycle_between, plan_of
from souffle.stitching.plan_figures import Traffic, predicted_seconds, shared_plans, traffic_of
from souffle.stitching.planner import FusionPlanner, FusionRequest
from souffle.stitching.registry import FUSION_PLANNERS, fusion_planner_for
from souffle.stitching.schemes import schemes_of
from souffle.stitching.shared import SharedError, SharedPlan, SharedRequest, plan_as_printed, plan_shared
from souffle.stitching.template import Attribute, OpSchedule, Part, Template, TemplateError
from souffle.stitching.template_choice import Stitched, Stitcher, stitched, stitched_stage
from souffle.stitching.template_hook import by_templates
from souffle.stitching.template_launch import TemplateOp, Tiling, enumerate_schedules, tiling_of
from souffle.stitching.template_ops import op_of
from souffle.stitching.template_schedule import scheduled_by, stage_by

__all__ = [
    "FUSION_PLANNERS",
    "Attribute",
    "FusionError",
    "FusionPattern",
    "FusionPlan",
    "FusionPlanner",
    "FusionRequest",
    "Kind",
    "Op",
    "OpGraph",
    "OpSchedule",
    "Part",
    "Read",
    "Scheme",
    "SharedError",
    "SharedPlan",
    "SharedRequest",
    "Stitched",
    "Stitcher",
    "Template",
    "TemplateError",
    "TemplateOp",
    "Tiling",
    "Traffic",
    "by_templates",
    "cycle_between",
    "enumerate_schedules",
    "fusion_planner_for",
    "graph_of",
    "kind_of",
    "op_of",
    "plan_as_printed",
    "plan_of",
    "plan_shared",
    "predicted_seconds",
    "scheduled_by",
    "schemes_of",
    "shared_plans",
    "stage_by",
    "stitched",
    "stitched_stage",
    "tiling_of",
    "traffic_of",
]
