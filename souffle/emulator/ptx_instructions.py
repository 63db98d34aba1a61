"""The PTX instructions that have a stand-in, each with the C++ that takes its place.

A PTX register is a 64-bit ``souffle_reg`` in that C++; see ``include/souffle_ptx.h``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from souffle.errors import CudaCompileError

__all__ = ["AsmOperand", "AsmStatement", "split_list", "translate_instruction"]

_CPP_TYPE = {
    "b8": "unsigned char", "u8": "unsigned char", "s8": "signed char",
    "b16": "unsigned short", "u16": "unsigned short", "s16": "short",
    "b32": "unsigned int", "u32": "unsigned int", "s32": "int",
    "b64": "unsigned long long", "u64": "unsigned long long", "s64": "long long",
    "f32": "float", "f64": "double", "pred": "bool",
}  # fmt: skip
_COMPARE = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">=",
}  # fmt: skip


@dataclass(frozen=True)
class AsmOperand:
    """A C++ operand of an ``asm`` statement: ``[name] "constraint" (expression)``."""

    constraint: str
    expression: str
    name: str | None


@dataclass(frozen=True)
class AsmStatement:
    """One ``asm`` statement being translated, with what its instructions may name."""

    operands: tuple[AsmOperand, ...]
    registers: dict[str, str]  # name -> PTX type
    line: int

    def fail(self, instruction: str, why: str) -> CudaCompileError:
        return CudaCompileError(f"line {self.line}: inline PTX `{instruction}`: {why}")

    def value(self, text: str, instruction: str) -> str:
        """Give the C++ expression of an operand; registers are lvalues."""
        text = text.strip()
        if re.fullmatch(r"%\d+", text):
            if int(text[1:]) >= len(self.operands):
                raise self.fail(instruction, f"there is no operand {text}")
            return f"souffle_o{text[1:]}"
        if match := re.fullmatch(r"%\[(\w+)\]", text):
            for i, operand in enumerate(self.operands):
                if operand.name == match.group(1):
                    return f"souffle_o{i}"
        if re.fullmatch(r"[+-]?(?:0[xX][0-9a-fA-F]+|\d+)U?", text):
            digits = text.rstrip("U")
            octal = re.fullmatch(r"([+-]?)0(\d+)", digits)
            return f"souffle_reg({digits if octal is None else octal.group(1) + str(int(octal.group(2), 8))}LL)"
        if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
            return f"souffle_reg(0x{match.group(1)}u)"
        if match := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", text):
            return f"souffle_reg(0x{match.group(1)}ull)"
        bare = text.lstrip("%")
        if bare in self.registers:
            return "souffle_v_" + re.sub(r"\W", "_", bare)
        if bare in _SPECIAL:
            return f"souffle_reg({_SPECIAL[bare]})"
        raise self.fail(instruction, f"the operand `{text}` is not one that the CPU device knows")

    def address(self, text: str, instruction: str) -> str:
        match = re.fullmatch(r"\[\s*([^\s+\-\]]+|%\[\w+\])\s*(?:([+-])\s*(\w+))?\s*\]", text.strip())
        if match is None:
            raise self.fail(instruction, f"`{text}` is not an address")
        base = self.value(match.group(1), instruction)
        return f"({base} {match.group(2)} {match.group(3)})" if match.group(2) else base

    def list(self, text: str, instruction: str) -> list[str]:
        text = text.strip()
        if text.startswith("{"):
            return [self.value(part, instruction) for part in split_list(text[1:-1])]
        return [self.value(text, instruction)]


_SPECIAL = {
    "laneid": "souffle_self->lane", "warpid": "souffle_self->warp", "smid": "souffle_self->block_index.x",
    "clock": "clock()", "clock64": "clock64()", "globaltimer": "souffle_globaltimer(souffle_self)",
    "globaltimer_lo": "(unsigned)souffle_globaltimer(souffle_self)",
    "cluster_ctarank": "0",
    **{f"{r}.{d}": f"{v}.{d}" for r, v in (("tid", "threadIdx"), ("ntid", "blockDim"), ("ctaid", "blockIdx"),
                                           ("nctaid", "gridDim")) for d in "xyz"},
    "lanemask_lt": "((1u << souffle_self->lane) - 1)", "lanemask_eq": "(1u << souffle_self->lane)",
    "lanemask_le": "((2u << souffle_self->lane) - 1)", "lanemask_gt": "~((2u << souffle_self->lane) - 1)",
    "lanemask_ge": "~((1u << souffle_self->lane) - 1)",
}  # fmt: skip


def split_list(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "{[(") - (c in "}])")
        if c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*parts, last] if last or parts else []


def _space(mods: list[str]) -> str:
    return "souffle_shared" if any(m.split("::")[0] == "shared" for m in mods) else "souffle_global"


def _need(asm: AsmStatement, text: str, args: list[str], *counts: int) -> None:
    if len(args) not in counts:
        raise asm.fail(text, f"{len(args)} operands are not a form that the CPU device knows")


def _get(kind: str, value: str) -> str:
    return f"souffle_get<{_CPP_TYPE[kind]}>({value})"


def _put(kind: str, value: str) -> str:
    return f"souffle_put<{_CPP_TYPE[kind]}>({value})"


def _kind(asm: AsmStatement, text: str, mods: list[str]) -> str:
    if not mods or mods[-1] not in _CPP_TYPE:
        raise asm.fail(text, "its type is not one that the CPU device knows")
    return mods[-1]


def _cp_async(asm: AsmStatement, text: str, mods: list[str], args: list[str]) -> str:
    if mods[:3] == ["async", "bulk", "prefetch"]:
        return _nothing(asm, text, mods, args)
    if mods[:2] == ["async", "commit_group"]:
        return "souffle_copy_commit(souffle_self)"
    if mods[:2] == ["async", "wait_group"]:
        _need(asm, text, args, 1)
        return f"souffle_copy_wait(souffle_self, int({asm.value(args[0], text)}), 0)"
    if mods[:2] == ["async", "wait_all"]:
        return "souffle_copy_wait(souffle_self, 0, 1)"
    if mods[:1] != ["async"] or mods[1:2] not in (["ca"], ["cg"]) or len(args) not in (3, 4, 5):
        raise asm.fail(text, "the CPU device does not know this instruction")
    size = asm.value(args[2], text)
    # A predicate here is PTX's ignore-src: the destination is then filled with zeros.
    source_size = size
    if len(args) > 3:
        fourth = asm.value(args[3], text)
        ignore = asm.registers.get(args[3].strip().lstrip("%")) == "pred"
        source_size = f"({fourth} ? 0 : {size})" if ignore else fourth
    return (
        f"souffle_copy_async(souffle_self, souffle_shared({asm.address(args[0], text)}), "
        f"souffle_global({asm.address(args[1], text)}), unsigned({size}), unsigned({source_size}))"
    )


def _bar(asm: AsmStatement, text: str, mods: list[str], args: list[str]) -> str:
    mods = [m for m in mods if m not in ("cta", "aligned")]
    if mods[:1] == ["warp"] and mods[1:] == ["sync"]:
        return f"__syncwarp(unsigned({asm.value(args[0], text)}))"
    if mods in (["red", "popc", "u32"], ["red", "and", "pred"], ["red", "or", "pred"]):
        return _voting_bar(asm, text, mods[1], args)
    if mods[:1] not in (["sync"], ["arrive"]):
        raise asm.fail(text, "the CPU device does not know this instruction")
    _need(asm, text, args, 1, 2)
    count = f"int({asm.value(args[1], text)})" if len(args) == 2 else "-1"
    name = "souffle_barrier" if mods[0] == "sync" else "souffle_barrier_arrive"
    return f"{name}(souffle_self, int({asm.value(args[0], text)}), {count})"


def _voting_bar(asm: AsmStatement, text: str, vote: str, args: list[str]) -> str:
    """A barrier that counts its threads' predicates, or joins them: ``bar.red.popc.u32 d, id, count, p``."""
    _need(asm, text, args, 3, 4)
    count = f"int({asm.value(args[2], text)})" if len(args) == 4 else "-1"
    predicate = args[-1].strip()
    holds = asm.value(predicate.removeprefix("!"), text)
    holds = f"!{holds}" if predicate.startswith("!") else f"{holds} != 0"
    voted = f"souffle_barrier_vote(int({asm.value(args[1], text)}), {count}, {holds})"
    result = {"popc": f"{voted}.holding", "and": f"{voted}.all()", "or": f"{voted}.any()"}[vote]
    return f"{asm.value(args[0], text)} = {result}"


