"""Threads that leave a kernel before a barrier of the others.

On the hardware ``__syncthreads()`` waits for the threads of a block that have not ended. ``bar.sync id, count`` waits
until `count` threads have come, and those that have left never do. So before a barrier a part may be left only by all
of its threads together: under conditions whose value is the same in the whole block.

A ``return`` in a function that the kernel calls ends no thread, and is no matter here. A loop's barriers are after each
of its returns, in whatever order they are written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from souffle.emulator.text_scan import matching
from souffle.hfuse.reach import HIDDEN, Reach
from souffle.hfuse.source import Node, walk

__all__ = ["EarlyReturn", "early_return"]

_LOOPS = frozenset({"for_statement", "while_statement", "do_statement", "for_range_loop"})
_THROUGH = frozenset(
    {
        *("compound_statement", "else_clause", "if_statement", "preproc_if", "preproc_ifdef", "preproc_else"),
        *("preproc_elif", "expression_statement"),
    }
)
"""What may stand between a return and the kernel's body; an ``if`` with a uniform condition."""

_UNIFORM = frozenset({"blockIdx", "gridDim", "blockDim", "warpSize", "true", "false", "sizeof"})
_LITERALS = frozenset({"number_literal", "char_literal", "true", "false", "sizeof_expression"})
_OPERATORS = frozenset(
    {
        *("condition_clause", "parenthesized_expression", "binary_expression", "unary_expression"),
        *("conditional_expression", "cast_expression"),
    }
)
_CONSTANT = re.compile(r"\b(?:const|constexpr|__constant__)\b")
_ASSIGNED = r"\b{0}\s*(?:=(?!=)|\+\+|--|[-+*/%&|^]=|<<=|>>=)|(?:\+\+|--|&)\s*{0}\b"
_BY_REFERENCE = frozenset({"swap", "exchange"})


@dataclass(frozen=True)
class EarlyReturn:
    """A return that some threads may take, and a barrier that others come to after; bytes of the text."""

    start: int
    barrier: int


def early_return(reach: Reach) -> EarlyReturn | None:
    """The first return of a kernel's own statements that a barrier of a part cannot stand, if there is one."""
    return _Returns(reach).first()


class _Returns:
    def __init__(self, reach: Reach) -> None:
        self._reach, self._source = reach, reach.source
        self._body = reach.kernel.body
        self._parents: dict[int, Node] = {}
        self._statements: list[Node] = []
        pending = [self._body]
        while pending:
            node = pending.pop()
            self._statements.append(node)
            # What a lambda returns is its own; where it is written stands for where it is called.
            for child in node.children:
                self._parents[child.id] = node
            pending += reversed(node.children)

    def first(self) -> EarlyReturn | None:
        barriers = [
            (n.start_byte, n.end_byte)
            for n in self._statements
            if n.child_count == 0 and self._text(n) in self._reach.waiting
        ]
        barriers += [(start, start) for start, name in self._loop_macros() if name in self._reach.waiting]
        if HIDDEN in self._reach.waiting:
            # Where an operator is used is not told by a name: it may be anywhere.
            barriers.append((self._body.end_byte - 1, self._body.end_byte))
        if not barriers:
            return None
        for start, name in self._loop_macros():
            later = [first for first, _ in barriers if first >= start]
            if later and "return" in self._source.expanded({name}):
                return EarlyReturn(start, later[0])
        jumps = list(self._jumps())
        for node in self._statements:
            plain = node.type == "return_statement"
            if not plain and not self._macro_that_returns(node):
                continue
            around = self._around(node)
            if any(outer.type == "lambda_expression" for outer in around):
                continue
            # From a loop, and from what lies between a label and a later jump to it, what stands before comes again.
            again = [(n.start_byte, n.end_byte) for n in around if self._loop(n)]
            again += [(to, start) for start, to in jumps if to < start]
            again = [(first, last) for first, last in again if first <= node.start_byte < last]
            after = [
                start
                for start, _ in barriers
                if start >= node.end_byte or any(first <= start < last for first, last in again)
            ]
            jumped = any(min(jump) <= node.start_byte < max(jump) for jump in jumps)
            if after and (not plain or jumped or not self._uniformly_reached(around)):
                return EarlyReturn(node.start_byte, after[0])
        return None

    def _jumps(self) -> Iterator[tuple[int, int]]:
        """From where to where each ``goto`` leads; where its label is not seen, from the kernel's end to its begin."""
        labels = {
            self._text(n.child_by_field_name("label")): n.start_byte
            for n in self._statements
            if n.type == "labeled_statement"
        }
        for node in self._statements:
            if node.type == "goto_statement":
                label = node.child_by_field_name("label")
                target = None if label is None else labels.get(self._text(label))
                if target is None:
                    yield self._body.end_byte, self._body.start_byte
                else:
                    yield node.start_byte, target

    def _text(self, node: Node) -> str:
        return self._source.slice(node.start_byte, node.end_byte)

    def _loop_macros(self) -> list[tuple[int, str]]:
        """The heads of loops that are macros, with the macros' names."""
        first, last = self._body.start_byte, self._body.end_byte
        return [(start, name) for start, name in self._source.loop_heads.items() if first <= start < last]

    def _loop(self, node: Node) -> bool:
        return node.type in _LOOPS or (node.type == "if_statement" and node.start_byte in self._source.loop_heads)

    def _around(self, node: Node) -> list[Node]:
        """The nodes that a node stands in, the kernel's body left out."""
        outer = []
        while node.id in self._parents:
            node = self._parents[node.id]
            outer.append(node)
        return outer[:-1]

    def _macro_that_returns(self, node: Node) -> bool:
        macros = {macro.name for macro in self._source.macros}
        if node.child_count or node.type != "identifier" or self._text(node) not in macros:
            return False
        return "return" in self._source.expanded({self._text(node)})

    def _uniformly_reached(self, around: list[Node]) -> bool:
        for node in around:
            if node.type not in _THROUGH or self._loop(node):
                return False
            if node.type == "if_statement" and not self._uniform(node.child_by_field_name("condition")):
                return False
        return True

    def _uniform(self, node: Node | None) -> bool:
        """Whether an expression has one value in all threads of a block, all through the kernel."""
        if node is None:
            return False
        if node.type in _LITERALS:
            return True
        if node.type == "identifier":
            return self._uniform_name(self._text(node), frozenset())
        if node.type == "field_expression":
            arrow = any(child.type == "->" for child in node.children)
            return not arrow and self._uniform(node.child_by_field_name("argument"))
        if node.type == "call_expression":
            callee, arguments = node.child_by_field_name("function"), node.child_by_field_name("arguments")
            cast = callee.type == "primitive_type" or self._text(callee).startswith("static_cast<")
            return cast and all(self._uniform(child) for child in arguments.children if child.is_named)
        if node.type not in _OPERATORS:
            return False
        operands = [child for child in node.children if child.is_named and child.type != "type_descriptor"]
        return bool(operands) and all(self._uniform(child) for child in operands if child.type != "comment")

    def _uniform_name(self, name: str, beyond: frozenset[str]) -> bool:
        if name in _UNIFORM:
            return True
        if name in beyond:
            return False
        macros = [macro for macro in self._source.macros if macro.name == name]
        if macros:
            inner = beyond | {name}
            plain = all(macro.parameters is None for macro in macros)
            return plain and all(self._uniform_name(n, inner) for macro in macros for n in macro.mentioned)
        local = self._locals.get(name, [])
        if name in self._parameters:
            return not local and name not in self._changed
        if local:
            (first, *others) = local
            declaration, value = first
            constant = not others and _CONSTANT.search(self._text(declaration).partition("=")[0]) is not None
            return constant and name not in self._changed and self._uniform(value)
        return name in self._constants_of_the_file

    @cached_property
    def _parameters(self) -> frozenset[str]:
        lists = [self._reach.kernel.parameters, self._reach.kernel.template]
        nodes = [node for given in lists if given is not None for node in walk(given)]
        return frozenset(self._text(n) for n in nodes if n.type in ("identifier", "type_identifier"))

    @cached_property
    def _locals(self) -> dict[str, list[tuple[Node, Node | None]]]:
        """The declarations of each name in the kernel, with the value that the name gets there."""
        declarations: dict[str, list[tuple[Node, Node | None]]] = {}
        for node in self._statements:
            if node.type not in (
                "declaration",
                "parameter_declaration",
                "for_range_loop",
                "optional_parameter_declaration",
            ):
                continue
            for child in node.children_by_field_name("declarator"):
                value = child.child_by_field_name("value") if child.type == "init_declarator" else None
                names = [n for n in walk(child) if n.type == "identifier" and (value is None or not _holds(value, n))]
                for name in names[:1]:
                    declarations.setdefault(self._text(name), []).append((node, value))
        return declarations

    @cached_property
    def _constants_of_the_file(self) -> frozenset[str]:
        names = set()
        for node in walk(self._source.root):
            if node.type == "enumerator":
                names.add(self._text(node.child_by_field_name("name")))
            elif node.type == "declaration" and node.parent is not None and node.parent.type != "compound_statement":
                for child in node.children_by_field_name("declarator"):
                    plain = child.child_by_field_name("declarator") if child.type == "init_declarator" else child
                    head = self._source.slice(node.start_byte, child.start_byte)
                    if plain.type == "identifier" and _CONSTANT.search(head):
                        names.add(self._text(plain))
        return frozenset(names)

    @cached_property
    def _changed(self) -> frozenset[str]:
        """Names that the kernel may give another value: assigned, or given to what may assign to them."""
        names = set()
        references = {f.name for f in self._source.functions if "&" in self._text(f.parameters)} | _BY_REFERENCE
        for node in self._statements:
            if node.type == "assignment_expression":
                names |= self._root_of(node.child_by_field_name("left"))
            elif node.type == "update_expression" or _takes_address(node):
                names |= self._root_of(node.child_by_field_name("argument"))
            elif node.type == "gnu_asm_output_operand":
                names |= {self._text(n) for n in walk(node) if n.type == "identifier"}
            elif node.type == "call_expression":
                callee = {self._text(n) for n in walk(node.child_by_field_name("function")) if n.child_count == 0}
                if callee & references:
                    names |= {self._text(n) for n in node.child_by_field_name("arguments").children if n.is_named}
            elif (
                node.type == "init_declarator" and node.child_by_field_name("declarator").type == "reference_declarator"
            ):
                names |= {self._text(n) for n in walk(node.child_by_field_name("value")) if n.type == "identifier"}
            elif node.type == "identifier":
                names |= self._changed_by_macro(self._text(node), node.end_byte)
        for start, name in self._loop_macros():
            names |= self._changed_by_macro(name, start + len(name))
        return frozenset(names)

    def _root_of(self, node: Node | None) -> set[str]:
        while node is not None and node.type in (
            "field_expression",
            "parenthesized_expression",
            "subscript_expression",
        ):
            if node.type == "parenthesized_expression":
                node = next((child for child in node.children if child.is_named), None)
            else:
                node = node.child_by_field_name("argument")
        return {self._text(node)} if node is not None and node.type == "identifier" else set()

    def _changed_by_macro(self, name: str, end: int) -> set[str]:
        """Arguments of a macro's use whose parameter the macro assigns, or hands on to another macro."""
        names: set[str] = set()
        for macro in self._source.macros:
            if macro.name != name or not macro.parameters:
                continue
            rest = self._source.data[end : self._body.end_byte].decode()
            opening = len(rest) - len(rest.lstrip())
            close = matching(rest, opening) if rest[opening : opening + 1] == "(" else -1
            arguments = [part.strip() for part in rest[opening + 1 : close].split(",")] if close >= 0 else []
            macros = {other.name for other in self._source.macros if other.parameters}
            for formal, argument in zip(macro.parameters, arguments):
                handed = bool(macro.mentioned & macros)
                if handed or re.search(_ASSIGNED.format(re.escape(formal)), macro.body):
                    names.add(argument)
        return names


def _holds(outer: Node, inner: Node) -> bool:
    return outer.start_byte <= inner.start_byte and inner.end_byte <= outer.end_byte


def _takes_address(node: Node) -> bool:
    return node.type == "pointer_expression" and node.children[0].type == "&"
