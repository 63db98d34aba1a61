"""Where a board is: a tracker of TVM's RPC, and the key under which boards are registered there."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from souffle.errors import OptionError

__all__ = ["BoardAddress", "parse_board_address"]

_FORM = (
    "rpc://TRACKER_HOST:PORT/KEY, such as rpc://10.0.0.7:9190/orin, and what may follow it is "
    "?host=TRIPLE&priority=N&wait=SECONDS&seconds=SECONDS"
)
_SCHEME = "rpc"


@dataclass(frozen=True)
class BoardAddress:
    """A board, or several equal ones.

    Attributes
    ----------
    tracker : str
        The machine of TVM's RPC tracker.
    port : int
    key : str
        Under which the boards' servers are registered.
    host : str
        LLVM's name of the boards' processors, such as ``"aarch64-linux-gnu"``; empty for that of this machine.
    priority : int
        Of requests: the tracker serves greater ones first.
    wait : float
        Seconds to wait for a board that is free.
    seconds : float
        That a candidate may take on the board, from the first byte sent to its last figure.
    """

    tracker: str
    port: int
    key: str
    host: str = ""
    priority: int = 1
    wait: float = 300.0
    seconds: float = 120.0

    def __str__(self) -> str:
        """As :func:`parse_board_address` reads it."""
        name = f"[{self.tracker}]" if ":" in self.tracker else self.tracker
        said = {field.name: getattr(self, field.name) for field in fields(self)[3:]}
        given = {key: f"{value:g}" if isinstance(value, float) else value for key, value in said.items() if value}
        return f"{_SCHEME}://{name}:{self.port}/{quote(self.key, safe='')}?{urlencode(given)}"


def parse_board_address(text: str) -> BoardAddress:
    """Read an address.

    Raises
    ------
    OptionError
        If it has another form; the message says which is wanted.
    """
    try:
        parts = urlsplit(text)
        tracker, port, given = parts.hostname, parts.port, parse_qsl(parts.query, True, True)
    except ValueError as error:
        raise OptionError(f"{text!r} is no address of a board ({error}); wanted is {_FORM}") from error
    key = unquote(parts.path[1:])
    if parts.scheme != _SCHEME or not tracker or not port or not key or parts.fragment or parts.username:
        raise OptionError(f"{text!r} is no address of a board; wanted is {_FORM}")
    if "/" in key or any(character.isspace() for character in key):
        raise OptionError(f"the key {key!r} in {text!r} has a slash or a space, which TVM's servers have no keys with")
    options: dict[str, str | int | float] = {}
    for name, value in given:
        if name in options:
            raise OptionError(f"{name} stands twice in {text!r}; wanted is {_FORM}")
        options[name] = _option(name, value, text)
    return BoardAddress(tracker, port, key, **options)


def _option(name: str, value: str, text: str) -> str | int | float:
    if name == "host":
        if not value or any(character.isspace() for character in value):
            raise OptionError(f"host={value} in {text!r} names no processor; it is LLVM's name, as aarch64-linux-gnu")
        return value
    if name not in ("priority", "wait", "seconds"):
        raise OptionError(f"{text!r} has {name!r}, and a board has no such option; wanted is {_FORM}")
    try:
        number = int(value) if name == "priority" else float(value)
    except ValueError as error:
        raise OptionError(f"{name}={value} in {text!r} is no number; wanted is {_FORM}") from error
    if not math.isfinite(number) or (name != "priority" and number <= 0):
        raise OptionError(f"{name}={value} in {text!r} is no time in seconds; a number above 0 is one")
    return number
