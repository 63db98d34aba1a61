"""``torch.compile(backend="souffle")``: the same as eager, on networks where they can be had, and named where not."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import souffle
import souffle.torch
from souffle.errors import ModelError, OptionError

torch = pytest.importorskip("torch", minversion="2.9")
nn = torch.nn
dynamo = pytest.importorskip("souffle.torch.dynamo")


@pytest.fixture(autouse=True)
def networks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What is compiled in a test."""
    made: list[Any] = []
    compile_model = dynamo.compile_model

    def compiling(*args: Any, **options: Any) -> Any:
        made.append(compile_model(*args, **options))
        return made[-1]

    compiling.__signature__ = inspect.signature(compile_model)
    monkeypatch.setattr(dynamo, "compile_model", compiling)
    torch._dynamo.reset()
    souffle.torch.reset()
    with torch.no_grad():
        yield made
    torch._dynamo.reset()


def _compiled(function: Callable, **options: Any) -> Callable:
    """As ``backend="souffle"``, which an installed package registers."""
    return torch.compile(function, backend=souffle.torch.backend, options=options)


def _values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _alike(found: Any, expected: Any, **tolerance: float) -> None:
    """Values, types, shapes and the order in memory."""
    torch.testing.assert_close(found, expected, **tolerance)
    for one, other in zip(*(v if isinstance(v, (tuple, list)) else (v,) for v in (found, expected)), strict=True):
        assert not isinstance(other, torch.Tensor) or one.stride() == other.stride()


def _kinds() -> list[str]:
    return [found.kind for found in souffle.torch.breaks()]


def test_a_module_gives_what_eager_gives(networks: list[Any]) -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(), nn.Flatten(), nn.Linear(8 * 36, 4)
    ).eval()
    compiled = _compiled(module)
    for seed in range(3):
        x = _values(2, 3, 8, 8, seed=seed)
        kept = x.clone()
        _alike(compiled(x), module(x))
        torch.testing.assert_close(x, kept)
    assert len(networks) == 1 and not souffle.torch.breaks()
    # Inputs that lie otherwise in memory, also in channels-last order; and weights of the one network.
    strided = _values(2, 8, 8, 3).permute(0, 3, 1, 2)
    _alike(compiled(strided), module(strided))
    with torch.inference_mode():
        _alike(compiled(_values(2, 3, 8, 8)), module(_values(2, 3, 8, 8)))
    assert not souffle.torch.breaks()


def test_outputs_are_what_they_are_in_eager(networks: list[Any]) -> None:
    """An input, a view of one, the same tensor twice, views of one tensor that are apart, nothing, numbers."""

    def function(x: Any) -> Any:
        y = x * 2
        first, second = y.chunk(2, dim=1)
        z = x + 1
        return z, z, x, x.view(-1), x.t(), first, second, None, y.shape[0], z.shape[1] + 2, 7

    x = _values(4, 6)
    compiled = _compiled(function)
    found, expected = compiled(x), function(x)
    _alike(found, expected)
    assert found[0] is found[1] and found[2] is x
    found[3][0] = 5
    assert x[0, 0] == 5 and found[4].data_ptr() == x.data_ptr()
    found[5].zero_()
    torch.testing.assert_close(found[6], expected[6])
    for rows in (3, 5, 3):
        _alike(compiled(_values(rows, 6)), function(_values(rows, 6)))
    assert not souffle.torch.breaks() and networks


def test_views_of_one_output_stay_views(networks: list[Any]) -> None:
    def function(x: Any) -> Any:
        y = x * 2
        return y, y.view(-1)[1:]

    y, view = _compiled(function)(_values(2, 3))
    view[0] = 9
    assert y[0, 1] == 9
    assert _kinds() == ["aliasing"] and not networks


def test_nothing_but_views_is_left_to_pytorch(networks: list[Any]) -> None:
    compiled = _compiled(lambda x: (x.view(-1), x))
    x = _values(2, 3)
    found = compiled(x)
    assert found[0].data_ptr() == x.data_ptr() and found[1] is x
    assert not networks and not souffle.torch.breaks()


def test_order_in_memory_is_kept() -> None:
    convolution = nn.Conv2d(3, 4, 1).to(memory_format=torch.channels_last).eval()
    for x in (_values(2, 3, 5, 5).to(memory_format=torch.channels_last), _values(2, 3, 5, 5)):
        _alike(_compiled(convolution)(x), convolution(x))
    _alike(_compiled(lambda x: torch.exp(x).t())(_values(2, 3)), torch.exp(_values(2, 3)).t())