def _load(asm: AsmStatement, text: str, mods: list[str], args: list[str]) -> str:
    kind, space = _kind(asm, text, mods), _space(mods)
    polled = any(m in ("volatile", "acquire", "relaxed") for m in mods)
    read = "souffle_load_polled" if polled else "souffle_load_as"
    _need(asm, text, args, 2)
    size = f"sizeof({_CPP_TYPE[kind]})"
    base = f"{space}({asm.address(args[1], text)})"
    targets = asm.list(args[0], text)
    if "acquire" in mods and _orders_blocks(kind, mods) and len(targets) == 1:
        read = "souffle_load_acquire"
    return "; ".join(f"{t} = {read}<{_CPP_TYPE[kind]}>({base} + {i} * {size})" for i, t in enumerate(targets))


def _store(asm: AsmStatement, text: str, mods: list[str], args: list[str]) -> str:
    kind, space = _kind(asm, text, mods), _space(mods)
    published = any(m in ("volatile", "release", "relaxed") for m in mods)
    write = "souffle_store_published" if published else "souffle_store_as"
    _need(asm, text, args, 2)
    size = f"sizeof({_CPP_TYPE[kind]})"
    base = f"{space}({asm.address(args[0], text)})"
    values = asm.list(args[1], text)
    if "release" in mods and _orders_blocks(kind, mods) and len(values) == 1:
        write = "souffle_store_release"
    return "; ".join(f"{write}<{_CPP_TYPE[kind]}>({base} + {i} * {size}, {v})" for i, v in enumerate(values))


