"""Templates of small operations against NumPy: each enumerated schedule alone, and with an element-wise reader.

``python -m benchmarks.template_campaign [--samples 40] [--seed 0] [--cta 64 256] [--out FILE.json]``. Of each case it
draws so many templates from all that there are for its shape. Those that are scheduled are compiled, many to a program,
and run on the CPU device in fixed order, checked, and shuffled on other grids; whole numbers, NaN and infinities must
come out as NumPy has them, functions nearly. The certificate must be PROVEN, and with ``--values`` so must the values.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from tvm import te, tirx

import souffle
from benchmarks.record import save_results
from souffle.cli.output import format_table
from souffle.program import TEProgram
from souffle.runtime import Network
from souffle.schedule.lower import LoweringError, cuda_target, lower_stage
from souffle.stitching import OpSchedule, Template, TemplateError, by_templates, enumerate_schedules, op_of, stage_by

ARCH = "sm_90"

Make = Callable[[te.Tensor, str], te.Tensor]


_largest = te.comm_reducer(lambda a, b: tirx.max(a, b), lambda dtype: tirx.const(float("-inf"), dtype), name="largest")
"""The maximum, which of nothing is minus infinity; that of ``te.max`` is the least finite number."""


@dataclass(frozen=True)
class Case:
    """One operation of one shape.

    Attributes
    ----------
    name : str
    shape : tuple of int
        Of what it reads.
    make : callable
        The tensor with a name, of what it reads.
    right : callable
        What NumPy makes of an array.
    reader : callable or None
        From what is read, the operation's result and a name: what reads both, of the shape of what is read.
    reader_right : callable or None
    """

    name: str
    shape: tuple[int, ...]
    make: Make
    right: Callable[[np.ndarray], np.ndarray]
    reader: Callable[[te.Tensor, te.Tensor, str], te.Tensor] | None = None
    reader_right: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None


def _reduction(shape: tuple[int, ...], axes: tuple[int, ...], largest: bool) -> Case:
    kept = [a for a in range(len(shape)) if a not in axes] or [0]
    whole = len(axes) == len(shape)
    out = (1,) if whole else tuple(shape[a] for a in kept)

    def make(x: te.Tensor, name: str) -> te.Tensor:
        reduced = {a: te.reduce_axis((0, shape[a]), f"k{a}") for a in axes}

        def element(*i: tirx.Var) -> object:
            at = [reduced[a] if a in reduced else i[kept.index(a)] for a in range(len(shape))]
            return (_largest if largest else te.sum)(x(*at), axis=list(reduced.values()))

        return te.compute(out, element, name=name)

    def reader(x: te.Tensor, total: te.Tensor, name: str) -> te.Tensor:
        def element(*i: tirx.Var) -> object:
            return x(*i) + total(*([0] if whole else [i[a] for a in kept]))

        return te.compute(shape, element, name=name)

    def right(x: np.ndarray) -> np.ndarray:
        return (x.max if largest else x.sum)(axis=axes).reshape(out)

    def reader_right(x: np.ndarray, total: np.ndarray) -> np.ndarray:
        return x + (total if whole else np.expand_dims(total, axes))

    kind = "max" if largest else "sum"
    return Case(f"{kind} over {','.join(map(str, axes))}", shape, make, right, reader, reader_right)


def _elementwise(shape: tuple[int, ...], expensive: bool) -> Case:
    def make(x: te.Tensor, name: str) -> te.Tensor:
        def element(*i: tirx.Var) -> object:
            return te.tanh(x(*i)) if expensive else tirx.max(x(*i) * 2.0, tirx.const(-1, "float32"))

        return te.compute(shape, element, name=name)

    def reader(x: te.Tensor, y: te.Tensor, name: str) -> te.Tensor:
        return te.compute(shape, lambda *i: x(*i) - y(*i), name=name)

    right = np.tanh if expensive else lambda x: np.maximum(x * 2, np.float32(-1))
    return Case("tanh" if expensive else "light", shape, make, right, reader, lambda x, y: x - y)


def _product(shape: tuple[int, ...]) -> Case:
    """A matrix by its own transposition, batched with three dimensions."""
    *batch, rows, depth = shape

    def make(x: te.Tensor, name: str) -> te.Tensor:
        k = te.reduce_axis((0, depth), "k")

        def element(*i: tirx.Var) -> object:
            *b, m, n = i
            return te.sum(x(*b, m, k) * x(*b, n, k), axis=[k])

        return te.compute((*batch, rows, rows), element, name=name)

    return Case("batched gemm" if batch else "gemm", shape, make, lambda x: x @ np.swapaxes(x, -1, -2))


def cases() -> list[Case]:
    """Sizes of 1 and primes among them."""
    found = []
    for largest in (False, True):
        found += [_reduction(shape, (1,), largest) for shape in ((7, 33), (33, 7), (13, 1), (1, 33))]
        found += [_reduction(shape, (0,), largest) for shape in ((7, 33), (33, 7), (1, 13))]
        found += [_reduction((7, 13), (0, 1), largest), _reduction((33,), (0,), largest)]
        found += [_reduction((3, 7, 13), axes, largest) for axes in ((1, 2), (1,), (0, 2))]
    for expensive in (False, True):
        found += [_elementwise(shape, expensive) for shape in ((7, 33), (13,), (1, 1), (3, 7, 13))]
    return [*found, _product((7, 13)), _product((33, 7)), _product((3, 7, 5))]


def data(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Small whole numbers with a NaN and infinities of either sign."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-4, 5, shape).astype(np.float32)
    flat = x.reshape(-1)
    if flat.size > 8:
        places = rng.choice(flat.size, 3, replace=False)
        flat[places] = (np.nan, -np.inf, np.inf)
    rows = x.reshape(-1, shape[-1])
    if len(rows) > 2:
        # A row whose maximum is minus infinity.
        rows[1] = -np.inf
    return x


def schedules_of(case: Case, cta_size: int, *, shared: bool | None = None) -> Iterator[OpSchedule]:
    """All of a case's operation, called ``t``."""
    x = te.placeholder(case.shape, name="x")
    (item,) = souffle.from_te([x], [case.make(x, "t")], name="one").tes
    return enumerate_schedules(op_of(item), cta_size, shared=shared)


