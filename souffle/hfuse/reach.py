"""What a kernel needs of its file: the functions that it reaches by name, and which of them wait at barriers."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

from souffle.hfuse.source import BARRIERS, Function, Node, Occurrence, Source, walk

__all__ = ["HIDDEN", "Reach"]

HIDDEN = "an operator or constructor"
"""Stands for what is used without being named."""

_CLASSES = frozenset({"struct_specifier", "class_specifier", "union_specifier"})


@dataclass(frozen=True, eq=False)
class Reach:
    """A kernel with what it needs of its source.

    Types, variables and macros of the file are all kept. Of its functions, those of the device that are mentioned by
    the kernel, by what is kept, or by each other; members and operators, which are used without being named, are kept
    too. Host functions, other kernels and declarations of this one are left out.
    """

    source: Source
    kernel: Function

    @cached_property
    def functions(self) -> tuple[Function, ...]:
        """The kernel and the functions that are kept, in the order of the text."""
        candidates = [f for f in self.source.functions if f.device and not f.kernel]
        kept = [self.kernel, *(f for f in candidates if f.member)]
        names = set(self._outside)
        pending = list(kept)
        while pending or names:
            for function in pending:
                names |= self.source.mentioned(function.start, function.end)
            pending = [f for f in candidates if f.name in names and f not in kept]
            kept += pending
            names = set()
        return tuple(sorted(kept, key=lambda function: function.start))

    @cached_property
    def dropped(self) -> tuple[Function, ...]:
        """The other functions of the file."""
        return tuple(f for f in self.source.functions if f not in self.functions)

    @cached_property
    def _outside(self) -> frozenset[str]:
        """Names that types and variables mention; macros count where they are used."""
        spans = [(f.start, f.end) for f in self.source.functions]
        spans += [(macro.start, macro.end) for macro in self.source.macros]
        spans.sort()
        starts = [start for start, _ in spans]
        names = set()
        for occurrence in self.source.occurrences:
            index = bisect_right(starts, occurrence.start) - 1
            if index < 0 or occurrence.start >= spans[index][1]:
                names.add(occurrence.name)
        return self.source.expanded(names)

    def kept(self, offset: int) -> bool:
        """Whether a byte of the text belongs to what is kept; the body of a macro does where kept text uses it."""
        return not any(f.start <= offset < f.end for f in self.dropped)

    @cached_property
    def occurrences(self) -> tuple[Occurrence, ...]:
        """The names of the text that is kept."""
        return tuple(o for o in self.source.occurrences if self.kept(o.start))

    @cached_property
    def used(self) -> frozenset[str]:
        """The names that the kept functions, types and variables mention, those in their macros included."""
        names = set(self._outside)
        for function in self.functions:
            names |= self.source.mentioned(function.start, function.end)
        return frozenset(names)

    def nodes(self) -> list[Node]:
        """The nodes of the tree that are kept, in the order of the text."""
        spans = {f.end: f.start for f in self.dropped}
        kept, pending = [], [self.source.root]
        while pending:
            node = pending.pop()
            if node.start_byte < spans.get(node.end_byte, node.start_byte + 1):
                kept.append(node)
                pending += reversed(node.children)
        return kept

    @cached_property
    def members(self) -> tuple[tuple[str, frozenset[str]], ...]:
        """Of each member of a class and each operator: its name, and the names that it mentions.

        What is used without being named has the name :data:`HIDDEN`: operators, constructors, destructors, and what
        else a class says.
        """
        members = []
        for node in walk(self.source.root):
            if node.type in _CLASSES and node.child_by_field_name("body") is not None and self.kept(node.start_byte):
                label = node.child_by_field_name("name")
                name = "" if label is None else label.text.decode()
                methods = [n for n in walk(node) if n.type == "function_definition"]
                members += [(_member_name(m, name), self.source.mentioned(m.start_byte, m.end_byte)) for m in methods]
                inside = [(m.start_byte, m.end_byte) for m in methods]
                rest = {
                    o.name
                    for o in self.source.occurrences
                    if node.start_byte <= o.start < node.end_byte and not any(s <= o.start < e for s, e in inside)
                }
                members.append((HIDDEN, self.source.expanded(rest)))
        for function in self.functions:
            if function.member:
                scope = function.declarator.text.decode().partition("(")[0].split("::")
                name = _member_name(function.node, scope[-2] if len(scope) > 1 else "")
                members.append((name, self.source.mentioned(function.start, function.end)))
        return tuple(members)

    def leading_to(self, targets: frozenset[str]) -> frozenset[str]:
        """Names whose use may lead to one of `targets`: functions, macros, members of classes, :data:`HIDDEN`."""
        entries = [
            (frozenset({f.name}), self.source.mentioned(f.start, f.end)) for f in self.functions if f is not self.kernel
        ]
        entries += [(frozenset({macro.name}), self.source.expanded(macro.mentioned)) for macro in self.source.macros]
        entries += [(frozenset({name}), mentioned) for name, mentioned in self.members]
        leading = set(targets)
        grown = True
        while grown:
            grown = False
            for names, mentioned in entries:
                if not names <= leading and mentioned & leading:
                    leading |= names
                    grown = True
        return frozenset(leading)

    @cached_property
    def waiting(self) -> frozenset[str]:
        """Names whose use may be a barrier."""
        return self.leading_to(BARRIERS)

    def barriers(self) -> int:
        """How many barriers the text of the kernel and of the functions that it reaches has."""
        in_macros = {macro.name for macro in self.source.macros if macro.mentioned & BARRIERS}
        return sum(
            o.name in BARRIERS or o.name in in_macros
            for o in self.occurrences
            if o.node is not None and o.name in self.waiting
        )


def _member_name(node: Node, class_name: str) -> str:
    declarators = [n for n in walk(node) if n.type == "function_declarator"]
    name = declarators[0].child_by_field_name("declarator") if declarators else None
    while name is not None and name.type in ("qualified_identifier", "template_function", "template_method"):
        name = name.child_by_field_name("name")
    if name is None or name.type not in ("identifier", "field_identifier") or name.text.decode() == class_name:
        return HIDDEN
    return name.text.decode()