def test_a_network_for_each_shape(networks: list[Any]) -> None:
    module = nn.Linear(6, 4).eval()
    compiled = _compiled(module)
    for _ in range(2):
        for batch in (2, 3, 5, 1):
            _alike(compiled(_values(batch, 6)), module(_values(batch, 6)))
    # TorchDynamo has a graph for the first shape, one for 1, and one for all others, of which some meet both.
    assert len(networks) <= 5 and not souffle.torch.breaks()


def test_shapes_without_end(networks: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "_SHAPES", 1)
    compiled = _compiled(torch.exp)
    for length in (2, 3, 4, 5, 3, 2):
        _alike(compiled(_values(length)), torch.exp(_values(length)))
    assert len(networks) == 2 and _kinds() == ["shapes"]


def test_numbers_are_those_of_the_call() -> None:
    def function(x: Any, n: int, s: float, flag: bool) -> Any:
        return (x + n) * s if flag else x.reshape(n, -1) - s

    compiled = _compiled(function)
    for n, s, flag in ((2, 0.5, True), (3, 0.5, True), (6, 1.5, False), (3, -2.5, False), (2, 4.0, True)):
        _alike(compiled(_values(2, 9), n, s, flag), function(_values(2, 9), n, s, flag))


def test_integers_and_conditions() -> None:
    def function(tokens: Any, keep: Any, table: Any) -> Any:
        return table[tokens].masked_fill(~keep[:, None], 0), tokens % 3, keep.sum()

    args = (torch.tensor([3, 0, 4]), torch.tensor([True, False, True]), _values(5, 2))
    _alike(_compiled(function)(*args), function(*args))
    assert not souffle.torch.breaks()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 4e-3), (torch.bfloat16, 4e-2)])
def test_half_precision(dtype: torch.dtype, tolerance: float) -> None:
    module = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.LayerNorm(32)).eval().to(dtype)
    x = _values(3, 64).to(dtype)
    _alike(_compiled(module)(x), module(x), rtol=tolerance, atol=tolerance)
    assert not souffle.torch.breaks()


def test_changed_weights_are_seen(networks: list[Any]) -> None:
    module, x = nn.Linear(6, 4).eval(), _values(2, 6)
    compiled = _compiled(module)
    for change in (
        lambda: None,
        lambda: module.weight.mul_(2),
        lambda: setattr(module.weight, "data", _values(4, 6, seed=5)),
        lambda: module.load_state_dict(nn.Linear(6, 4).state_dict()),
        lambda: setattr(module, "bias", nn.Parameter(_values(4))),
    ):
        change()
        for _ in range(2):
            _alike(compiled(x), module(x))
    assert len(networks) == 5


def test_equal_layers_have_their_own_weights(networks: list[Any]) -> None:
    """TorchDynamo gives one graph for all of them, with the weights as inputs."""
    layers, x = [nn.Linear(6, 6).eval() for _ in range(10)], _values(2, 6)

    def layer_of(weights: Any, x: Any) -> Any:
        return nn.functional.relu(nn.functional.linear(x, weights))

    compiled = _compiled(layer_of)
    for _ in range(2):
        for layer in layers:
            _alike(compiled(layer.weight, x), layer_of(layer.weight, x))
    assert len(networks) == 8 and _kinds() == ["weights"]


