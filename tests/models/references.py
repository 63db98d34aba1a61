"""The workloads of FusionStitching's papers in NumPy and float64, written from their definitions.

Each function gets a model's inputs by name and its initializers in the order of the file, and gives its outputs by
name. Nothing of the builders is used but their sizes, and gradients are central differences of losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from souffle.models import asr, perceptron, transformer, word2vec

__all__ = ["LOSSES", "REFERENCES", "numeric_gradient"]

Array = np.ndarray
Given = Mapping[str, Array]


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def log_softmax(x: Array) -> Array:
    return np.log(softmax(x))


def normalized(x: Array, scale: Array, shift: Array, epsilon: float) -> Array:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon) * scale + shift


def numeric_gradient(loss: Callable[[Given], float], given: Given, name: str) -> Array:
    """Central differences of `loss` with respect to one of its inputs."""
    gradient = np.zeros_like(given[name])
    for at in np.ndindex(gradient.shape):
        sides = []
        for step in (1e-6, -1e-6):
            moved = given[name].copy()
            moved[at] += step
            sides.append(loss({**given, name: moved}))
        gradient[at] = (sides[0] - sides[1]) / 2e-6
    return gradient


def layer_norm(given: Given, weights: Sequence[Array]) -> dict[str, Array]:
    return {"output": normalized(given["input"], *weights, 1e-12)}


def multi_interests(given: Given, weights: Sequence[Array]) -> dict[str, Array]:
    scores = np.einsum("bik,bkj->bij", given["query"], given["key"]) / np.sqrt(given["query"].shape[-1]) + weights[0]
    attended = np.einsum("bij,bjk->bik", softmax(scores), given["value"])
    partition = np.log(np.exp(scores).sum(-1, keepdims=True))
    likelihood = np.log((attended * given["target"]).sum(-1, keepdims=True)) - partition
    return {"divide": attended, "log_1": partition, "multiply_2": attended * given["target"], "subtract": likelihood}


def logistic(given: Given, weights: Sequence[Array]) -> dict[str, Array]:
    return {"output": softmax(given["input"] @ weights[0] + weights[1])}


def logistic_loss(given: Given) -> float:
    probability = softmax(given["input"] @ given["weight"] + given["bias"])
    return float(-np.log(probability[given["label"] == 1]).mean())


def logistic_step(given: Given, _: Sequence[Array]) -> dict[str, Array]:
    rate = perceptron.LOGISTIC_SIZES["tiny"].rate
    return _descended(logistic_loss, given, ("weight", "bias"), rate)


def _descended(loss: Callable[[Given], float], given: Given, names: Sequence[str], rate: float) -> dict[str, Array]:
    new = {f"{name}_new": given[name] - rate * numeric_gradient(loss, given, name) for name in names}
    return {"loss": np.array(loss(given)), **new}


LAYERS = ("hidden_1", "hidden_2", "out")


def _perceptron_logs(x: Array, layers: Sequence[tuple[Array, Array]]) -> Array:
    for k, (weight, bias) in enumerate(layers):
        x = x @ weight + bias
        x = np.where((x < 0) & (k < len(layers) - 1), 0.0, x)
    return log_softmax(x)


def perceptron_forward(given: Given, weights: Sequence[Array]) -> dict[str, Array]:
    layers = list(zip(weights[::2], weights[1::2], strict=True))
    return {"output": np.exp(_perceptron_logs(given["input"], layers))}


def perceptron_loss(given: Given) -> float:
    logs = _perceptron_logs(given["input"], [(given[f"{name}.weight"], given[f"{name}.bias"]) for name in LAYERS])
    return float(-logs[given["label"] == 1].mean())


def perceptron_step(given: Given, _: Sequence[Array]) -> dict[str, Array]:
    """Adam as its paper's algorithm 1 has it, with the bias corrections on the moments; there epsilon is scaled."""
    rate = perceptron.PERCEPTRON_SIZES["tiny"].rate
    power1, power2 = given["beta1_power"], given["beta2_power"]
    result = {
        "loss": np.array(perceptron_loss(given)),
        "beta1_power_new": power1 * 0.9,
        "beta2_power_new": power2 * 0.999,
    }
    for name in (f"{layer}.{part}" for layer in LAYERS for part in ("weight", "bias")):
        gradient = numeric_gradient(perceptron_loss, given, name)
        m = 0.9 * given[f"{name}_m"] + 0.1 * gradient
        v = 0.999 * given[f"{name}_v"] + 0.001 * gradient**2
        corrected = (m / (1 - power1)) / (np.sqrt(v / (1 - power2)) + 1e-8 / np.sqrt(1 - power2))
        result |= {f"{name}_new": given[name] - rate * corrected, f"{name}_m_new": m, f"{name}_v_new": v}
    return result


def word2vec_forward(given: Given, _: Sequence[Array]) -> dict[str, Array]:
    table = given["embedding"]
    asked = table[given["words"]]
    return {"output": asked / np.linalg.norm(asked) @ (table / np.linalg.norm(table, axis=1, keepdims=True)).T}


def word2vec_loss(given: Given) -> float:
    words = len(given["nce_bias"])
    samples = given["samples"]

    def logit(row: Array, word: int) -> float:
        expected = len(samples) * np.log((word + 2) / (word + 1)) / np.log(words + 1)
        return row @ given["nce_weight"][word] + given["nce_bias"][word] - np.log(expected)

    total = 0.0
    for word, context in zip(given["words"], given["contexts"], strict=True):
        row = given["embedding"][word]
        total -= np.log(sigmoid(logit(row, context)))
        total -= sum(np.log(sigmoid(-logit(row, sample))) for sample in samples)
    return float(total / len(given["words"]))


def word2vec_step(given: Given, _: Sequence[Array]) -> dict[str, Array]:
    names = ("embedding", "nce_weight", "nce_bias")
    return _descended(word2vec_loss, given, names, word2vec.SIZES["tiny"].rate)


def var_encoder(given: Given, weights: Sequence[Array]) -> dict[str, Array]:
    w1, b1, w_mean, b_mean, w_std, b_std, w2, b2, w3, b3 = weights
    x = given["input"]
    hidden = np.tanh(x @ w1 + b1)
    mean, spread = hidden @ w_mean + b_mean, hidden @ w_std + b_std
    result = sigmoid(np.tanh((mean + np.sqrt(np.exp(spread)) * given["noise"]) @ w2 + b2) @ w3 + b3)
    rebuilt = -(x * np.log(result) + (1 - x) * np.log(1 - result)).sum(1)
    divergence = 0.5 * (mean**2 + np.exp(spread) - 1 - spread).sum(1)
    return {"output": result, "loss": np.array((rebuilt + divergence).mean())}


def _lstm(x: Array, weights: Sequence[Array], lengths: Sequence[int] | None = None) -> Array:
    """Y of ONNX's LSTM, (steps, directions, batch, hidden); each sequence goes alone."""
    steps, batch, _ = x.shape
    w, r, bias = weights
    hidden = r.shape[-1]
    y = np.zeros((steps, len(w), batch, hidden))
    for direction in range(len(w)):
        both = bias[direction, : 4 * hidden] + bias[direction, 4 * hidden :]
        for one in range(batch):
            h = c = np.zeros(hidden)
            length = steps if lengths is None else lengths[one]
            for t in range(length) if direction == 0 else range(length)[::-1]:
                i, o, f, g = np.split(w[direction] @ x[t, one] + r[direction] @ h + both, 4)
                c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
                h = sigmoid(o) * np.tanh(c)
                y[t, direction, one] = h
    return y


def bi_rnn(given: Given, weights: Sequence[Array]) -> dict[str, Array]:
    y = _lstm(given["input"].transpose(1, 0, 2), weights[:3])
    return {"output": np.concatenate([y[-1, 0], y[-1, 1]], axis=1) @ weights[3] + weights[4]}


def dyn_rnn(given: Given, weights: Sequence[Array]) -> dict[str, Array]:
    lengths = given["lengths"]
    y = _lstm(given["input"].transpose(1, 0, 2), weights[:3], lengths)
    last = np.stack([y[length - 1, 0, one] for one, length in enumerate(lengths)])
    return {"output": last @ weights[-2] + weights[-1]}


def _convolved(x: Array, weight: Array, bias: Array, stride: int, pad: int) -> Array:
    kernel = weight.shape[-1]
    padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (kernel, kernel), axis=(2, 3))[:, :, ::stride, ::stride]
    return np.einsum("nchwij,ocij->nohw", windows, weight) + bias[:, None, None]


def _pooled(x: Array, stride: tuple[int, int], pad: int) -> Array:
    padded = np.pad(x, ((0, 0), (0, 0), (0, 0), (pad, pad)), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (2, 2), axis=(2, 3))
    return windows[:, :, :: stride[0], :: stride[1]].max((-1, -2))


def crnn(given: Given, weights: Sequence[Array]) -> dict[str, Array]:
    w = iter(weights)
    x = given["input"]
    pools = {0: ((2, 2), 0), 1: ((2, 2), 0), 3: ((2, 1), 1), 5: ((2, 1), 1)}
    for layer in range(7):
        x = np.maximum(_convolved(x, next(w), next(w), 1, int(layer < 6)), 0)
        if layer in pools:
            x = _pooled(x, *pools[layer])
    assert x.shape[2] == 1
    x = x[:, :, 0].transpose(2, 0, 1)
    for _ in range(2):
        y = _lstm(x, [next(w) for _ in range(3)])
        x = np.concatenate([y[:, 0], y[:, 1]], axis=-1) @ next(w) + next(w)
    return {"output": log_softmax(x)}


def nmt(given: Given, weights: Sequence[Array]) -> dict[str, Array]:
    table, w_query, b_query, v, w_gates, b_gates, w_new, b_new, w_pairs, b_pairs, w_out, b_out = weights
    state, outputs = given["state"], {"output": [], "state_new": [], "alignment": []}
    for one, word in enumerate(table[given["words"]]):
        h = state[one]
        energies = [v[:, 0] @ np.tanh(h @ w_query + b_query + key) for key in given["keys"][one]]
        weight = softmax(np.array(energies))
        context = weight @ given["annotations"][one]
        r, z = np.split(sigmoid(w_gates @ np.concatenate([word, context, h]) + b_gates), 2)
        new = np.tanh(w_new @ np.concatenate([word, context, r * h]) + b_new)
        pairs = w_pairs @ np.concatenate([h, word, context]) + b_pairs
        outputs["output"].append(log_softmax(w_out @ np.maximum(pairs[::2], pairs[1::2]) + b_out))
        outputs["state_new"].append((1 - z) * h + z * new)
        outputs["alignment"].append(weight)
    return {name: np.stack(rows) for name, rows in outputs.items()}


def _attended(x: Array, memory: Array, w: Iterator[Array], heads: int, causal: bool = False) -> Array:
    q, k, v = (source @ next(w) + next(w) for source in (x, memory, memory))
    width = x.shape[-1] // heads
    result = np.zeros_like(x)
    for one, head, at in np.ndindex(len(x), heads, x.shape[1]):
        part = slice(head * width, (head + 1) * width)
        reach = at + 1 if causal else memory.shape[1]
        scores = k[one, :reach, part] @ q[one, at, part] / np.sqrt(width)
        result[one, at, part] = softmax(scores) @ v[one, :reach, part]
    return result @ next(w) + next(w)


def _fed(x: Array, w: Iterator[Array]) -> Array:
    return np.maximum(x @ next(w) + next(w), 0) @ next(w) + next(w)


def transformer_stacks(given: Given, weights: Sequence[Array]) -> dict[str, Array]:
    config = transformer.SIZES["tiny"]
    w = iter(weights)
    memory, x = given["source"], given["target"]
    for _ in range(config.layers):
        memory = normalized(memory + _attended(memory, memory, w, config.heads), next(w), next(w), 1e-6)
        memory = normalized(memory + _fed(memory, w), next(w), next(w), 1e-6)
    next(w)  # the mask
    for _ in range(config.layers):
        x = normalized(x + _attended(x, x, w, config.heads, causal=True), next(w), next(w), 1e-6)
        x = normalized(x + _attended(x, memory, w, config.heads), next(w), next(w), 1e-6)
        x = normalized(x + _fed(x, w), next(w), next(w), 1e-6)
    return {"output": x}


