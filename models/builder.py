"""A small writer of ONNX graphs whose names follow PyTorch's exporter.

A node is named ``/outer/inner/OpType``, its values ``<node>_output_0``, a parameter ``outer.inner.weight``, and
a weight that the exporter folds or transposes ``onnx::MatMul_12``. Compilers meet such names in real files, so test
models use them too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from souffle.models.draws import Draw, write_draws

__all__ = ["IR_VERSION", "OPSET", "GraphBuilder"]

OPSET = 17
# The IR version released together with opset 17, so that older runtimes read the file as well.
IR_VERSION = 8


class GraphBuilder:
    """Collects nodes and initialisers of one graph, in topological order.

    Parameters
    ----------
    name
        Name of the graph.
    seed
        Seed of ``rng``, from which all weights are drawn in the order of construction.
    """

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self.rng = np.random.default_rng(seed)
        self._nodes: list[NodeProto] = []
        self._initializers: list[TensorProto] = []
        self._inputs: list[ValueInfoProto] = []
        self._outputs: list[ValueInfoProto] = []
        self._renamed: dict[str, str] = {}
        self._scopes: list[str] = []
        self._uses: Counter[str] = Counter()
        self._draws: dict[str, Draw] = {}

    @contextmanager
    def scope(self, *modules: str) -> Iterator[None]:
        """Place what is built inside under the given nested modules."""
        depth = len(self._scopes)
        self._scopes.extend(modules)
        try:
            yield
        finally:
            del self._scopes[depth:]

    def normal(self, shape: Sequence[int], std: float, mean: float = 0.0) -> np.ndarray:
        """Draw float32 values of the given standard deviation and mean."""
        values = self.rng.standard_normal(tuple(shape), dtype=np.float32)
        values *= np.float32(std)
        values += np.float32(mean)
        return values

    def input(
        self, name: str, shape: Sequence[int], dtype: type[np.generic] = np.float32, drawn: Draw | None = None
    ) -> str:
        """Declare a graph input and return its name; `drawn` is how :func:`random_inputs` draws it, if not as usual."""
        element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        self._inputs.append(helper.make_tensor_value_info(name, element, list(shape)))
        if drawn is not None:
            self._draws[name] = drawn
        return name

    def output(self, value: str, name: str, shape: Sequence[int]) -> None:
        """Make a node's value a float32 graph output under another name."""
        self._renamed[value] = name
        self._outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape)))

    def parameter(self, name: str, values: np.ndarray) -> str:
        """Store an initialiser named as the current module's parameter or buffer ``name``."""
        return self._initializer(".".join((*self._module_path(), name)), values)

    def folded(self, op_type: str, values: np.ndarray) -> str:
        """Store an initialiser that the exporter would have computed, named after the operator using it."""
        number = self._uses["onnx::"]
        self._uses["onnx::"] += 1
        return self._initializer(f"onnx::{op_type}_{number}", values)

    def constant(self, value: np.ndarray | Sequence[int] | float) -> str:
        """Add a ``Constant`` node. Python integers become int64 and floats float32, as in the exporter."""
        array = np.asarray(value)
        if not isinstance(value, np.ndarray):
            array = array.astype(np.int64 if array.dtype.kind == "i" else np.float32)
        return self.node("Constant", value=numpy_helper.from_array(array))

    def node(self, op_type: str, *inputs: str, **attributes: object) -> str:
        """Add a node with one output and return the name of that output."""
        return self.nodes(op_type, inputs, 1, **attributes)[0]

    def nodes(self, op_type: str, inputs: Sequence[str], outputs: int, **attributes: object) -> tuple[str, ...]:
        """Add a node with ``outputs`` outputs and return their names."""
        stem = "".join(f"/{module}" for module in (*self._scopes, op_type))
        count = self._uses[stem]
        self._uses[stem] += 1
        name = f"{stem}_{count}" if count else stem
        values = tuple(f"{name}_output_{i}" for i in range(outputs))
        self._nodes.append(helper.make_node(op_type, inputs, values, name=name, **attributes))
        return values

    def model(self) -> ModelProto:
        """Finish and return the model (without a check: the tests run ``onnx.checker``)."""
        for node in self._nodes:
            node.input[:] = [self._renamed.get(value, value) for value in node.input]
            node.output[:] = [self._renamed.get(value, value) for value in node.output]
        graph = helper.make_graph(self._nodes, self.name, self._inputs, self._outputs)
        # Moved in one at a time: the list would otherwise stay as a second copy of all weights.
        while self._initializers:
            graph.initializer.append(self._initializers.pop(0))
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
        model.ir_version = IR_VERSION
        model.producer_name = "souffle-models"
        write_draws(model, self._draws)
        return model

    def _initializer(self, name: str, values: np.ndarray) -> str:
        self._initializers.append(numpy_helper.from_array(values, name))
        return name

    def _module_path(self) -> list[str]:
        # A container repeats its own name in its children's ("layer1", "layer1.0"): keep the longer one.
        path: list[str] = []
        for module in self._scopes:
            if path and module.startswith(path[-1] + "."):
                path.pop()
            path.append(module)
        return path