def program_of(case: Case, schedules: Sequence[OpSchedule], *, read: bool) -> tuple[TEProgram, list[Template]]:
    """A program that has the operation once for each schedule, each with a reader if `read`."""
    x = te.placeholder(case.shape, name="x")
    outputs, templates = [], []
    for number, schedule in enumerate(schedules):
        made = case.make(x, f"t{number}")
        own = OpSchedule(f"t{number}", schedule.dimensions, schedule.shared)
        outputs.append(case.reader(x, made, f"r{number}") if read else made)
        # Of what reads it, the same dimensions; a reduction to one element has one more, of its result.
        same = schedule.dimensions[len(schedule.dimensions) - len(case.shape) :]
        templates.append(Template.of([own, OpSchedule(f"r{number}", same)] if read else [own]))
    return souffle.from_te([x], outputs, name="templates"), templates


def scheduled(case: Case, schedule: OpSchedule, cta_size: int, *, read: bool) -> str:
    """Why a template of a case is refused, empty where it is not."""
    program, (template,) = program_of(case, [schedule], read=read)
    try:
        lower_stage("stage", stage_by(program.tes, program, template, cta_size=cta_size).schedule, cuda_target(ARCH))
    except (TemplateError, LoweringError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def wrong(
    case: Case, schedules: Sequence[OpSchedule], cta_size: int, *, read: bool, seed: int = 0, verify: str = "memory"
) -> list[str]:
    """Compile schedules as one program and run it; what is not as NumPy has it, or not proven."""
    program, templates = program_of(case, schedules, read=read)
    hook = by_templates(*templates, cta_size=cta_size)
    options = {"target": "cuda", "arch": ARCH, "device": "cpu", "cubin": False, "level": "V0", "hook": hook}
    net = souffle.compile(program, verify=verify, **options)
    x = data(case.shape, seed)
    with np.errstate(invalid="ignore"):
        right = case.right(x)
        right = case.reader_right(x, right) if read else right
    found = [] if net.certificate.verdict == "PROVEN" else [net.certificate.verdict]
    runs = {
        "fixed": net,
        "checked": net.on("cpu", checked=True),
        "shuffled": Network(net.plan, device="cpu", order="shuffled", seed=seed, blocks=3),
    }
    for mode, one in runs.items():
        for number, value in enumerate(one({"x": x}).values()):
            exact = case.name != "tanh"
            equal = np.array_equal if exact else lambda a, b, equal_nan: np.allclose(a, b, 1e-5, 1e-6, equal_nan)
            if not equal(np.asarray(value), right, equal_nan=True):
                found.append(f"{case.name} {case.shape} {templates[number]} cta_size={cta_size} {mode}")
    return found


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=40, help="templates of each case, way and block size")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cta", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--values", action="store_true", help="prove the values, too")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    rng, rows, reasons, bad = random.Random(arguments.seed), [], Counter(), []
    start = time.perf_counter()
    for case in cases():
        for read in (False, True) if case.reader else (False,):
            every = taken = ran = 0
            for cta_size in arguments.cta:
                known = [s for s in schedules_of(case, cta_size) if read or not s.shared]
                every += len(known)
                drawn = rng.sample(known, min(len(known), arguments.samples))
                taken += len(drawn)
                fit = []
                for schedule in drawn:
                    why = scheduled(case, schedule, cta_size, read=read)
                    reasons[_kind_of(why)] += bool(why)
                    fit += [] if why else [schedule]
                ran += len(fit)
                verify = "values" if arguments.values else "memory"
                bad += wrong(case, fit, cta_size, read=read, seed=arguments.seed, verify=verify) if fit else []
            rows.append((case.name, "x".join(map(str, case.shape)), "yes" if read else "", every, taken, ran))
            print(*rows[-1], f"{time.perf_counter() - start:.0f} s", flush=True)
    print(format_table(("operation", "shape", "read", "templates", "drawn", "run"), rows))
    for reason, count in reasons.most_common():
        print(f"{count:6} {reason}")
    print(f"{sum(row[-1] for row in rows)} run, {len(bad)} wrong", *bad[:20], sep="\n")
    if arguments.out:
        names = ("operation", "shape", "read", "templates", "drawn", "run")
        results = [dict(zip(names, row, strict=True)) for row in rows]
        save_results(arguments.out, "benchmarks.template_campaign", results, refused=dict(reasons), wrong=bad)


def _kind_of(why: str) -> str:
    """A refusal without what it is about."""
    for words in (
        "share no registers",
        "across warps",
        "of their own",
        "no WARP whose lanes",
        "would come from elsewhere",
        "some warps have no work",
        "scheduling step",
        "three dimensions",
    ):
        if words in why:
            return words
    return why[:100]


if __name__ == "__main__":
    main()
