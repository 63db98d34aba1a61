"""Which compiler this is: a digest of its files."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

__all__ = ["package_digest"]

_PACKAGE = Path(__file__).resolve().parent
_DECIDES = (".py", ".h", ".cpp", ".inc", ".json", ".jsonl", ".txt", ".safetensors")


@cache
def package_digest(*folders: Path) -> str:
    """A digest of what of the package decides about what is compiled, and of further folders.

    The command line and the papers' figures are left out.
    """
    digest = hashlib.sha256()
    # The networks are a link in a checkout, which rglob does not follow.
    for folder in (_PACKAGE, _PACKAGE / "models", *folders):
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder)
            if folder == _PACKAGE and (inside.parts[0] == "cli" or inside.parts[:2] == ("evaluation", "data")):
                continue
            if path.suffix in _DECIDES and path.is_file():
                digest.update(f"{inside.as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
