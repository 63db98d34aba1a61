"""Modules of PyTorch as compiled networks: how they are called, what they give, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import souffle
from souffle.errors import ModelError, OptionError
from souffle.runtime import VersionedNetwork

torch = pytest.importorskip("torch", minversion="2.9")
nn = torch.nn
_CPU = {"target": "cpu"}


class _Residual(nn.Module):
    """Nested inputs and outputs, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Any, states: Any, scale: float = 1.0, *, mask: Any = None) -> Any:
        y = torch.relu(self.linear(x)) * scale + states[0]
        return {"y": y if mask is None else y * mask, "states": [y + states[1]["deep"], x], "nothing": None, "size": 3}


def _values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _close(found: Any, expected: torch.Tensor, **tolerance: float) -> None:
    expected = expected.detach()
    assert found.shape == tuple(expected.shape)
    np.testing.assert_allclose(
        np.asarray(found, np.float64), expected.to(torch.float64).numpy(), **(tolerance or {"rtol": 1e-5, "atol": 1e-5})
    )


def test_inputs_and_outputs_have_the_names_of_the_module() -> None:
    module = _Residual().eval()
    x, first, deep, mask = (_values(2, 16, seed=seed) for seed in range(4))
    states = (first, {"deep": deep})
    expected = module(x, states, 2.0, mask=mask)
    for examples in ((x, states, 2.0), {"x": x, "states": states, "scale": 2.0, "mask": mask}):
        network = souffle.from_torch(module, examples, **_CPU)
        masked = isinstance(examples, dict)
        names = ["x", "states.0", "states.1.deep", *(["mask"] if masked else [])]
        assert [spec.name for spec in network.inputs] == names
        assert [spec.name for spec in network.outputs] == ["y", "output.states.0", "states.1"]
        given = dict(zip(names, (x, first, deep, mask), strict=False))
        found = network(given)
        _close(found["y"], expected["y"] if masked else module(x, states, 2.0)["y"])
        _close(found["output.states.0"], expected["states"][0])
        _close(found["states.1"], x)


def test_one_tensor_gives_one_output() -> None:
    linear = nn.Linear(16, 4).eval()
    network = souffle.from_torch(linear, _values(3, 16), **_CPU)
    assert ([s.name for s in network.inputs], [s.name for s in network.outputs]) == (["input"], ["output"])
    x, out = _values(3, 16, seed=1), torch.empty(3, 4)
    expected = linear(x).detach()
    assert network(input=x, out=out)["output"] is out
    torch.testing.assert_close(out, expected)
    # Weights are those of the time when it was compiled.
    with torch.no_grad():
        linear.weight.zero_()
    _close(network(x)["output"], expected)
    _close(souffle.from_torch(lambda a: a * 2 + 1, x, **_CPU)(x)["output"], x * 2 + 1)


def test_outputs_that_are_inputs_weights_or_each_other() -> None:
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(_values(32, 16))

        def forward(self, x: Any, unused: Any) -> Any:
            y = x @ self.weight.T
            return y, y, x, x.view(-1), self.weight, torch.ones(2), y.view(-1)

    module = Same()
    x = _values(2, 16)
    network = souffle.from_torch(module, (x, x), **_CPU)
    assert [spec.name for spec in network.inputs] == ["x", "unused"]
    for value, expected in zip(network(x, x).values(), module(x, x), strict=True):
        _close(value, expected)


def test_open_dimensions_become_versions() -> None:
    module = nn.Sequential(nn.Linear(16, 4), nn.Softmax(-1)).eval()
    network = souffle.from_torch(
        module, _values(3, 16), dynamic_shapes={"input": {0: "batch"}}, dims={"batch": [2, 5]}, **_CPU
    )
    assert isinstance(network, VersionedNetwork) and network.inputs[0].shape == ("batch", 16)
    for batch in (2, 5):
        x = _values(batch, 16)
        _close(network(x)["output"], module(x))


@pytest.mark.parametrize(("kind", "tolerance"), [("float16", 4e-3), ("bfloat16", 4e-2), ("float64", 1e-12)])
def test_modules_of_other_types(kind: str, tolerance: float) -> None:
    dtype = getattr(torch, kind)
    module = nn.Sequential(nn.Linear(64, 32), nn.GELU()).eval().to(dtype)
    x = _values(2, 64).to(dtype)
    network = souffle.from_torch(module, x, **_CPU)
    assert network.inputs[0].dtype == network.outputs[0].dtype == kind
    given = x.view(torch.int16).numpy().view(kind) if dtype == torch.bfloat16 else x
    _close(network(given)["output"], module(x), rtol=tolerance, atol=tolerance)


def test_integers_and_conditions() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 8)

        def forward(self, tokens: Any, keep: Any) -> Any:
            return self.table(tokens).masked_fill(~keep[..., None], -1.0), tokens + 1

    module = Lookup().eval()
    tokens, keep = torch.tensor([[1, 9, 0]]), torch.tensor([[True, False, True]])
    found = souffle.from_torch(module, (tokens, keep), **_CPU)(tokens, keep)
    for value, expected in zip(found.values(), module(tokens, keep), strict=True):
        _close(value, expected)


def test_what_is_no_function_is_refused() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Any) -> Any:
            self.count += 1
            return x * self.count

    x = _values(4, 16)
    for module, says in (
        (nn.Dropout(0.5), "draws random numbers .*dropout"),
        (nn.BatchNorm1d(16), "changes 'module.running_mean'"),
        (Counting(), "changes 'module.count' in place"),
    ):
        with pytest.raises(ModelError, match=says):
            souffle.from_torch(module, x, **_CPU)
    training = nn.Dropout(0.5)
    inside = nn.Sequential(training, nn.Dropout(0.5).eval())
    with pytest.raises(ModelError):
        souffle.from_torch(inside, x, **_CPU)
    assert training.training and inside.training and not inside[1].training  # left as they were
    _close(souffle.from_torch(training.eval(), x, **_CPU)(x)["output"], x)


def test_what_pytorch_does_not_export_is_named() -> None:
    class Eigenvalues(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.linalg.eigvals(x).real

    class Branches(nn.Module):
        def forward(self, x: Any) -> Any:
            return x if x.sum() > 0 else -x

    with pytest.raises(ModelError, match=rf"PyTorch {torch.__version__.split('+')[0]}.* does not export .*linalg_eig"):
        souffle.from_torch(Eigenvalues(), _values(2, 2), **_CPU)
    with pytest.raises(ModelError, match="data-dependent expression"):
        souffle.from_torch(Branches(), _values(2, 2), **_CPU)


def test_wrong_arguments_are_refused() -> None:
    linear, x = nn.Linear(16, 4).eval(), _values(2, 16)
    for options, says in (
        ({"dynamic_shapes": {"x": {0: "batch"}}}, "no input 'x'; there are 'input'"),
        ({"dynamic_shapes": {"input": {2: "batch"}}}, "has 2 axes"),
        ({"level": "V9"}, "level='V9'"),
    ):
        with pytest.raises(OptionError, match=says):
            souffle.from_torch(linear, x, **options, **_CPU)
    for module, examples, says in (
        (linear, (x, x), "cannot be called with the example inputs"),
        (linear, {"y": x}, "cannot be called with the example inputs"),
        (3, x, "takes a module of PyTorch and was given a int"),
    ):
        with pytest.raises(OptionError, match=says):
            souffle.from_torch(module, examples, **_CPU)
