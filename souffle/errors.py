"""Every error that Souffle raises on purpose, one tree under :class:`SouffleError`.

A message names the thing (operator, node, shape, file) and says what would help.
"""

from __future__ import annotations

__all__ = [
    "ArtifactError",
    "BackgroundError",
    "CertificateError",
    "CompilerNotFoundError",
    "CudaCompileError",
    "DeviceError",
    "IncompatibleEnvironmentError",
    "InputError",
    "KernelTimeoutError",
    "ModelError",
    "NoGpuError",
    "OptionError",
    "SouffleError",
    "UnsupportedOperatorError",
]


class SouffleError(Exception):
    """Base of all errors raised by Souffle."""


class ModelError(SouffleError):
    """The model cannot be read: not ONNX, invalid, or a dimension is left open."""


class UnsupportedOperatorError(ModelError):
    """The model uses an operator, or a form of one, that cannot be imported."""


class OptionError(SouffleError):
    """An argument of the compiler (level, target, arch, precision, ...) is not valid."""


class InputError(SouffleError):
    """A network was called with an input of the wrong name, shape or type."""


class IncompatibleEnvironmentError(SouffleError):
    """The Python environment cannot work, as with a TVM pair that is known to crash."""


class CompilerNotFoundError(SouffleError):
    """No compiler for CUDA (nvcc) or for the CPU device (g++) was found."""


class CudaCompileError(SouffleError):
    """The CUDA compiler, or the C++ compiler of the CPU device, rejected emitted text."""


class CertificateError(SouffleError):
    """The compiler refuted what it made itself (``docs/verification.md``).

    Attributes
    ----------
    certificate : souffle.certificate.Certificate
        With the counterexamples.
    """

    def __init__(self, message: str, certificate: object) -> None:
        super().__init__(message, certificate)
        self.certificate = certificate

    def __str__(self) -> str:
        return str(self.args[0])


class BackgroundError(SouffleError):
    """A network could not be exchanged for the optimized one: its compilation ended, or what it gave is not the same.

    Errors that the compiler itself raised in the background are raised as they are.
    """


class DeviceError(SouffleError):
    """A kernel failed while running: a fault, a deadlock, or barriers under divergent control."""


class KernelTimeoutError(DeviceError):
    """A wait in a kernel was over after the network's ``watchdog_ms``, and the kernel has ended.

    Attributes
    ----------
    wait : souffle.watchdog.TimedOutWait
        The first one that was.
    """

    def __init__(self, message: str, wait: object) -> None:
        super().__init__(message, wait)
        self.wait = wait

    def __str__(self) -> str:
        return str(self.args[0])


class NoGpuError(SouffleError):
    """A GPU is needed and none is usable here."""


class ArtifactError(SouffleError):
    """A ``.souffle`` file is damaged, foreign, or of another version."""