_ATOMIC = {
    "add": "T(old + v)", "min": "old < v ? old : v", "max": "old > v ? old : v", "exch": "v",
    "and": "T(old & v)", "or": "T(old | v)", "xor": "T(old ^ v)",
    "inc": "old >= v ? T(0) : T(old + 1)", "dec": "old == 0 || old > v ? v : T(old - 1)",
}  # fmt: skip


def _orders_blocks(kind: str, mods: list[str]) -> bool:
    """Whether an instruction that says acquire, release or relaxed says it of other blocks and of memory they see."""
    shared = any(m.split("::")[0] == "shared" for m in mods)
    return not shared and ("gpu" in mods or "sys" in mods) and kind[1:] in ("16", "32", "64")


def _atomic(asm: AsmStatement, text: str, mods: list[str], args: list[str], *, returns: bool) -> str:
    kind, space = _kind(asm, text, mods), _space(mods)
    op = next((m for m in mods if m in _ATOMIC or m == "cas"), None)
    if op is None or _CPP_TYPE[kind] == "bool":
        raise asm.fail(text, "the CPU device does not know this atomic operation")
    _need(asm, text, args, (3 if returns else 2) + (op == "cas"))
    rest = args[1:] if returns else args
    values = [_get(kind, asm.value(v, text)) for v in rest[1:]]
    if op == "cas":
        body = f"T v = {values[0]}, w = {values[1]}; return old == v ? w : old;"
    else:
        body = f"T v = {values[0]}; return {_ATOMIC[op]};"
    function = "souffle_atomic_as<T>"
    acquires, releases = ("acq_rel" in mods or word in mods for word in ("acquire", "release"))
    if (acquires or releases or "relaxed" in mods) and _orders_blocks(kind, mods):
        function = f"souffle_atomic_ordered<T, {str(acquires).lower()}, {str(releases).lower()}, "
        function += "kSouffleCounts>" if op == "add" else "kSouffleModifies>"
    call = f"{function}({space}({asm.address(rest[0], text)}), [&](T old) -> T {{ {body} }})"
    target = f"{asm.value(args[0], text)} = " if returns else ""
    return f"{{ typedef {_CPP_TYPE[kind]} T; {target}{call}; }}"


def _ldmatrix(asm: AsmStatement, text: str, mods: list[str], args: list[str]) -> str:
    counts = {"x1": 1, "x2": 2, "x4": 4}
    count = next((counts[m] for m in mods if m in counts), None)
    if count is None or "m8n8" not in mods or mods[-1] != "b16":
        raise asm.fail(text, "the CPU device knows only m8n8 with x1, x2 or x4 and .b16")
    _need(asm, text, args, 2)
    targets = asm.list(args[0], text)
    if len(targets) != count:
        raise asm.fail(text, f"{len(targets)} registers for {count} matrices")
    out = ", ".join("&" + t for t in targets)
    transposed = "true" if "trans" in mods else "false"
    return (
        f"{{ souffle_reg* const souffle_out[] = {{{out}}}; "
        f"souffle_ldmatrix<{count}, {transposed}>(souffle_out, {asm.address(args[1], text)}); }}"
    )


