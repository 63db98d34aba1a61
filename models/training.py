"""What training steps share: a parameter is an input before the step and an output, ``<name>_new``, behind it.

Parameters are inputs and no initializers, since no compiler may fold what each step changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from souffle.models.builder import GraphBuilder
from souffle.models.draws import normal, uniform

__all__ = ["Adam", "descend", "linear_gradients", "parameter", "transposed"]


def parameter(b: GraphBuilder, name: str, shape: Sequence[int], std: float) -> str:
    """A parameter as an input, to be drawn with standard deviation `std`."""
    return b.input(name, shape, drawn=normal(std))


def transposed(b: GraphBuilder, x: str) -> str:
    """A matrix with rows and columns exchanged."""
    return b.node("Transpose", x, perm=[1, 0])


def linear_gradients(b: GraphBuilder, x: str, gradient: str) -> tuple[str, str]:
    """Of ``y = x w + b`` with rows for a batch, from the gradient of y: those of w and b."""
    return b.node("MatMul", transposed(b, x), gradient), b.node("ReduceSum", gradient, b.constant([0]), keepdims=0)


def descend(b: GraphBuilder, name: str, gradient: str, shape: Sequence[int], rate: float) -> None:
    """Gradient descent: the output ``<name>_new`` is the parameter less `rate` times its gradient."""
    b.output(b.node("Sub", name, b.node("Mul", gradient, b.constant(rate))), f"{name}_new", shape)


@dataclass(frozen=True)
class Adam:
    """TensorFlow's Adam (Kingma and Ba 2015, the efficient order of its section 2).

    Its state are inputs and outputs too: for each parameter ``<name>_m`` and ``<name>_v``, and the powers of both decay
    rates, ``beta1_power`` and ``beta2_power``.
    """

    rate: float
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def step_size(self, b: GraphBuilder) -> str:
        """Declare the powers, advance them, and return the step's size, a scalar."""
        power1 = b.input("beta1_power", (), drawn=uniform(0.1, 0.9))
        power2 = b.input("beta2_power", (), drawn=uniform(0.9, 0.999))
        for power, decay in ((power1, self.beta1), (power2, self.beta2)):
            b.output(b.node("Mul", power, b.constant(decay)), f"{power}_new", ())
        one = b.constant(1.0)
        root = b.node("Sqrt", b.node("Sub", one, power2))
        return b.node("Div", b.node("Mul", b.constant(self.rate), root), b.node("Sub", one, power1))

    def update(self, b: GraphBuilder, name: str, gradient: str, shape: Sequence[int], size: str) -> None:
        """Declare the moments of a parameter; output them and the parameter behind the step."""
        m = b.input(f"{name}_m", shape, drawn=normal(0.002))
        v = b.input(f"{name}_v", shape, drawn=uniform(1e-6, 1e-5))
        square = b.node("Mul", gradient, gradient)
        m = self._decayed(b, m, gradient, self.beta1)
        v = self._decayed(b, v, square, self.beta2)
        root = b.node("Add", b.node("Sqrt", v), b.constant(self.epsilon))
        moved = b.node("Sub", name, b.node("Div", b.node("Mul", m, size), root))
        b.output(moved, f"{name}_new", shape)
        b.output(m, f"{name}_m_new", shape)
        b.output(v, f"{name}_v_new", shape)

    @staticmethod
    def _decayed(b: GraphBuilder, old: str, new: str, decay: float) -> str:
        return b.node("Add", b.node("Mul", old, b.constant(decay)), b.node("Mul", new, b.constant(1.0 - decay)))
