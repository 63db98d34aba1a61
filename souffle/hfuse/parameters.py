"""The parameters of a kernel, as the fused kernel declares them outside of the part's namespace."""

from __future__ import annotations

import re
from dataclasses import dataclass

from souffle.hfuse.errors import FusionError
from souffle.hfuse.source import Function, Node, Source, walk

__all__ = ["BUILTIN_WORDS", "Parameter", "kernel_parameters", "template_arguments"]

BUILTIN_WORDS = frozenset(
    {
        *("const", "volatile", "unsigned", "signed", "void", "bool", "char", "short", "int", "long", "float", "double"),
        *("size_t", "ptrdiff_t", "__restrict__", "__restrict", "__grid_constant__", "true", "false", "dim3", "__half"),
        *("__half2", "half", "half2", "__nv_bfloat16", "__nv_bfloat162", "struct"),
        *(f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)),
        *(
            f"{name}{count}"
            for name in ("char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "longlong", "ulonglong")
            for count in (1, 2, 3, 4)
        ),
        *(f"{name}{count}" for name in ("float", "double") for count in (1, 2, 3, 4)),
    }
)
"""Words of a type that mean the same everywhere, with the usual headers."""

_WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Parameter:
    """One parameter: ``base prefix name suffix``, as in ``const float | * __restrict__ | x | ``.

    Attributes
    ----------
    base : str
        The type before the declarator, as the fused kernel writes it.
    alias : str
        What the part's namespace defines `base` to be, where that is not the same everywhere; otherwise empty.
    prefix, suffix : str
    name : str
        In the original.
    """

    base: str
    alias: str
    prefix: str
    suffix: str
    name: str

    def declared(self, name: str, scope: str) -> str:
        """The declaration under another name; `scope` is the namespace of what it names."""
        base = f"{scope}::{self.base}" if self.alias and scope else self.base
        pointer = self.prefix.startswith(("*", "&"))
        prefix = self.prefix + " " if pointer and not self.prefix.endswith(" ") else self.prefix
        return f"{base}{'' if pointer else ' '}{prefix}{name}{self.suffix}"


def template_arguments(source: Source, kernel: Function, name: str) -> dict[str, str]:
    """What each template parameter of a kernel is, by the arguments in its name: ``"maxpool<float, 4>"``.

    Raises
    ------
    FusionError
        The kernel is a template and has parameters without an argument or a default, or is none and got arguments.
    """
    given = _split(name.partition("<")[2].rpartition(">")[0]) if "<" in name else []
    if kernel.template is None:
        if given:
            raise FusionError(f"{source.place(kernel.start)}: kernel {kernel.name} is no template; leave <...> out")
        return {}
    values: dict[str, str] = {}
    declared = [node for node in kernel.template.children if node.is_named and node.type != "comment"]
    for position, node in enumerate(declared):
        default = node.child_by_field_name("default_type") or node.child_by_field_name("default_value")
        until = node.end_byte if default is None else default.start_byte
        names = [n for n in walk(node) if n.type in ("identifier", "type_identifier") and n.start_byte < until]
        if not names:
            raise FusionError(f"{source.place(node.start_byte)}: give the template's parameter {position + 1} a name")
        label = source.slice(names[-1].start_byte, names[-1].end_byte)
        if position < len(given):
            values[label] = given[position]
        elif default is not None:
            values[label] = source.slice(default.start_byte, default.end_byte)
        else:
            raise FusionError(
                f"{source.place(kernel.start)}: kernel {kernel.name} is a template and its parameter {label} has no "
                f"argument; name the kernel as in {source.name}:{kernel.name}<...>"
            )
    if len(given) > len(declared):
        raise FusionError(
            f"{source.place(kernel.start)}: kernel {kernel.name} takes {len(declared)} template arguments, and "
            f"{len(given)} were given"
        )
    return values


def kernel_parameters(source: Source, kernel: Function, template: dict[str, str]) -> tuple[Parameter, ...]:
    """The parameters of a kernel, with a template's parameters replaced."""
    nodes = [node for node in kernel.parameters.children if node.type == "parameter_declaration"]
    plain = [source.slice(node.start_byte, node.end_byte).strip() for node in nodes]
    if plain == ["void"]:
        return ()
    return tuple(_parameter(source, node, position, template) for position, node in enumerate(nodes))


def _parameter(source: Source, node: Node, position: int, template: dict[str, str]) -> Parameter:
    declarator = node.child_by_field_name("declarator")
    start = node.end_byte if declarator is None else declarator.start_byte
    base = " ".join(source.slice(node.start_byte, start).split())
    names = [] if declarator is None else [n for n in walk(declarator) if n.type == "identifier"]
    if names:
        name = source.slice(names[0].start_byte, names[0].end_byte)
        prefix = source.slice(start, names[0].start_byte)
        suffix = source.slice(names[0].end_byte, node.end_byte)
    else:
        name, prefix, suffix = f"unnamed_{position}", source.slice(start, node.end_byte), ""
    prefix, suffix = (_expanded(source, text, node) for text in (prefix, suffix))
    replaced = _WORD.sub(lambda match: template.get(match[0], match[0]), base)
    macros = {macro.name for macro in source.macros}
    words = set(_WORD.findall(replaced))
    if words <= BUILTIN_WORDS - macros and "::" not in replaced:
        return Parameter(replaced, "", prefix, suffix, name)
    qualifier = "__grid_constant__ " if "__grid_constant__" in words else ""
    alias = re.sub(r"\b__grid_constant__\b\s*", "", replaced)
    return Parameter(f"hfuse_type_{position}", alias, qualifier + prefix, suffix, name)


def _expanded(source: Source, text: str, node: Node) -> str:
    """A declarator with the file's macros in it replaced, such as one that stands for ``__restrict__``."""
    text = " ".join(text.split())
    text = text + " " if text and (text[-1].isalnum() or text[-1] == "_") else text
    for _ in range(8):
        for word in _WORD.findall(text):
            bodies = {macro.body.strip() for macro in source.macros if macro.name == word}
            if bodies:
                text = re.sub(rf"\b{word}\b", min(bodies) if len(bodies) == 1 else "?", text)
        if set(_WORD.findall(text)) <= BUILTIN_WORDS and "?" not in text:
            return text
    line = source.place(node.start_byte)
    raise FusionError(f"{line}: `{source.excerpt(node.start_byte)}`: the parameter's type is not plain; write it out")


def _split(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "<([{") - (c in ">)]}")
        if c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts
