"""The workloads of "Learning to Fuse" in NumPy and float64, written from their papers' definitions.

As in ``references.py``: each function gets a model's inputs by name and its initializers in the order of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from souffle.models import amoebanet, gnmt, rnnlm, transformer_xl
from tests.models.references import log_softmax, normalized, sigmoid, softmax

__all__ = ["REFERENCES"]

Array = np.ndarray
Given = Mapping[str, Array]


def _lstm(x: Array, h: Array, c: Array, weight: Array, bias: Array) -> tuple[Array, Array]:
    """One step of one sequence, each gate with its own columns."""
    size = len(c)
    i, j, f, o = (
        np.concatenate([x, h]) @ weight[:, k * size : (k + 1) * size] + bias[k * size : (k + 1) * size]
        for k in range(4)
    )
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(j)
    return sigmoid(o) * np.tanh(c), c


def language_model(given: Given, weights: Sequence[Array]) -> dict[str, Array]:
    """Each sequence goes alone, word by word through all layers; a cell's output is projected (Sak et al. 2014)."""
    config = rnnlm.SIZES["tiny"]
    table, *rest, w_out, b_out = weights
    cells = [rest[4 * layer : 4 * layer + 4] for layer in range(config.layers)]
    output = np.zeros((config.steps, config.batch, config.words))
    new = {f"{key}_new": value.copy() for key, value in given.items() if key != "words"}
    for one in range(config.batch):
        for step in range(config.steps):
            x = table[given["words"][one, step]]
            for layer, (weight, bias, _, projection) in enumerate(cells):
                h, c = new[f"output.{layer}_new"], new[f"state.{layer}_new"]
                full, c[one] = _lstm(x, h[one], c[one], weight, bias)
                x = h[one] = full @ projection
            output[step, one] = log_softmax(w_out @ x + b_out)
    return {"output": output.reshape(-1, config.words), **new}


def translation(given: Given, weights: Sequence[Array]) -> dict[str, Array]:
    """Each pair of sentences goes alone."""
    config = gnmt.SIZES["tiny"]
    w = iter(weights[1:])  # but for the first states

    def cell() -> tuple[Array, Array]:
        found = next(w), next(w)
        next(w)  # how gates are split
        return found

    sources = next(w)
    encoder = [cell() for _ in range(config.layers + 1)]
    targets = next(w)
    decoder = [cell() for _ in range(config.layers)]
    ask, score, w_key, b_key, w_out, b_out = w
    zero = np.zeros(config.hidden)
    output = np.zeros((config.target, config.batch, config.words))
    alignment = np.zeros((config.target, config.batch, config.source))
    for one in range(config.batch):
        x = list(sources[given["source"][one]])

        def run(cell: tuple[Array, Array], steps: Sequence[Array]) -> list[Array]:
            h = c = zero
            outputs = []
            for step in steps:
                h, c = _lstm(step, h, c, *cell)
                outputs.append(h)
            return outputs

        there, back = run(encoder[0], x), run(encoder[1], x[::-1])[::-1]
        x = [np.concatenate(both) for both in zip(there, back, strict=True)]
        for layer in range(1, config.layers):
            y = run(encoder[layer + 1], x)
            x = [new + old for new, old in zip(y, x, strict=True)] if layer >= 2 else y
        states = [(zero, zero)] * config.layers
        for step in range(config.target):
            asked = states[0][0]
            scores = [np.tanh(asked @ ask + known @ w_key + b_key) @ score[:, 0] for known in x]
            alignment[step, one] = softmax(np.array(scores))
            context = sum(p * known for p, known in zip(alignment[step, one], x, strict=True))
            y = targets[given["target"][one, step]]
            for layer in range(config.layers):
                states[layer] = _lstm(np.concatenate([y, context]), *states[layer], *decoder[layer])
                y = states[layer][0] + (y if layer >= 2 else 0)
            output[step, one] = log_softmax(w_out @ y + b_out)
    return {"output": output, "alignment": alignment}


def _relative(x: Array, known: Array, w: Iterator[Array], heads: int, u: Array, v: Array, memory: int) -> Array:
    """Dai et al., 3.3, term by term: word i of the segment asks, word j, i - j words before it, answers."""
    w_q, w_k, w_v, w_r, w_out = (next(w) for _ in range(5))
    width = x.shape[-1] // heads
    frequencies = 1 / 10000 ** (np.arange(0, x.shape[-1], 2) / x.shape[-1])
    result = np.zeros_like(x)
    for one, head, i in np.ndindex(len(x), heads, x.shape[1]):
        part = slice(head * width, (head + 1) * width)
        query = x[one, i] @ w_q[:, part]
        scores = []
        for j in range(memory + i + 1):
            distance = memory + i - j
            place = np.concatenate([np.sin(distance * frequencies), np.cos(distance * frequencies)])
            key, where = known[one, j] @ w_k[:, part], place @ w_r[:, part]
            scores.append(query @ key + query @ where + u[head, 0] @ key + v[head, 0] @ where)
        weights = softmax(np.array(scores) / np.sqrt(width))
        result[one, i, part] = sum(p * (known[one, j] @ w_v[:, part]) for j, p in enumerate(weights))
    return result @ w_out


