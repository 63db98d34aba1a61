"""``TfIdfVectorizer`` of numbers: how often each n-gram of a list occurs, one TE for each length of n-grams."""

from __future__ import annotations

import numpy as np
import onnx
from tvm import te, tirx

from souffle.frontend.attributes import attribute
from souffle.frontend.custom import NodeOperands, check_length, defines
from souffle.frontend.refusal import Obstacle
from souffle.tvm_compat import PrimExpr

__all__: list[str] = []


@defines("TfIdfVectorizer")
def _vectorize(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor]:
    if attribute(node, "pool_strings"):
        raise Obstacle(
            "its n-grams are of text (attribute pool_strings)", "encode text as numbers outside of the network"
        )
    shape, mode = operands.shape(0), attribute(node, "mode").decode()
    if len(shape) not in (1, 2) or mode not in ("TF", "IDF", "TFIDF"):
        raise Obstacle(
            f"its input is {list(shape)} and its mode {mode}", "give it one or two axes, and TF, IDF or TFIDF"
        )
    places = list(attribute(node, "ngram_indexes"))
    width = max(places) + 1
    weights = np.asarray(attribute(node, "weights", [1.0] * len(places)), "float32")
    if len(weights) != len(places) or len(set(places)) != len(places) or min(places) < 0:
        raise Obstacle(
            f"its {len(places)} n-grams have {len(weights)} weights and the places {places[:8]}",
            "give each n-gram a weight and a place of its own, from 0 on",
        )
    check_length(width)
    batch, length = shape[:-1], shape[-1]
    counts = [
        _counted(operands, batch, length, grams, places[first : first + len(grams)], width, node)
        for first, grams in _grams(node)
        if len(grams) and length
    ]
    # By n-gram, as the standard and ONNX Runtime have it; ONNX's reference takes them to be of the result's elements.
    by_place = np.ones(width, "float32")
    by_place[places] = weights
    table, zero, one = operands.table(by_place), tirx.const(0.0, "float32"), tirx.const(1.0, "float32")

    def element(*at: PrimExpr) -> PrimExpr:
        count = sum((tirx.Cast("float32", counted(*at)) for counted in counts), zero)
        if mode == "IDF":
            return tirx.Select(count > zero, one, zero) * table(at[-1])
        return count * table(at[-1]) if mode == "TFIDF" else count

    return [te.compute((*batch, width), element, name="vectors")]


def _grams(node: onnx.NodeProto) -> list[tuple[int, np.ndarray]]:
    """The n-grams of each length that counts: the number of the first, and one row for each."""
    pool, starts = list(attribute(node, "pool_int64s", [])), list(attribute(node, "ngram_counts"))
    least, most = attribute(node, "min_gram_length"), attribute(node, "max_gram_length")
    found, first = [], 0
    for size, (start, end) in enumerate(zip(starts, [*starts[1:], len(pool)], strict=True), 1):
        items = pool[start:end]
        grams = np.array(items[: len(items) // size * size], "int64").reshape(-1, size)
        if least <= size <= most:
            found.append((first, grams))
        first += len(grams)
    return found


def _counted(
    operands: NodeOperands,
    batch: tuple[int, ...],
    length: int,
    grams: np.ndarray,
    places: list[int],
    width: int,
    node: onnx.NodeProto,
) -> te.Tensor:
    """How often the n-grams of one length occur, by the element of the result that counts them.

    Skips are between all elements of an n-gram alike, and a single element has none.
    """
    data, size = operands.tensor(0), grams.shape[1]
    skips = 1 if size == 1 else attribute(node, "max_skip_count") + 1
    numbers = operands.table(grams)
    limit = tirx.const(length, "int32")

    def occurs(*at: PrimExpr) -> PrimExpr:
        r, skip = te.reduce_axis((0, length), name="start"), te.reduce_axis((0, skips), name="skip")
        same: PrimExpr = r + (size - 1) * (skip + 1) < limit
        for k in range(size):
            item = data(*at[:-1], tirx.min(r + k * (skip + 1), limit - 1))
            item = item if operands.dtype(0) == "int64" else tirx.Cast("int64", item)
            same = tirx.And(same, item == numbers(at[-1], k))
        return te.sum(tirx.Select(same, tirx.const(1, "int32"), tirx.const(0, "int32")), axis=[r, skip])

    each = te.compute((*batch, len(grams)), occurs, name=f"grams{size}")
    counters = operands.table(np.array(places, "int32"))

    def gathered(*at: PrimExpr) -> PrimExpr:
        g = te.reduce_axis((0, len(grams)), name="g")
        return te.sum(tirx.Select(counters(g) == at[-1], each(*at[:-1], g), tirx.const(0, "int32")), axis=g)

    return te.compute((*batch, width), gathered, name=f"counts{size}")
