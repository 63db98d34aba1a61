"""From a kernel's file to one part of a fused kernel (paper Figure 5, lines 2 to 6).

Before: a kernel of a file of its own. After: a function of the device in a namespace of its own, whose thread is one of
the part's and not one of the block's::

    threadIdx, blockDim         functions with the part's shape as constants
    __syncthreads()             bar.sync with the part's number and its count of threads
    extern __shared__ T x[];    a pointer to the part's bytes of the one pool
    gridDim (and blockIdx)      an argument, handed from function to function to where it is used

The paper inlines all calls, lifts the local variables to the top of the kernel and renames them. Here the kernel stays
a function that is always inlined: C++'s scopes keep its locals and the labels of its ``goto`` apart from those of other
parts. A name of the file means what it meant, for the file is in a namespace; names with a suffix would not do for
operators, specializations, and members that are called as some function is. Macros know no namespaces: each part puts
the earlier meaning of its macros back. All but ``gridDim`` is rewritten without a change of a function's parameters, so
functions that the kernel calls, members of classes and bodies of macros are rewritten as the kernel itself is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from souffle.hfuse.edits import Edit, applied, device_function, left_out, plain_linkage, squeezed
from souffle.hfuse.errors import FusionError
from souffle.hfuse.parameters import BUILTIN_WORDS, Parameter, kernel_parameters, template_arguments
from souffle.hfuse.position import Position, prologue
from souffle.hfuse.reach import Reach
from souffle.hfuse.shared_arrays import pool_pointers
from souffle.hfuse.source import Function, Node, Occurrence, Source, walk

__all__ = ["Rewritten", "grid_rank", "rewrite"]

_REPLACED = {
    "threadIdx": "hfuse_thread()",
    "blockDim": "hfuse_block()",
    "__syncthreads": "hfuse_barrier",
    "__syncthreads_count": "hfuse_barrier_count",
    "__syncthreads_and": "hfuse_barrier_and",
    "__syncthreads_or": "hfuse_barrier_or",
}
_GRID = {"gridDim": "hfuse_grid.extent", "blockIdx": "hfuse_grid.index"}
_OVERLOADED = frozenset(
    {
        *(f"atomic{name}" for name in ("Add", "Sub", "Exch", "Min", "Max", "Inc", "Dec", "CAS", "And", "Or", "Xor")),
        *(f"__shfl{name}_sync" for name in ("", "_up", "_down", "_xor")),
        *("__ldg", "min", "max", "abs", "fabs", "fabsf", "fmin", "fminf", "fmax", "fmaxf", "pow", "sqrt", "exp", "log"),
    }
)
"""CUDA's functions that a file may add an overload to."""

_PLACE = "const hfuse_place hfuse_grid"


@dataclass(frozen=True)
class Rewritten:
    """A part's text.

    Attributes
    ----------
    text : str
        The namespace.
    scope : str
        The namespace that the kernel and the names of its parameters' types are in.
    callee : str
        What the fused kernel calls there.
    parameters : tuple of Parameter
    takes_place : bool
        Whether the first argument of the call is the part's place in its grid.
    includes : tuple of str
        Headers, to stand before all parts.
    symbols : tuple of str
        Variables of the device without a value, which the host fills under the namespace's name.
    """

    text: str
    scope: str
    callee: str
    parameters: tuple[Parameter, ...]
    takes_place: bool
    includes: tuple[str, ...]
    symbols: tuple[str, ...]


def grid_rank(reach: Reach) -> int:
    """1 where the kernel asks for ``blockIdx.x`` and ``gridDim.x`` alone, or 3."""
    for occurrence in reach.occurrences:
        if occurrence.name in _GRID and not re.match(rb"\s*\.\s*x\b", reach.source.data[occurrence.end :]):
            return 3
    return 1


def rewrite(reach: Reach, name: str, position: Position) -> Rewritten:
    """Make a kernel one part.

    Parameters
    ----------
    reach : Reach
        Of a kernel that can be fused (:func:`souffle.hfuse.refusals.demand_fusible`).
    name : str
        The kernel's, with its template arguments.
    position : Position

    Raises
    ------
    FusionError
        What it asks of its grid, or its parameters, cannot be handed to where they are used.
    """
    return _Rewriter(reach, name, position).result()