_MMA_TYPES = {
    "f16": ("SouffleHalfBits", 2, "float"), "bf16": ("SouffleBfloatBits", 2, "float"),
    "tf32": ("SouffleTf32Bits", 1, "float"), "s8": ("signed char", 4, "int"), "u8": ("unsigned char", 4, "int"),
}  # fmt: skip


def _mma(asm: AsmStatement, text: str, mods: list[str], args: list[str]) -> str:
    unknown = asm.fail(text, "the CPU device knows mma.sync.m16n8kK.row.col with f16, bf16, tf32, s8 and u8 operands")
    mods = [m for m in mods if m not in ("sync", "aligned", "satfinite")]
    shape = re.fullmatch(r"m16n8k(\d+)", mods[0]) if mods else None
    if shape is None or len(mods) != 7 or mods[1:3] != ["row", "col"] or len(args) != 4:
        raise unknown
    k, (d, a, b, c) = int(shape.group(1)), mods[3:]
    if a not in _MMA_TYPES or b not in _MMA_TYPES or d != c or _MMA_TYPES[a][1:] != _MMA_TYPES[b][1:]:
        raise unknown
    per, computed = _MMA_TYPES[a][1:]
    half = d == "f16"
    if d not in (("s32",) if computed == "int" else ("f32", "f16")) or k not in (4 * per, 8 * per):
        raise unknown
    pieces = k // (4 * per)
    outs, lefts, rights, adds = (asm.list(arg, text) for arg in args)
    registers = 2 if half else 4
    if (len(outs), len(lefts), len(rights), len(adds)) != (registers, 2 * pieces, pieces, registers):
        raise asm.fail(text, "the operands have the wrong number of registers")
    fill = "; ".join(
        f"m.{field}[{i}] = unsigned({v})"
        for field, values in (("a", lefts), ("b", rights), ("c", adds))
        for i, v in enumerate(values)
    )
    back = "; ".join(f"{v} = m.c[{i}]" for i, v in enumerate(outs))
    types = f"{k}, {_MMA_TYPES[a][0]}, {_MMA_TYPES[b][0]}, {computed}, {'true' if half else 'false'}"
    return f"{{ SouffleMma m; {fill}; souffle_mma<{types}>(m); {back}; }}"


def _cvta(asm: AsmStatement, text: str, mods: list[str], args: list[str]) -> str:
    _need(asm, text, args, 2)
    target, source = asm.value(args[0], text), asm.value(args[1], text)
    if not any(m.split("::")[0] == "shared" for m in mods):
        return f"{target} = {source}"
    if "to" in mods:
        return f"{target} = souffle_shared_address(souffle_global({source}))"
    return f"{target} = souffle_reg(size_t(souffle_shared({source})))"


