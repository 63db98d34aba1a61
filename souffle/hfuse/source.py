"""A CUDA source file as a tree: its functions, macros, headers and the names that they mention.

The tree is that of tree-sitter's grammar for CUDA, which reads a file as it stands. A front end such as libclang, which
the paper uses (§III-C), needs all headers of CUDA and of the user to read the first line.

What the grammar does not know is blanked in the copy that it reads (:mod:`souffle.hfuse.readable`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from souffle.emulator.text_scan import blank_comments
from souffle.hfuse.errors import FusionError
from souffle.hfuse.readable import qualifier_macros, readable

try:
    import tree_sitter
    import tree_sitter_cuda
except ImportError:
    tree_sitter = tree_sitter_cuda = None

__all__ = ["BARRIERS", "NAMES", "Function", "Include", "Macro", "Node", "Occurrence", "Source", "walk"]

Node = Any
"""A node of tree-sitter, whose package may not be installed."""

BARRIERS = frozenset({"__syncthreads", "__syncthreads_count", "__syncthreads_and", "__syncthreads_or"})
"""What all threads of a block wait at."""

NAMES = frozenset({"identifier", "type_identifier", "namespace_identifier"})
"""Leaves that may name something outside of a class; fields of a class are ``field_identifier``."""

_IDENTIFIER = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|//[^\n]*|/\*.*?\*/|\b[A-Za-z_]\w*', re.DOTALL)
_CONTAINERS = frozenset(
    {"translation_unit", "preproc_if", "preproc_ifdef", "preproc_else", "preproc_elif", "declaration_list"}
)


@dataclass(frozen=True)
class Occurrence:
    """A name at a place of the text; `node` is None where the tree has none, as in the body of a macro."""

    name: str
    start: int
    end: int
    node: Node | None


@dataclass(frozen=True)
class Macro:
    """A ``#define``: its name, where its directive begins and ends, and its body with where that begins.

    `parameters` is None for a macro that takes none, not even brackets.
    """

    name: str
    start: int
    end: int
    body: str
    body_start: int
    parameters: tuple[str, ...] | None

    @cached_property
    def occurrences(self) -> tuple[Occurrence, ...]:
        """The names in the body, its strings and comments left out."""
        names = []
        for match in _IDENTIFIER.finditer(self.body):
            start = self.body_start + len(self.body[: match.start()].encode())
            if match[0][0] not in "\"'/":
                names.append(Occurrence(match[0], start, start + len(match[0].encode()), None))
        return tuple(names)

    @cached_property
    def mentioned(self) -> frozenset[str]:
        """The names in the body."""
        return frozenset(occurrence.name for occurrence in self.occurrences)


@dataclass(frozen=True)
class Include:
    """An ``#include``: the header with its brackets or quotes, and where the directive stands."""

    header: str
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Function:
    """A function at the file's or a namespace's level.

    Attributes
    ----------
    name : str
        Without its namespace.
    scope : tuple of str
        The namespaces that it stands in.
    node : tree-sitter node
        Its definition or declaration.
    start, end : int
        Of all that belongs to it: template parameters and ``extern "C"`` too.
    head : int
        Where its qualifiers begin.
    kernel, device : bool
        What its qualifiers say; a constexpr function is one of the device.
    template : tree-sitter node or None
        Its template parameters.
    member : bool
        Of a class, outside of which it is defined, or an operator: what uses it does not mention it as a name.
    """

    name: str
    scope: tuple[str, ...]
    node: Node
    start: int
    end: int
    head: int
    kernel: bool
    device: bool
    template: Node | None
    member: bool

    @property
    def body(self) -> Node | None:
        """Its statements, or None for a declaration."""
        return self.node.child_by_field_name("body")

    @cached_property
    def declarator(self) -> Node:
        """The name with its parameters."""
        return _function_declarator(self.node)

    @property
    def parameters(self) -> Node:
        """The list of parameters."""
        return self.declarator.child_by_field_name("parameters")


