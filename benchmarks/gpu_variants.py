"""The ways to compile a network that a GPU is asked about, taken from the compiler's own lists: a switch, a planner or
a value of an option that is new there is one more here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from souffle.evaluation.ablation import Variant, variants
from souffle.options import CHOICES, LEVELS, ON_CHIP, SWITCHES, Options
from souffle.partition.registry import PLANNERS
from souffle.stitching import FUSION_PLANNERS

__all__ = ["ROWS_OF_THEIR_OWN", "all_variants", "chosen_variants", "file_name", "other_choices", "words_of"]

ROWS_OF_THEIR_OWN = ("level", "precision", "verify")
"""Options that are no variants: a level and a precision have networks of their own, a certificate changes no kernel."""


def other_choices() -> dict[str, tuple[Any, ...]]:
    """Options, and the values of each that are not the usual one."""
    usual = Options()
    lists: dict[str, tuple[Any, ...]] = {**CHOICES, "partition": tuple(PLANNERS), "graph": (False, True)}
    return {
        option: tuple(value for value in values if value != getattr(usual, option))
        for option, values in lists.items()
        if option not in ROWS_OF_THEIR_OWN
    }


def all_variants() -> tuple[Variant, ...]:
    """The levels first, then one thing less, other planners, and one option each that is not as usual."""
    found = variants(each=True, planners=tuple(FUSION_PLANNERS), choices=other_choices())
    others = (name for name in SWITCHES if name not in ON_CHIP)
    return (*found, *(Variant(list(LEVELS)[-1], (name,)) for name in others))


def words_of(variant: Variant) -> tuple[str, ...]:
    """By what a variant is asked for: an option, or an option and its value; a level has none.

    ``"disable"`` and ``"disable=teams"``, ``"fusion"`` and ``"fusion=learned"``, ``"waits"`` and ``"waits=flags"``.
    """
    usual = Variant(variant.level).options
    given = [(name, value) for name, value in variant.options.items() if value != usual.get(name)]
    pairs = [(name, one) for name, value in given for one in (value if isinstance(value, list) else [value])]
    return tuple(word for name, value in pairs for word in (name, f"{name}={value}"))


def chosen_variants(levels: Iterable[str], wanted: Iterable[str]) -> tuple[Variant, ...]:
    """Of these levels, what the compiler chooses by itself, and the variants that are asked for.

    Raises
    ------
    ValueError
        If a word stands for no variant.
    """
    every, asked, among = all_variants(), set(wanted), set(levels)
    known = {word for variant in every for word in words_of(variant)}
    if unknown := asked - known - {"all"}:
        choices = ", ".join(["all", *sorted(known)])
        raise ValueError(f"no variant is called {', '.join(sorted(unknown))}; choose from {choices}")
    return tuple(
        variant
        for variant in every
        if variant.level in among and (not (words := words_of(variant)) or "all" in asked or asked & set(words))
    )


def file_name(variant: Variant) -> str:
    """In the names of files: ``"V4"``, ``"V4.disable.teams"``, ``"V0.fusion.xla-rules"``."""
    return ".".join([variant.level, *(word.replace("=", ".") for word in words_of(variant)[1::2])])