def speech(given: Given, weights: Sequence[Array]) -> dict[str, Array]:
    config = asr.SIZES["tiny"]
    w = iter(weights)
    x = given["input"]
    for _ in range(2):
        x = np.maximum(_convolved(x, next(w), next(w), 2, 0), 0)
    x = np.stack([[x[n, :, t].reshape(-1) for t in range(x.shape[2])] for n in range(len(x))])
    x = (x @ next(w) + next(w)) * np.sqrt(config.hidden)
    next(w)  # the places
    for t, channel in np.ndindex(x.shape[1:]):
        angle = t / 10000 ** ((channel - channel % 2) / config.hidden)
        x[:, t, channel] += np.cos(angle) if channel % 2 else np.sin(angle)
    for _ in range(config.layers):
        y = normalized(x, next(w), next(w), 1e-12)
        x = x + _attended(y, y, w, config.heads)
        x = x + _fed(normalized(x, next(w), next(w), 1e-12), w)
    x = normalized(x, next(w), next(w), 1e-12)
    return {"output": log_softmax(x @ next(w) + next(w))}


def dien(given: Given, weights: Sequence[Array]) -> dict[str, Array]:
    users, goods, categories, gru_w, gru_r, gru_b = weights[:6]
    w = iter(weights[6:])
    w_query, b_query, slope, w1, b1, w2, b2, w3, b3 = (next(w) for _ in range(9))
    next(w)  # the places
    w_gates, b_gates, w_new, b_new = (next(w) for _ in range(4))
    next(w), next(w)  # how gates are split, and the first state
    rows = []
    for one, length in enumerate(given["lengths"]):
        item = np.concatenate([goods[given["good"][one]], categories[given["category"][one]]])
        done = np.concatenate([goods[given["goods"][one]], categories[given["categories"][one]]], axis=1)
        width = len(item)
        h, states = np.zeros(width), []
        from_x, from_h = np.split(gru_b[0], 2)
        for x in done[:length]:
            z, r = (
                sigmoid(gru_w[0][k] @ x + gru_r[0][k] @ h + from_x[k] + from_h[k])
                for k in (slice(0, width), slice(width, 2 * width))
            )
            k = slice(2 * width, None)
            h = z * h + (1 - z) * np.tanh(gru_w[0][k] @ x + gru_r[0][k] @ (r * h) + from_x[k] + from_h[k])
            states.append(h)
        query = w_query @ item + b_query
        query = np.where(query > 0, query, slope * query)
        facts = [np.concatenate([query, s, query - s, query * s]) for s in states]
        scores = [sigmoid(sigmoid(fact @ w1 + b1) @ w2 + b2) @ w3 + b3 for fact in facts]
        h = np.zeros(width)
        for state, weight in zip(states, softmax(np.array(scores)[:, 0]), strict=True):
            r, u = np.split(sigmoid(np.concatenate([state, h]) @ w_gates + b_gates), 2)
            new = np.tanh(np.concatenate([state, r * h]) @ w_new + b_new)
            u = (1 - weight) * u
            h = u * h + (1 - u) * new
        rows.append(np.concatenate([users[given["user"][one]], item, h, done.sum(0)]))
    x = np.stack(rows) * next(w) + next(w)
    for _ in range(2):
        x = x @ next(w).T + next(w)
        on = sigmoid((x - x.mean(0)) / x.std(0))
        x = on * x + next(w) * (1 - on) * x
    return {"output": softmax(x @ next(w).T + next(w)) + 1e-8}


REFERENCES: dict[str, Callable[[Given, Sequence[Array]], dict[str, Array]]] = {
    "layer-norm": layer_norm,
    "multi-interests": multi_interests,
    "logistic": logistic,
    "logistic-train": logistic_step,
    "perceptron": perceptron_forward,
    "perceptron-train": perceptron_step,
    "word2vec": word2vec_forward,
    "word2vec-train": word2vec_step,
    "var-encoder": var_encoder,
    "bi-rnn": bi_rnn,
    "dyn-rnn": dyn_rnn,
    "crnn": crnn,
    "nmt": nmt,
    "transformer": transformer_stacks,
    "dien": dien,
    "asr": speech,
}

LOSSES: dict[str, Callable[[Given], float]] = {
    "logistic-train": logistic_loss,
    "perceptron-train": perceptron_loss,
    "word2vec-train": word2vec_loss,
}