class Source:
    """A CUDA file that has been read.

    Parameters
    ----------
    name : str
        Of the file, for messages.
    text : str

    Attributes
    ----------
    data : bytes
        The text, as places count it.
    root : tree-sitter node
    loop_heads : dict of int to str
        Where statements begin that read as an ``if`` and are loops, with the macros that they are loops by.

    Raises
    ------
    FusionError
        If tree-sitter is not installed.
    """

    def __init__(self, name: str, text: str) -> None:
        if tree_sitter is None:
            raise FusionError(
                "horizontal fusion reads CUDA with tree-sitter, which is not installed here; install it with: "
                "pip install 'souffle-dl[hfuse]'"
            )
        # A line that ends as on Windows would not go on after a backslash.
        text = text.replace("\r\n", "\n")
        self.name, self.text, self.data = name, text, text.encode()
        self._qualifiers = "|".join(qualifier_macros(blank_comments(text))) or "(?!)"
        language = tree_sitter.Language(tree_sitter_cuda.language())
        # The tree's nodes lead back to the tree, whose text the parser does not keep.
        text_for_grammar, self.loop_heads = readable(text)
        self._tree = tree_sitter.Parser(language).parse(text_for_grammar.encode())
        self.root: Node = self._tree.root_node

    @staticmethod
    def read(path: Path | str) -> Source:
        """The source that a file holds; raises FusionError where it cannot be read."""
        try:
            return Source(str(path), Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise FusionError(f"{path}: the CUDA source cannot be read: {error}") from error

    def place(self, offset: int) -> str:
        """``file:line`` of a byte of the text."""
        line = self.data.count(b"\n", 0, offset) + 1
        return f"{self.name}:{line}"

    def excerpt(self, offset: int) -> str:
        """The line that a byte stands in, without its indentation."""
        begin, end = self.data.rfind(b"\n", 0, offset) + 1, self.data.find(b"\n", offset)
        return self.data[begin : end if end >= 0 else None].decode().strip()

    def slice(self, start: int, end: int) -> str:
        """The text between two bytes."""
        return self.data[start:end].decode()

    @cached_property
    def macros(self) -> tuple[Macro, ...]:
        """All ``#define`` directives, in the order of the text."""
        macros = []
        for node in walk(self.root):
            if node.type not in ("preproc_def", "preproc_function_def"):
                continue
            value = node.child_by_field_name("value")
            name = self.slice(*_range(node.child_by_field_name("name")))
            body = "" if value is None else self.slice(*_range(value))
            start = node.end_byte if value is None else value.start_byte
            given = node.child_by_field_name("parameters")
            names = None if given is None else tuple(self.slice(*_range(c)) for c in given.children if c.is_named)
            macros.append(Macro(name, node.start_byte, node.end_byte, body, start, names))
        return tuple(macros)

    @cached_property
    def includes(self) -> tuple[Include, ...]:
        """All ``#include`` directives."""
        nodes = [node for node in walk(self.root) if node.type == "preproc_include"]
        paths = [node.child_by_field_name("path") for node in nodes]
        return tuple(
            Include(self.slice(*_range(path)), node.start_byte, node.end_byte) for node, path in zip(nodes, paths)
        )

    @cached_property
    def functions(self) -> tuple[Function, ...]:
        """Functions at the level of the file and of its namespaces, definitions and declarations."""
        return tuple(self._functions_in(self.root, ()))

    def _functions_in(self, node: Node, scope: tuple[str, ...]) -> Iterator[Function]:
        for child in node.children:
            if child.type in _CONTAINERS:
                yield from self._functions_in(child, scope)
            elif child.type == "namespace_definition":
                name = child.child_by_field_name("name")
                inner = (*scope, self.slice(*_range(name))) if name is not None else scope
                yield from self._functions_in(child, inner)
            elif child.type == "linkage_specification":
                body = child.child_by_field_name("body")
                if body.type == "declaration_list":
                    yield from self._functions_in(body, scope)
                else:
                    yield from self._function(body, child, scope, None)
            elif child.type == "template_declaration":
                inner, template = child, None
                while inner is not None and inner.type == "template_declaration":
                    template = inner.child_by_field_name("parameters")
                    inner = next((c for c in reversed(inner.children) if c.is_named), None)
                if inner is not None:
                    yield from self._function(inner, child, scope, template)
            else:
                yield from self._function(child, child, scope, None)

    def _function(self, node: Node, whole: Node, scope: tuple[str, ...], template: Node | None) -> Iterator[Function]:
        if node.type not in ("function_definition", "declaration", "template_instantiation"):
            return
        declarator = _function_declarator(node)
        if declarator is None:
            return
        name = declarator.child_by_field_name("declarator")
        member = name.type in ("qualified_identifier", "operator_name", "operator_cast", "destructor_name")
        while name.type in ("qualified_identifier", "template_function"):
            name = name.child_by_field_name("name")
        # As the text has it: what the grammar reads lacks the macros that stand for qualifiers.
        words = self.expanded(set(re.findall(r"\w+", self.slice(self._head_of(node), declarator.start_byte))))
        kernel = "__global__" in words
        device = kernel or bool(words & {"__device__", "constexpr"})
        label = self.slice(*_range(name))
        head = self._head_of(node)
        start = head if whole is node else whole.start_byte
        yield Function(label, scope, node, start, whole.end_byte, head, kernel, device, template, member)

    def _head_of(self, node: Node) -> int:
        """Where a function begins, with the macros before it that stand for qualifiers."""
        before = self.data[: node.start_byte][-200:].decode(errors="replace")
        match = re.search(rf"(?:\b(?:{self._qualifiers})\s+)*\Z", before)
        return node.start_byte - (0 if match is None else len(match[0].encode()))

    @cached_property
    def occurrences(self) -> tuple[Occurrence, ...]:
        """Every name of the text with its place, those in the bodies of macros included; fields of classes are not."""
        occurrences = []
        for node in walk(self.root):
            if node.type in NAMES and node.child_count == 0:
                start, end = _range(node)
                occurrences.append(Occurrence(self.slice(start, end), start, end, node))
        for macro in self.macros:
            occurrences += macro.occurrences
        occurrences += [Occurrence(name, start, start + len(name), None) for start, name in self.loop_heads.items()]
        return tuple(sorted(occurrences, key=lambda occurrence: occurrence.start))

    def mentioned(self, start: int, end: int) -> frozenset[str]:
        """The names between two bytes, and those that the macros among them stand for."""
        return self.expanded({o.name for o in self.occurrences if start <= o.start < end})

    def expanded(self, names: set[str] | frozenset[str]) -> frozenset[str]:
        """Names with those in the bodies of the macros among them, and so on."""
        bodies: dict[str, set[str]] = {}
        for macro in self.macros:
            bodies.setdefault(macro.name, set()).update(macro.mentioned)
        reached, pending = set(names), list(names)
        while pending:
            new = bodies.get(pending.pop(), set()) - reached
            reached |= new
            pending += new
        return frozenset(reached)

    def definitions(self, name: str) -> tuple[Function, ...]:
        """The functions of a name that have a body."""
        return tuple(f for f in self.functions if f.name == name and f.body is not None)

    def kernel(self, name: str | None = None) -> Function:
        """The kernel of a name, template arguments left out; without a name, the only one of the file.

        Raises
        ------
        FusionError
            There is none, or there are several.
        """
        kernels = [function for function in self.functions if function.kernel and function.body is not None]
        listed = ", ".join(dict.fromkeys("::".join((*k.scope, k.name)) for k in kernels)) or "none"
        plain = None if name is None else name.partition("<")[0].strip()
        chosen = [k for k in kernels if plain in (None, k.name, "::".join((*k.scope, k.name)))]
        if not chosen:
            asked = "no kernel" if plain is None else f"no kernel {plain!r}"
            raise FusionError(f"{self.name}: {asked} with a body in the file; its kernels are: {listed}")
        if len(chosen) > 1:
            lines = ", ".join(self.place(kernel.start) for kernel in chosen)
            help_text = "name one as FILE.cu:KERNEL" if plain is None else "rename all but one"
            raise FusionError(f"{self.name}: several kernels stand for it, at {lines} ({listed}); {help_text}")
        return chosen[0]


def walk(node: Node) -> Iterator[Node]:
    """A node and all below it, in the order of the text."""
    pending = [node]
    while pending:
        current = pending.pop()
        yield current
        pending += reversed(current.children)


def _range(node: Node) -> tuple[int, int]:
    return node.start_byte, node.end_byte


def _function_declarator(node: Node) -> Node | None:
    """The function that a definition or declaration is of, or None where it is of none."""
    declarator = node.child_by_field_name("declarator")
    while declarator is not None and declarator.type != "function_declarator":
        # A pointer or a reference to what is returned stands outside of it; a variable's value does not count.
        if declarator.type not in ("pointer_declarator", "reference_declarator"):
            return None
        declarator = next((c for c in reversed(declarator.children) if c.type.endswith("declarator")), None)
    if declarator is None or declarator.child_by_field_name("declarator").type == "parenthesized_declarator":
        return None
    return declarator