def _cvt(asm: AsmStatement, text: str, mods: list[str], args: list[str]) -> str:
    _need(asm, text, args, 2)
    if mods == ["rna", "tf32", "f32"]:
        single = _get("f32", asm.value(args[1], text))
        return f"{asm.value(args[0], text)} = {_put('f32', f'souffle_to_tf32({single})')}"
    types = [m for m in mods if m in _CPP_TYPE]
    rounding = [m for m in mods if m in ("rn", "rz", "rni", "rzi", "rmi", "rpi", "sat", "ftz")]
    if len(types) != 2 or len(types) + len(rounding) != len(mods) or "rz" in mods:
        raise asm.fail(text, "the CPU device does not know this conversion")
    target, source = types
    value = _get(source, asm.value(args[1], text))
    if target[0] != "f" and source[0] == "f":
        mode = {"rni": "nearbyint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
        name = next((mode[m] for m in mods if m in mode), "trunc")
        low = "0" if target[0] == "u" else f"({_CPP_TYPE[target]})(1ull << {int(target[1:]) - 1})"
        high = f"({_CPP_TYPE[target]})(~0ull >> {64 - int(target[1:]) + (target[0] == 's')})"
        value = f"souffle_saturate<{_CPP_TYPE[target]}>({name}(double({value})), {low}, {high})"
    return f"{asm.value(args[0], text)} = {_put(target, value)}"


def _binary(expression: str) -> Callable[[AsmStatement, str, list[str], list[str]], str]:
    def translate(asm: AsmStatement, text: str, mods: list[str], args: list[str]) -> str:
        kind = _kind(asm, text, mods)
        _need(asm, text, args, expression.count("{") + 1)
        values = [_get(kind, asm.value(a, text)) for a in args[1:]]
        return f"{asm.value(args[0], text)} = {_put(kind, expression.format(*values))}"

    return translate


def _extremum(asm: AsmStatement, text: str, mods: list[str], args: list[str]) -> str:
    name = text.partition(".")[0]
    return _binary(f"souffle_{name}_nan({{}}, {{}})" if "NaN" in mods else f"{name}({{}}, {{}})")(asm, text, mods, args)


def _unary_float(function: str) -> Callable[[AsmStatement, str, list[str], list[str]], str]:
    def translate(asm: AsmStatement, text: str, mods: list[str], args: list[str]) -> str:
        kind = _kind(asm, text, mods)
        if kind not in ("f32", "f64"):
            raise asm.fail(text, "the CPU device knows it for f32 and f64")
        _need(asm, text, args, 2)
        return f"{asm.value(args[0], text)} = {_put(kind, function.format(_get(kind, asm.value(args[1], text))))}"

    return translate


def _mul(asm: AsmStatement, text: str, mods: list[str], args: list[str]) -> str:
    kind = _kind(asm, text, mods)
    _need(asm, text, args, 3)
    a, b = (_get(kind, asm.value(v, text)) for v in args[1:])
    target = asm.value(args[0], text)
    if kind[0] == "f" or "lo" in mods:
        return f"{target} = {_put(kind, f'{a} * {b}')}"
    if "wide" in mods and kind in ("u32", "s32"):
        wide = kind[0] + "64"
        return f"{target} = {_put(wide, f'({_CPP_TYPE[wide]}){a} * {b}')}"
    raise asm.fail(text, "the CPU device knows .lo, .wide and floating-point products")


def _mad(asm: AsmStatement, text: str, mods: list[str], args: list[str]) -> str:
    _need(asm, text, args, 4)
    kind = _kind(asm, text, mods)
    if kind[0] == "f":
        a, b, c = (_get(kind, asm.value(v, text)) for v in args[1:])
        return f"{asm.value(args[0], text)} = {_put(kind, f'fma({a}, {b}, {c})')}"
    if "lo" not in mods:
        raise asm.fail(text, "the CPU device knows mad.lo and floating-point forms")
    a, b, c = (_get(kind, asm.value(v, text)) for v in args[1:])
    return f"{asm.value(args[0], text)} = {_put(kind, f'{a} * {b} + {c}')}"


def _setp(asm: AsmStatement, text: str, mods: list[str], args: list[str]) -> str:
    kind = _kind(asm, text, mods)
    _need(asm, text, args, 3)
    if mods[0] not in _COMPARE or len(mods) != 2:
        raise asm.fail(text, "the CPU device does not know this comparison")
    a, b = (_get(kind, asm.value(v, text)) for v in args[1:])
    return f"{asm.value(args[0], text)} = {a} {_COMPARE[mods[0]]} {b}"


def _selp(asm: AsmStatement, text: str, mods: list[str], args: list[str]) -> str:
    _need(asm, text, args, 4)
    target, a, b, p = (asm.value(v, text) for v in args)
    return f"{target} = {p} ? {a} : {b}"


def _mov(asm: AsmStatement, text: str, mods: list[str], args: list[str]) -> str:
    kind = _kind(asm, text, mods)
    _need(asm, text, args, 2)
    targets, sources = asm.list(args[0], text), asm.list(args[1], text)
    if len(targets) == len(sources) == 1:
        return f"{targets[0]} = {_put(kind, _get(kind, sources[0]))}"
    # Packing and unpacking: {low, high} against one register of the whole width.
    width = int(kind[1:]) // max(len(targets), len(sources))
    mask = f"((1ull << {width}) - 1)"
    if len(targets) == 1:
        return f"{targets[0]} = " + " | ".join(f"({s} & {mask}) << {i * width}" for i, s in enumerate(sources))
    if len(sources) == 1:
        return "; ".join(f"{t} = {sources[0]} >> {i * width} & {mask}" for i, t in enumerate(targets))
    raise asm.fail(text, "the CPU device does not know this form of mov")


def _dp4a(asm: AsmStatement, text: str, mods: list[str], args: list[str]) -> str:
    _need(asm, text, args, 4)
    kinds = ["unsigned char" if m == "u32" else "signed char" for m in mods]
    target, a, b, c = (asm.value(v, text) for v in args)
    return f"{target} = (unsigned)souffle_dp4a<{kinds[0]}, {kinds[1]}>(unsigned({a}), unsigned({b}), int({c}))"


def _nothing(asm: AsmStatement, text: str, mods: list[str], args: list[str]) -> str:
    return "(void)0"


def _fence(asm: AsmStatement, text: str, mods: list[str], args: list[str]) -> str:
    return "__threadfence()"


def _elect(asm: AsmStatement, text: str, mods: list[str], args: list[str]) -> str:
    _need(asm, text, args, 2)
    predicate = args[0].split("|")[-1]
    return f"{asm.value(predicate, text)} = souffle_elect(unsigned({asm.value(args[1], text)}))"


def _shift(asm: AsmStatement, text: str, mods: list[str], args: list[str], op: str) -> str:
    kind = _kind(asm, text, mods)
    _need(asm, text, args, 3)
    bits = int(kind[1:])
    amount = f"min(unsigned({asm.value(args[2], text)}), {bits}u)"
    value = f"({'__int128' if kind[0] == 's' else 'unsigned __int128'}){_get(kind, asm.value(args[1], text))}"
    return f"{asm.value(args[0], text)} = {_put(kind, f'{value} {op} {amount}')}"


_INSTRUCTIONS: dict[str, Callable[[AsmStatement, str, list[str], list[str]], str]] = {
    "cp": _cp_async, "bar": _bar, "barrier": _bar, "ldmatrix": _ldmatrix, "mma": _mma,
    "ld": _load, "ldu": _load, "st": _store,
    "atom": lambda *a: _atomic(*a, returns=True), "red": lambda *a: _atomic(*a, returns=False),
    "membar": _fence, "fence": _fence,
    "prefetch": _nothing, "prefetchu": _nothing, "discard": _nothing, "griddepcontrol": _nothing,
    "applypriority": _nothing, "pmevent": _nothing,
    "nanosleep": lambda asm, text, mods, args: "souffle_relax(souffle_self)",
    "cvta": _cvta, "cvt": _cvt, "mov": _mov, "setp": _setp, "selp": _selp, "mul": _mul, "mad": _mad, "fma": _mad,
    "add": _binary("{} + {}"), "sub": _binary("{} - {}"), "and": _binary("{} & {}"), "or": _binary("{} | {}"),
    "xor": _binary("{} ^ {}"), "not": _binary("~{}"), "neg": _binary("-{}"), "min": _extremum, "max": _extremum,
    "shl": lambda asm, text, mods, args: _shift(asm, text, mods, args, "<<"),
    "shr": lambda asm, text, mods, args: _shift(asm, text, mods, args, ">>"),
    "div": _binary("{} / {}"),
    "ex2": _unary_float("exp2({})"), "lg2": _unary_float("log2({})"), "rcp": _unary_float("1 / {}"),
    "rsqrt": _unary_float("1 / sqrt({})"), "sqrt": _unary_float("sqrt({})"), "tanh": _unary_float("tanh({})"),
    "sin": _unary_float("sin({})"), "cos": _unary_float("cos({})"), "abs": _unary_float("fabs({})"),
    "dp4a": _dp4a, "elect": _elect,
    "activemask": lambda asm, text, mods, args: f"{asm.value(args[0], text)} = __activemask()",
    "trap": lambda asm, text, mods, args: "__trap()",
    "exit": lambda asm, text, mods, args: "souffle_exit(souffle_self)",
}  # fmt: skip


def translate_instruction(asm: AsmStatement, text: str) -> str:
    """Give the C++ statement for one PTX instruction, guard included.

    Raises
    ------
    CudaCompileError
        The instruction, or this form of it, has no stand-in; the message names it.
    """
    guard = re.match(r"@(!?)\s*(%?\w+)\s+", text)
    body = text[guard.end() :] if guard else text
    opcode = re.match(r"[^\s{\[]*", body).group()
    rest = body[len(opcode) :]
    name, *mods = opcode.split(".")
    handler = _INSTRUCTIONS.get(name)
    if handler is None or opcode.endswith(":"):
        raise asm.fail(text, f"the CPU device does not know the instruction `{opcode}`")
    code = handler(asm, body, mods, split_list(rest)) + ";"
    if guard:
        code = f"if ({guard.group(1)}{asm.value(guard.group(2), text)}) {{ {code} }}"
    return code
