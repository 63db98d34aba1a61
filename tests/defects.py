"""How a test watches a defect of TVM or nvcc that Souffle works around (docs/tvm-defects.md lists them)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

__all__ = ["fails_without", "mended"]


def mended(workaround: str, culprit: str = "TVM") -> str:
    """What a test says when a defect does not show any more without its workaround."""
    return f"{culprit} is mended: {workaround} can go, and so can its row of docs/tvm-defects.md"


@contextmanager
def fails_without(workaround: str, *errors: type[Exception], match: str | None = None) -> Iterator[None]:
    """Expect what runs inside, from which a workaround is taken, to end in an error.

    Parameters
    ----------
    workaround : str
        What can go when it does not.
    errors : exceptions
        Any of which shows the defect.
    match : str, optional
        A regular expression that is found in the error's message.
    """
    try:
        with pytest.raises(errors, match=match):
            yield
    except pytest.fail.Exception as failure:
        if "DID NOT RAISE" in str(failure):
            pytest.fail(mended(workaround))
        raise
