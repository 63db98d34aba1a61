"""Rule for stages without reductions: each thread computes a few neighbouring elements of each output."""

from __future__ import annotations

from tvm import ir, s_tir, tirx
from tvm.sym import Analyzer

from souffle.schedule.gpu.forms.blocks import BlockView, block_views, product
from souffle.schedule.gpu.forms.elementwise_blocks import ElementwiseBlocks, read_elementwise
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule, Knob, Rule, Sketch, Values
from souffle.tvm_calls import structural_map
from souffle.tvm_compat import choice_parts, collect, const_int, is_choice, variables

__all__ = ["ELEMENTWISE"]

_EACH = (1, 2, 4, 8)
"""Times that a thread loads and stores, a block apart."""

_VECTOR_TYPES = frozenset({"float32", "int32"})


def _apply(form: ElementwiseBlocks, request: GpuRequest) -> Sketch:
    """A stage without reductions.

    Intermediates are inlined, except those that are read more than once where they were computed: these stay in
    registers, so that the text does not double with every square in a chain. Blocks of one shape share one nest of
    loops; all nests are joined under one ``blockIdx.x`` with as many tiles as the largest output needs.
    """
    most = max(_vector(view, request, busy=False) for view in form.blocks)

    def choose() -> Values:
        return {"lanes": max(_vector(view, request) for view in form.blocks), "each": 1}

    def make(values: Values) -> GpuSchedule:
        return _scheduled(form, request, values["lanes"], values["each"])

    lanes = tuple(lanes for lanes in (1, 2, 4) if lanes <= most)
    return Sketch(ELEMENTWISE.name, (Knob("lanes", lanes), Knob("each", _EACH)), choose, make)


ELEMENTWISE = Rule("elementwise", read_elementwise, _apply)


def _scheduled(form: ElementwiseBlocks, request: GpuRequest, lanes: int, each: int) -> GpuSchedule:
    """With at most `lanes` elements at once, as many as the blocks of a shape allow, and `each` such times a thread."""
    sch = form.opened()
    views = block_views(sch)
    widest = [min(lanes, _vector(view, request, busy=False)) for view in views]
    # One for all blocks of a shape, since what they share in registers is one thread's.
    vectors = [
        min(w for w, other in zip(widest, views, strict=True) if other.spatial_shape == view.spatial_shape)
        for view in views
    ]
    at_once = request.threads * each
    tiles = max(-(-view.size // (at_once * vector)) for view, vector in zip(views, vectors, strict=True))
    groups: dict[tuple[tuple[int, ...], int], list[BlockView]] = {}
    for view, vector in zip(views, vectors, strict=True):
        groups.setdefault((view.spatial_shape, vector), []).append(view)
    outer = [_nest(sch, members, vector, each, tiles, request.threads) for (_, vector), members in groups.items()]
    tile = sch.merge(*outer) if len(outer) > 1 else outer[0]
    sch.bind(tile, "blockIdx.x")
    return GpuSchedule(sch.mod["main"], ELEMENTWISE.name, tiles, request.threads)


def _nest(sch: s_tir.Schedule, members: list[BlockView], vector: int, each: int, tiles: int, threads: int) -> object:
    """Split the loops of `members` into tiles, times, threads and lanes, join them, and give the loop over tiles."""
    threads_of = []
    for view in members:
        loops = sch.get_loops(view.rv)
        flat = sch.fuse(*loops) if loops else sch.add_unit_loop(view.rv)
        if vector > 1:
            flat, lanes = sch.split(flat, [None, vector])
            sch.vectorize(lanes)
        thread = sch.split(flat, [tiles, each, threads] if each > 1 else [tiles, threads])[-1]
        threads_of.append(thread)
    # Not joined further, to the lanes: registers declared inside a vectorized loop are not widened with it.
    if len(threads_of) > 1:
        sch.merge(*threads_of)
    tile, *rest = sch.get_loops(members[0].rv)
    thread = rest[1 if each > 1 else 0]
    sch.bind(thread, "threadIdx.x")
    return tile


def _vector(view: BlockView, request: GpuRequest, *, busy: bool = True) -> int:
    """Elements that a thread can load and store at once: 1, 2 or 4; if `busy`, with a tile for each multiprocessor."""
    shape = view.spatial_shape
    vector = 4
    while vector > 1 and (
        not shape
        or shape[-1] % vector
        or (busy and product(shape) // (request.threads * vector) < request.sm_count)
        or not _aligned(view, vector)
    ):
        vector //= 2
    return vector


def _aligned(view: BlockView, vector: int) -> bool:
    """Whether all accesses of `vector` neighbours are one aligned run of memory each, or one element."""
    types = {str(access.buffer.dtype) for access in (*view.reads, *view.writes)}
    if not types <= _VECTOR_TYPES or not _plain(view):
        return False
    analyzer = Analyzer()
    last = view.spatial[-1].var
    group = tirx.Var("group", last.ty)
    extents = [const_int(axis.dom.extent) for axis in view.spatial]
    for axis, extent in zip(view.spatial[:-1], extents, strict=False):
        analyzer.bind(axis.var, ir.Range(0, extent))
    analyzer.bind(group, ir.Range(0, extents[-1] // vector))
    for access in (*view.reads, *view.writes):
        flat = access.flat
        places = []
        for lane in range(vector):
            place = group * vector + lane
            places.append(structural_map(flat, (ir.Var, lambda v, p=place: p if v.same_as(last) else v)))
        steps = [analyzer.simplify(place - places[0]) for place in places[1:]]
        if all(isinstance(step, tirx.IntImm) and step.value == 0 for step in steps):
            continue
        if any(not isinstance(step, tirx.IntImm) or step.value != lane for lane, step in enumerate(steps, 1)):
            return False
        remainder = analyzer.simplify(tirx.floormod(places[0], vector))
        if not (isinstance(remainder, tirx.IntImm) and remainder.value == 0):
            return False
    return True


def _plain(view: BlockView) -> bool:
    """Whether no condition differs between neighbours, who would be taken one by one then."""
    last = view.spatial[-1].var
    choices = [node for kind in (ir.Call, tirx.Select) for node in collect(view.node.body, kind) if is_choice(node)]
    return not any(last.same_as(v) for choice in choices for v in variables(choice_parts(choice)[0]))
