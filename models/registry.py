"""All models by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

from onnx import ModelProto

from souffle.errors import OptionError
from souffle.models import (
    amoebanet,
    asr,
    bert,
    crnn,
    dien,
    efficientnet,
    gnmt,
    lstm,
    mmoe,
    nmt,
    patterns,
    perceptron,
    recurrent,
    resnext,
    rnnlm,
    swin,
    transformer,
    transformer_xl,
    variational,
    word2vec,
)

__all__ = ["ALL_NAMES", "LEARNING_NAMES", "MODEL_SIZES", "NAMES", "SE_NAMES", "STITCHING_NAMES", "build"]

_BUILDERS: dict[str, tuple[Callable[..., ModelProto], dict]] = {
    "bert": (bert.build_bert, bert.SIZES),
    "resnext": (resnext.build_resnext, resnext.SIZES),
    "lstm": (lstm.build_lstm, lstm.SIZES),
    "efficientnet": (efficientnet.build_efficientnet, efficientnet.SIZES),
    "swin": (swin.build_swin, swin.SIZES),
    "mmoe": (mmoe.build_mmoe, mmoe.SIZES),
}
NAMES = tuple(_BUILDERS)

_BUILDERS["lstm-unrolled"] = (lstm.build_lstm_unrolled, lstm.SIZES)
for _index in range(len(efficientnet.SE_SIZES["paper"])):
    _sizes = {size: configs[_index] for size, configs in efficientnet.SE_SIZES.items()}
    _BUILDERS[f"se:M{_index}"] = (efficientnet.build_se, _sizes)

SE_NAMES = tuple(name for name in _BUILDERS if name.startswith("se:"))

_STITCHING: dict[str, tuple[Callable[..., ModelProto], dict]] = {
    "layer-norm": (patterns.build_layer_norm, patterns.LAYER_NORM_SIZES),
    "multi-interests": (patterns.build_multi_interests, patterns.INTERESTS_SIZES),
    "logistic": (perceptron.build_logistic, perceptron.LOGISTIC_SIZES),
    "logistic-train": (perceptron.build_logistic_step, perceptron.LOGISTIC_SIZES),
    "perceptron": (perceptron.build_perceptron, perceptron.PERCEPTRON_SIZES),
    "perceptron-train": (perceptron.build_perceptron_step, perceptron.PERCEPTRON_SIZES),
    "word2vec": (word2vec.build_word2vec, word2vec.SIZES),
    "word2vec-train": (word2vec.build_word2vec_step, word2vec.SIZES),
    "var-encoder": (variational.build_variational, variational.SIZES),
    "bi-rnn": (recurrent.build_bidirectional, recurrent.BIDIRECTIONAL_SIZES),
    "dyn-rnn": (recurrent.build_dynamic, recurrent.DYNAMIC_SIZES),
    "crnn": (crnn.build_crnn, crnn.SIZES),
    "nmt": (nmt.build_nmt, nmt.SIZES),
    "transformer": (transformer.build_transformer, transformer.SIZES),
    "dien": (dien.build_dien, dien.SIZES),
    "asr": (asr.build_asr, asr.SIZES),
}
STITCHING_NAMES = tuple(_STITCHING)
_BUILDERS.update(_STITCHING)

_LEARNING: dict[str, tuple[Callable[..., ModelProto], dict]] = {
    "amoebanet": (amoebanet.build_amoebanet, amoebanet.SIZES),
    "rnnlm": (rnnlm.build_rnnlm, rnnlm.SIZES),
    "gnmt": (gnmt.build_gnmt, gnmt.SIZES),
    "transformer-xl": (transformer_xl.build_transformer_xl, transformer_xl.SIZES),
}
LEARNING_NAMES = tuple(_LEARNING)
_BUILDERS.update(_LEARNING)

ALL_NAMES = tuple(_BUILDERS)
MODEL_SIZES = ("tiny", "paper")


def build(
    name: str,
    size: str = "tiny",
    *,
    steps: int | None = None,
    batch: int | None = None,
    seed: int = 0,
    open_dimensions: bool = False,
) -> ModelProto:
    """Build a model with random float32 weights and static shapes.

    Parameters
    ----------
    name
        One of ``NAMES`` (the six networks of the paper's Table 2), ``"lstm-unrolled"``, one of ``SE_NAMES`` (the
        squeeze-and-excitation modules of its Figure 6), one of ``STITCHING_NAMES`` (the workloads of the two papers on
        FusionStitching, but for BERT; ``-train`` is a step of training), or one of ``LEARNING_NAMES`` (the workloads of
        "Learning to Fuse").
    size
        ``"paper"`` for the configuration of the paper's evaluation, ``"tiny"`` for the same structure made small.
    steps
        Number of time steps, for the two LSTM models and ``"rnnlm"`` only.
    batch
        How many images, sequences or rows it takes at once, for the models that take several; without, as many as its
        paper says, which is 1 for Souffle's. Equal seeds give equal weights, whatever the batch.
    seed
        Seed of the weights. The same arguments give the same bytes.
    open_dimensions
        For ``"bert"`` only: batch and sequence are open, and there is an attention mask.

    Raises
    ------
    OptionError
        If an argument is not valid.
    """
    if name not in _BUILDERS:
        raise OptionError(f"no model is named {name!r}; there are {', '.join(ALL_NAMES)}")
    if size not in MODEL_SIZES:
        raise OptionError(f"model {name!r} has no size {size!r}; there are {', '.join(MODEL_SIZES)}")
    if seed < 0:
        raise OptionError(f"the seed is {seed}; it must not be negative")
    builder, sizes = _BUILDERS[name]
    config = sizes[size]
    if steps is not None:
        if not isinstance(config, lstm.LstmConfig | rnnlm.RnnlmConfig):
            raise OptionError(f"model {name!r} has no time steps; steps is for lstm, lstm-unrolled and rnnlm")
        if steps < 1:
            raise OptionError(f"{name} cannot have {steps} time steps; it needs 1 or more")
        config = replace(config, steps=steps)
    if batch is not None:
        if all(each.name != "batch" for each in fields(config)):
            raise OptionError(f"model {name!r} has no batch")
        if batch < 1:
            raise OptionError(f"{name} cannot have a batch of {batch}; it needs 1 or more")
        config = replace(config, batch=batch)
    if open_dimensions:
        if batch is not None:
            raise OptionError("open_dimensions leaves the batch open; give one or the other")
        if not isinstance(config, bert.BertConfig):
            raise OptionError(f"model {name!r} has static shapes alone; open_dimensions is for bert")
        config = replace(config, open_dimensions=True)
    return builder(config, seed)