def test_graph_breaks_are_named(networks: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    def function(x: Any) -> Any:
        y = torch.exp(x) + 1
        if y.sum() > 1e9:
            return y
        return torch.tanh(y)

    with caplog.at_level(logging.WARNING, "souffle.torch"):
        compiled = _compiled(function)
        _alike(compiled(_values(2, 3)), function(_values(2, 3)))
        compiled(_values(2, 3))
    (found,) = souffle.torch.breaks()
    assert found.kind == "graph break" and "a branch depends on the values of a tensor" in found.reason
    assert found.where.startswith(f"{__file__}:")
    assert len(networks) == 2
    assert [record.message for record in caplog.records if record.name == "souffle.torch"] == [str(found)]


def test_what_is_refused_runs_in_pytorch_and_is_named(networks: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    def function(x: Any) -> Any:
        return torch.linalg.eigvals(x @ x.T).real.sort().values

    with caplog.at_level(logging.WARNING, "souffle.torch"):
        compiled = _compiled(function)
        for _ in range(2):
            _alike(compiled(_values(3, 3)), function(_values(3, 3)), rtol=1e-3, atol=1e-3)
    (found,) = souffle.torch.breaks()
    assert found.kind == "export" and "linalg_eig" in found.reason and "eigvals" in str(found.operators)
    assert found.where.startswith(f"{__file__}:") and len(caplog.records) == 1 and not networks
    torch._dynamo.reset()
    with pytest.raises(ModelError, match="linalg_eig"):
        _compiled(function, strict=True)(_values(3, 3))


def test_what_souffle_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise ModelError("operator Foo (node 'bar') has no tensor expression")

    refuse.__signature__ = dynamo.compile_model.__signature__
    monkeypatch.setattr(dynamo, "compile_model", refuse)
    _alike(_compiled(torch.exp)(_values(2)), torch.exp(_values(2)))
    (found,) = souffle.torch.breaks()
    assert (found.kind, found.reason) == ("refused", "operator Foo (node 'bar') has no tensor expression")
    torch._dynamo.reset()
    with pytest.raises(ModelError, match="operator Foo"):
        _compiled(torch.exp, strict=True)(_values(2))


def test_gradients_are_pytorchs(networks: list[Any]) -> None:
    module, x = nn.Linear(6, 4), _values(2, 6)
    compiled = _compiled(module)
    with torch.enable_grad():
        compiled(x).sum().backward()
    assert module.weight.grad is not None and _kinds() == ["gradient"] and not networks
    _alike(compiled(x), module(x))
    assert len(networks) == 1
    with torch.enable_grad():  # a gradient can be asked for, and nothing needs one
        _alike(_compiled(lambda x: x * 2)(x), x * 2)
    assert _kinds() == ["gradient"]


def test_training_is_pytorchs(networks: list[Any]) -> None:
    norm = nn.BatchNorm1d(6)
    _compiled(norm)(_values(4, 6))
    assert norm.num_batches_tracked == 1 and not torch.equal(norm.running_mean, torch.zeros(6))
    compiled, x = _compiled(nn.Dropout(0.5)), torch.ones(1000)
    assert not torch.equal(compiled(x), compiled(x))
    assert sorted(_kinds()) == ["mutation", "random"] and not networks


def test_inputs_that_are_written_to(networks: list[Any]) -> None:
    def function(x: Any, cache: Any) -> Any:
        cache[0] = x[0]
        return x * 2

    caches = [torch.zeros(2, 3) for _ in range(2)]
    _alike(_compiled(function)(_values(2, 3), caches[0]), function(_values(2, 3), caches[1]))
    torch.testing.assert_close(*caches)
    assert _kinds() == ["mutation"] and not networks

    def inside(x: Any) -> Any:
        y = x + 1
        y.mul_(3)
        y[0] = 7
        return y

    _alike(_compiled(inside)(_values(2, 3)), inside(_values(2, 3)))
    assert len(networks) == 1


def test_eight_threads(networks: list[Any]) -> None:
    module = nn.Sequential(nn.Linear(6, 4), nn.Tanh()).eval()
    compiled = _compiled(module)
    compiled(_values(2, 6))
    failures: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            with torch.no_grad():
                for step in range(20):
                    x = _values(2, 6, seed=20 * thread + step)
                    _alike(compiled(x), module(x))
        except BaseException as error:  # whatever a thread raises is the test's failure
            failures.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    finally:
        sys.setswitchinterval(before)
    assert not failures, failures[0]
    assert not souffle.torch.breaks()


def test_cuda_text_on_the_cpu(networks: list[Any]) -> None:
    module = nn.Sequential(nn.Linear(6, 4), nn.ReLU()).eval()
    compiled = _compiled(module, target="cuda", level="V2", arch="sm_90", cubin=False, device="cpu")
    _alike(compiled(_values(2, 6)), module(_values(2, 6)))
    assert networks[0].kernels and not souffle.torch.breaks()


def test_options_are_checked() -> None:
    for options, says in (
        ({"levle": "V4"}, "no option 'levle'; did you mean 'level'"),
        ({"dims": {"a": 1}}, "'dims' is not for torch.compile"),
        ({"level": "V9", "target": "cpu"}, "level='V9'"),
    ):
        with pytest.raises(OptionError, match=says):
            _compiled(torch.exp, **options)(_values(2))
        torch._dynamo.reset()
