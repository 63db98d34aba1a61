"""Every error that Souffle raises on purpose, one tree under :class:`SouffleError`.

A message names the thing (operator, node, shape, file) and says what would help.
"""

from __future__ import annotations

from enum import Enum

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
    "Refusal",
    "SouffleError",
    "UnsupportedOperatorError",
]


class SouffleError(Exception):
    """Base of all errors raised by Souffle."""


class Refusal(str, Enum):
    """What stands against a model, by kind. Its value says it in words."""

    PARAMETER = "an input that the program depends on has no value before the network runs"
    DATA = "the shape of a result depends on data"
    OPERATOR = "there is no tensor expression of the operator"
    FORM = "this form of the operator is not supported"
    TYPE = "a network holds no elements of this type"
    TEXT = "a network computes with numbers, not with text"
    SEQUENCE = "inputs and outputs of a network are tensors, not sequences, optionals or maps"
    EMPTY = "a tensor without elements stands beside others"
    OPEN = "a dimension is left open"
    INVALID = "the model is not valid"


class ModelError(SouffleError):
    """The model cannot be read: not ONNX, invalid, or a dimension is left open.

    Attributes
    ----------
    refusal : Refusal
        What stands against it.
    needs : tuple of str
        The model's inputs whose values would have to be known; ``compile(constants=...)`` gives them.
    """

    def __init__(self, *words: object, refusal: Refusal = Refusal.INVALID, needs: tuple[str, ...] = ()) -> None:
        super().__init__(*words)
        self.refusal = refusal
        self.needs = needs


class UnsupportedOperatorError(ModelError):
    """The model uses an operator, or a form of one, that cannot be imported."""

    def __init__(self, *words: object, refusal: Refusal = Refusal.FORM, needs: tuple[str, ...] = ()) -> None:
        super().__init__(*words, refusal=refusal, needs=needs)


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
