"""The pair of TVM and tvm-ffi that Souffle was checked with, known without importing either."""

from __future__ import annotations

import importlib.metadata

from souffle.errors import IncompatibleEnvironmentError

__all__ = ["TVM_FFI_PIN", "TVM_PIN", "check_tvm_pair", "installed_pair", "installed_version"]

TVM_PIN = "0.27.0.post1"
TVM_FFI_PIN = "0.1.14.post1"


def check_tvm_pair(tvm_version: str | None, ffi_version: str | None) -> None:
    """Refuse a pair of TVM and tvm-ffi that is not the one Souffle was checked with.

    Parameters
    ----------
    tvm_version, ffi_version : str or None
        The installed versions, ``None`` where a distribution is missing.

    Raises
    ------
    IncompatibleEnvironmentError
        With the command that installs the right pair. Other pairs end in a segmentation fault, which no
        message could explain afterwards.
    """
    if tvm_version == TVM_PIN and ffi_version == TVM_FFI_PIN:
        return
    raise IncompatibleEnvironmentError(
        f"Souffle needs apache-tvm=={TVM_PIN} with apache-tvm-ffi=={TVM_FFI_PIN}, but found "
        f"apache-tvm {tvm_version or 'not installed'} with apache-tvm-ffi {ffi_version or 'not installed'}; other "
        "pairs are known to crash. Install the pair: "
        f"pip install 'apache-tvm=={TVM_PIN}' 'apache-tvm-ffi=={TVM_FFI_PIN}'"
    )


def installed_pair() -> tuple[str | None, str | None]:
    """The installed versions of TVM and tvm-ffi; see :func:`installed_version`."""
    return installed_version("apache-tvm"), installed_version("apache-tvm-ffi")


def installed_version(distribution: str) -> str | None:
    """The version of a package that pip has installed; None where it has not."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