def relative_transformer(given: Given, weights: Sequence[Array]) -> dict[str, Array]:
    config = transformer_xl.SIZES["tiny"]
    table, u, v, _, _, *rest = weights
    w = iter(rest)
    x = table[given["words"]] * np.sqrt(config.hidden)
    new = {}
    for layer in range(config.layers):
        known = np.concatenate([given[f"memory.{layer}"], x], axis=1)
        new[f"memory.{layer}_new"] = known[:, -config.memory :]
        y = _relative(x, known, w, config.heads, u, v, config.memory)
        x = normalized(x + y, next(w), next(w), 1e-5)
        y = np.maximum(x @ next(w) + next(w), 0) @ next(w) + next(w)
        x = normalized(x + y, next(w), next(w), 1e-5)
    return {"output": log_softmax(x @ table.T + next(w)), **new}


# As the authors' released code has them (tensorflow/tpu, models/official/amoeba_net/model_specs.py, amoeba_net_a):
# operations, the states that they take, two for each sum, and which states do not go into the output.
_NORMAL = (
    ["avg3", "max3", "sep3", "none", "none", "avg3", "sep3", "sep5", "avg3", "sep3"],
    [0, 0, 1, 1, 0, 1, 0, 2, 5, 0],
    [1, 0, 1, 0, 0, 1, 0],
)
_REDUCTION = (
    ["sep3", "avg3", "max3", "sep7", "max3", "max3", "sep3", "1x7", "avg3", "sep7"],
    [1, 0, 0, 2, 1, 0, 4, 0, 1, 0],
    [1, 1, 0, 0, 0, 0, 0],
)


def _windows(x: Array, kernel: tuple[int, int], strides: tuple[int, int], fill: float) -> Array:
    """TensorFlow's SAME windows, (samples, channels, height, width, kernel, kernel)."""
    ways = [(0, 0), (0, 0)]
    for side, size, stride in zip(x.shape[2:], kernel, strides, strict=True):
        total = max(0, (int(np.ceil(side / stride)) - 1) * stride + size - side)
        ways.append((total // 2, total - total // 2))
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, ways, constant_values=fill), kernel, axis=(2, 3))
    return windows[:, :, :: strides[0], :: strides[1]]


def _batch_norm(x: Array, w: Iterator[Array]) -> Array:
    mean, variance, scale, shift = (next(w)[:, None, None] for _ in range(4))
    return (x - mean) / np.sqrt(variance + 1e-3) * scale + shift


def _convolved(x: Array, w: Iterator[Array], strides: tuple[int, int] = (1, 1), groups: bool = False) -> Array:
    weight = next(w)
    windows = _windows(x, weight.shape[2:], strides, 0.0)
    return np.einsum("nchwij,cij->nchw" if groups else "nchwij,ocij->nohw", windows, weight[:, 0] if groups else weight)


def _operation(kind: str, x: Array, filters: int, stride: int, w: Iterator[Array]) -> Array:
    if kind == "none":
        return x
    if kind in ("avg3", "max3"):
        windows = _windows(x, (3, 3), (stride, stride), np.nan)
        x = (np.nanmean if kind == "avg3" else np.nanmax)(windows, axis=(-1, -2))
        return x if x.shape[1] == filters else _batch_norm(_convolved(x, w), w)
    if kind == "1x7":
        for strides in ((1, 1), (1, stride), (stride, 1), (1, 1)):
            x = _batch_norm(_convolved(np.maximum(x, 0), w, strides), w)
        return x
    for strides in ((stride, stride), (1, 1)):
        x = _batch_norm(_convolved(_convolved(np.maximum(x, 0), w, strides, groups=True), w), w)
    return x


def evolved_classifier(given: Given, weights: Sequence[Array]) -> dict[str, Array]:
    config = amoebanet.SIZES["tiny"]
    w = iter(weights)
    windows = np.lib.stride_tricks.sliding_window_view(given["input"], (3, 3), axis=(2, 3))[:, :, ::2, ::2]
    x = _batch_norm(np.einsum("nchwij,ocij->nohw", windows, next(w)), w)
    history: list[Array] = [x, x]
    cells = [(_REDUCTION, config.filters // 4), (_REDUCTION, config.filters // 2)]
    for stack, scale in enumerate((1, 2, 4)):
        cells += [(_REDUCTION, scale * config.filters)] * bool(stack)
        cells += [(_NORMAL, scale * config.filters)] * config.cells
    for number, ((operations, taken, kept), filters) in enumerate(cells):
        before, x = history[-2:]
        if number and before.shape[2] != x.shape[2]:
            before = np.maximum(before, 0)
            shifted = np.pad(before, ((0, 0), (0, 0), (0, 1), (0, 1)))[:, :, 1:, 1:]
            halves = [_convolved(part[:, :, ::2, ::2], w) for part in (before, shifted)]
            before = _batch_norm(np.concatenate(halves, axis=1), w)
        elif number and before.shape[1] != filters:
            before = _batch_norm(_convolved(np.maximum(before, 0), w), w)
        states = [_batch_norm(_convolved(np.maximum(x, 0), w), w), before]
        for pair in range(5):
            both = []
            for at in (2 * pair, 2 * pair + 1):
                stride = 2 if operations is _REDUCTION[0] and taken[at] < 2 else 1
                both.append(_operation(operations[at], states[taken[at]], filters, stride, w))
            states.append(both[0] + both[1])
        history.append(np.concatenate([s for s, used in zip(states, kept, strict=True) if not used], axis=1))
    weight, bias = w
    return {"output": np.maximum(history[-1], 0).mean((2, 3)) @ weight.T + bias}


REFERENCES: dict[str, Callable[[Given, Sequence[Array]], dict[str, Array]]] = {
    "amoebanet": evolved_classifier,
    "rnnlm": language_model,
    "gnmt": translation,
    "transformer-xl": relative_transformer,
}
