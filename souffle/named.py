"""What users name: one of Souffle's own, an entry point of an installed package, or ``"module:attribute"``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points

from souffle.errors import OptionError

__all__ = ["found_by_name", "imported"]


def found_by_name(
    option: str,
    name: str,
    own: Mapping[str, object],
    *,
    group: str,
    attributes: Sequence[str],
    what: str,
    besides: Sequence[str] = (),
) -> object:
    """What an option names; a class that is found elsewhere is called for its object.

    Parameters
    ----------
    option : str
        As messages call it, such as ``"partition"``.
    name : str
        One of `own`, ``"module:attribute"``, or an entry point of `group`.
    own : mapping of str to object
    group : str
        Of the entry points in which installed packages name theirs.
    attributes : sequence of str
        What an object from elsewhere must have.
    what : str
        Such an object, in one word.
    besides : sequence of str
        Names that the option may have as well, for messages.

    Raises
    ------
    OptionError
        If there is none: listing the names, or saying what is wrong with the module.
    """
    if name in own:
        return own[name]
    if ":" in name:
        return _checked(option, name, imported(option, name), attributes, what)
    installed = {point.name: point for point in entry_points(group=group)}
    if name in installed:
        return _checked(option, name, imported(option, installed[name].value), attributes, what)
    known = ", ".join((*besides, *own, *installed))
    raise OptionError(f"{option}={name!r} is not valid; choose one of {known}, or name your own as module:attribute")


def imported(option: str, place: str) -> object:
    """The attribute of a module, ``"module:attribute"``; OptionError with the option's name if it cannot be had."""
    module, _, attribute = place.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise OptionError(f"{option}={place!r} cannot be had: {error}") from error


def _checked(option: str, name: str, found: object, attributes: Sequence[str], what: str) -> object:
    made = found() if isinstance(found, type) else found
    missing = [one for one in attributes if not hasattr(made, one)]
    if missing:
        raise OptionError(f"{option}={name!r} is no {what}: it lacks {', '.join(missing)}; see docs/extending.md")
    return made