class _Rewriter:
    def __init__(self, reach: Reach, name: str, position: Position) -> None:
        self._reach, self._source, self._position, self._name = reach, reach.source, position, name
        self._template = template_arguments(self._source, reach.kernel, name)
        self._asked = {"gridDim"} & reach.used
        if "blockIdx" in reach.used and (position.rank == 3 or position.shifted):
            self._asked.add("blockIdx")
        leading = reach.leading_to(frozenset(self._asked)) if self._asked else frozenset()
        self._carriers = [f for f in reach.functions if f is not reach.kernel and f.name in leading]
        self._leading = leading

    def result(self) -> Rewritten:
        source, kernel = self._source, self._reach.kernel
        parameters = kernel_parameters(source, kernel, self._template)
        self._demand_carriers()
        edits = [
            *left_out(self._reach),
            *device_function(self._reach),
            *plain_linkage(self._reach),
            *pool_pointers(self._reach, self._position.pool),
            *self._names(),
            *self._handed_on(),
        ]
        body = squeezed(applied(source.data, edits))
        macros = tuple(dict.fromkeys([*(macro.name for macro in source.macros), *_undefined(source)]))
        callee = kernel.name + self._template_text()
        wrapper = ""
        words = set(re.findall(r"[A-Za-z_]\w*", self._template_text()))
        if not words <= BUILTIN_WORDS:
            wrapper, callee = self._wrapper(parameters, callee), "hfuse_run"
        aliases = "".join(f"using {p.base} = {p.alias};\n" for p in parameters if p.alias)
        after = "\n".join(part for part in (aliases.rstrip(), wrapper.rstrip()) if part)
        for inner in reversed(kernel.scope if after else ()):
            after = f"namespace {inner} {{\n{after}\n}}"
        scope = self._position.scope
        text = "\n".join(
            [
                *(f'#pragma push_macro("{macro}")' for macro in macros),
                f"namespace {scope} {{",
                *self._overloaded(),
                *prologue(self._position, self._reach.used, bool(self._asked)),
                body,
                *([after] if after else []),
                f"}}  // namespace {scope}",
                *(f'#pragma pop_macro("{macro}")' for macro in macros),
            ]
        )
        includes = tuple(dict.fromkeys(include.header for include in source.includes))
        return Rewritten(text, self._scope, callee, parameters, bool(self._asked), includes, self._symbols())

    @property
    def _scope(self) -> str:
        return "::".join((self._position.scope, *self._reach.kernel.scope))

    def _template_text(self) -> str:
        if not self._template:
            return ""
        return f"<{self._name.partition('<')[2]}" if "<" in self._name else "<>"

    def _wrapper(self, parameters: tuple[Parameter, ...], callee: str) -> str:
        """A function for a template whose arguments are names of the part."""
        place = [_PLACE] if self._asked else []
        declared = [p.declared(p.name, self._scope) for p in parameters]
        arguments = (["hfuse_grid"] if self._asked else []) + [p.name for p in parameters]
        head = f"__device__ __forceinline__ void hfuse_run({', '.join(place + declared)})"
        return f"{head} {{ {callee}({', '.join(arguments)}); }}\n"

    def _overloaded(self) -> Iterator[str]:
        """A function of the file hides those of CUDA with its name, which it overloaded before."""
        for name in dict.fromkeys(f.name for f in self._reach.functions if f.name in _OVERLOADED):
            yield f"using ::{name};"

    def _names(self) -> Iterator[Edit]:
        names = _REPLACED | {name: _GRID[name] for name in self._asked}
        functions = {f.name for f in self._source.functions}
        for occurrence in self._reach.occurrences:
            name = names.get(occurrence.name)
            leading = self._leading_colons(occurrence)
            if name is not None:
                if leading is not None:
                    name = name if occurrence.name in _GRID else f"::{self._position.scope}::{name}"
                    yield leading, occurrence.start, ""
                yield occurrence.start, occurrence.end, name
            elif leading is not None and occurrence.name in functions | self._file_names():
                yield occurrence.start, occurrence.start, f"{self._position.scope}::"

    def _leading_colons(self, occurrence: Occurrence) -> int | None:
        """Where a ``::`` stands that names the file's own scope."""
        before = self._source.data[: occurrence.start]
        match = re.search(rb"(?<![\w>:])(\s*)(::)\s*$", before[-80:])
        return None if match is None else occurrence.start - len(before[-80:]) + match.start(2)

    def _file_names(self) -> frozenset[str]:
        """Names of types, variables and namespaces of the file."""
        names = set()
        for node in self._source.root.children:
            if node.type.endswith("_specifier") or node.type in ("namespace_definition", "alias_declaration"):
                label = node.child_by_field_name("name")
                names |= {label.text.decode()} if label is not None else set()
            elif node.type in ("declaration", "type_definition"):
                for child in node.children_by_field_name("declarator"):
                    labels = [n for n in walk(child) if n.type in ("identifier", "type_identifier")]
                    names |= {label.text.decode() for label in labels[:1]}
        return frozenset(names)

    def _demand_carriers(self) -> None:
        """Refuse where the place in the grid would have to go through what has no parameters to hand it in."""
        what = " or ".join(sorted(self._asked))
        for name, mentioned in self._reach.members:
            if self._asked and mentioned & self._leading:
                nodes = [
                    n for n in self._reach.nodes() if n.type in ("identifier", "field_identifier", "operator_name")
                ]
                first = next((n for n in nodes if n.text.decode() == name), self._reach.kernel.node)
                raise self._refused(
                    first.start_byte,
                    f"the member {name} uses {what}, which differs from part to part of a fused kernel",
                    "hand it to a function as an argument",
                )

    def _handed_on(self) -> Iterator[Edit]:
        """The place in the grid, as a further parameter and argument of the functions on the way to its use."""
        if not self._asked:
            return
        for function in [self._reach.kernel, *self._carriers]:
            yield self._first_of(function.parameters, _PLACE)
        heads = {self._name_of(function).start_byte for function in self._carriers}
        names = {function.name for function in self._carriers}
        for occurrence in self._reach.occurrences:
            if occurrence.name not in names or occurrence.start in heads:
                continue
            yield self._argument(occurrence)

    def _argument(self, occurrence: Occurrence) -> Edit:
        if occurrence.node is None:
            rest = self._source.data[occurrence.end :]
            opening = re.match(rb"\s*\(\s*(\))?", rest)
            if opening is not None:
                start = occurrence.end + rest.index(b"(") + 1
                return start, start, "hfuse_grid" if opening[1] else "hfuse_grid, "
        else:
            node = occurrence.node
            while node.parent is not None and node.parent.type in ("template_function", "qualified_identifier"):
                node = node.parent
            call = node.parent
            if call is not None and call.type == "call_expression" and call.child_by_field_name("function") == node:
                return self._first_of(call.child_by_field_name("arguments"), "hfuse_grid")
        raise self._refused(
            occurrence.start,
            f"{occurrence.name} uses {' or '.join(sorted(self._asked))} of its own kernel and is used here other than "
            "by a call of its name",
            "call it, or hand what it needs of the grid to it as an argument",
        )

    def _first_of(self, given: Node, text: str) -> Edit:
        """An insertion before the first of some parameters or arguments."""
        start = given.start_byte + 1
        inner = [child for child in given.children if child.is_named and child.type != "comment"]
        if len(inner) == 1 and self._source.slice(inner[0].start_byte, inner[0].end_byte).strip() == "void":
            return inner[0].start_byte, inner[0].end_byte, text
        return start, start, f"{text}, " if inner else text

    def _name_of(self, function: Function) -> Node:
        name = function.declarator.child_by_field_name("declarator")
        while name.type in ("qualified_identifier", "template_function"):
            name = name.child_by_field_name("name")
        return name

    def _symbols(self) -> tuple[str, ...]:
        """Variables of the device that the file gives no value."""
        symbols = []
        for node in self._reach.nodes():
            if node.type != "declaration" or any(f.start <= node.start_byte < f.end for f in self._source.functions):
                continue
            words = {child.text.decode() for child in node.children}
            if not words & {"__constant__", "__device__", "__managed__"} or "extern" in words:
                continue
            for child in node.children_by_field_name("declarator"):
                labels = [n for n in walk(child) if n.type == "identifier"]
                if child.type != "init_declarator" and labels and child.type != "function_declarator":
                    symbols.append(labels[0].text.decode())
        return tuple(symbols)

    def _refused(self, offset: int, what: str, why: str) -> FusionError:
        place, line = self._source.place(offset), self._source.excerpt(offset)
        return FusionError(f"{place}: `{line}`: {what}; {why}")


def _undefined(source: Source) -> list[str]:
    return [match[1].decode() for match in re.finditer(rb"^[ \t]*#[ \t]*undef[ \t]+(\w+)", source.data, re.MULTILINE)]
