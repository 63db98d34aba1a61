"""Networks of today as ONNX files, for the host target: ``python -m benchmarks.host_networks -o FOLDER [NAME ...]``.

Exported by PyTorch from torchvision's and transformers' modules and two of our own, with weights drawn by seed. Needs
``torch``, ``torchvision``, ``transformers`` and ``onnxscript``; what is made of the files needs none of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
import torchvision
import transformers
from torch import nn

_TOKENS, _QUESTION = 128, 384
"""Of GPT-2's block, and of BERT, which reads a question and a text."""
_TABLES, _ROWS, _FEATURES, _WIDTH = 26, 10_000, 13, 64
"""DLRM: embedding tables, their rows, dense features, and the width of an embedding."""
_PATCHES, _CHANNELS, _BLOCKS = 196, 512, 8
"""MLP-Mixer S/16: patches of an image of 224 x 224, channels, and blocks."""

_Built = tuple[nn.Module, tuple[torch.Tensor, ...]]


def _of_torchvision(name: str) -> Callable[[int], _Built]:
    return lambda batch: (torchvision.models.get_model(name, weights=None), (torch.randn(batch, 3, 224, 224),))


def _vit(batch: int) -> _Built:
    module, inputs = _of_torchvision("vit_b_16")(batch)
    nn.init.normal_(module.heads.head.weight, std=0.02)  # zero before training, and so would be all that is compared
    return module, inputs


class _Gpt2Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = transformers.GPT2Config(use_cache=False, attn_implementation="eager")
        self.block = transformers.models.gpt2.modeling_gpt2.GPT2Block(config, layer_idx=0)
        self.register_buffer("mask", torch.full((_TOKENS, _TOKENS), -1e9).triu(1)[None, None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.block(x, attention_mask=self.mask)
        return found[0] if isinstance(found, tuple) else found


class _Bert(nn.Module):
    """The encoder of BERT base, from embeddings to the last hidden state."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.BertConfig(attn_implementation="eager")
        self.encoder = transformers.BertModel(config, add_pooling_layer=False).encoder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)[0]


class _Dlrm(nn.Module):
    """DLRM (Naumov et al., 2019): embeddings and dense features, their pairwise dot products, and two perceptrons."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(_ROWS, _WIDTH) for _ in range(_TABLES))
        self.bottom = _perceptron(_FEATURES, 512, 256, _WIDTH)
        pairs = (_TABLES + 1) * _TABLES // 2
        self.top = _perceptron(pairs + _WIDTH, 512, 256, 1)
        rows, columns = torch.tril_indices(_TABLES + 1, _TABLES + 1, -1)
        self.register_buffer("positions", rows * (_TABLES + 1) + columns)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        vectors = torch.stack([x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return torch.sigmoid(self.top(torch.cat([x, products[:, self.positions]], 1)))


def _perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class _MixerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(_CHANNELS), nn.LayerNorm(_CHANNELS)
        self.tokens = nn.Sequential(nn.Linear(_PATCHES, _CHANNELS // 2), nn.GELU(), nn.Linear(_CHANNELS // 2, _PATCHES))
        self.channels = nn.Sequential(nn.Linear(_CHANNELS, 2048), nn.GELU(), nn.Linear(2048, _CHANNELS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.before(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.between(x))


class _Mixer(nn.Module):
    """MLP-Mixer S/16 (Tolstikhin et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, _CHANNELS, 16, 16)
        self.blocks = nn.Sequential(*(_MixerBlock() for _ in range(_BLOCKS)))
        self.norm, self.head = nn.LayerNorm(_CHANNELS), nn.Linear(_CHANNELS, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.stem(x).flatten(2).transpose(1, 2))).mean(1))


class _Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(256, 512, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


def _sparse(batch: int) -> torch.Tensor:
    return torch.randint(0, _ROWS, (batch, _TABLES))


_NETWORKS: dict[str, Callable[[int], _Built]] = {
    "resnet18": _of_torchvision("resnet18"),
    "mobilenet_v3_small": _of_torchvision("mobilenet_v3_small"),
    "vit_b_16": _vit,
    "bert_base": lambda batch: (_Bert(), (torch.randn(batch, _QUESTION, 768),)),
    "gpt2_block": lambda batch: (_Gpt2Block(), (torch.randn(batch, _TOKENS, 768),)),
    "lstm2": lambda batch: (_Lstm(), (torch.randn(batch, 64, 256),)),
    "dlrm": lambda batch: (_Dlrm(), (torch.randn(batch, _FEATURES), _sparse(batch))),
    "mixer": lambda batch: (_Mixer(), (torch.randn(batch, 3, 224, 224),)),
}
_OF_FLOAT16 = {"bert_base": (True,), "resnet18": (False, True)}
"""Those that are made of float16: BERT alone so, since that of float32 is among the paper's models."""


def main() -> int:
    """Write the files that are not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(_NETWORKS), metavar="NAME", help=", ".join(_NETWORKS))
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="FOLDER")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4])
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in arguments.names:
        for batch in arguments.batches:
            for half in _OF_FLOAT16.get(name, (False,)):
                path = arguments.output / f"{name}{'_fp16' if half else ''}_b{batch}.onnx"
                if not path.exists():
                    print(f"{path} ...", file=sys.stderr, flush=True)
                    _write(name, batch, half, path)
    return 0


def _write(name: str, batch: int, half: bool, path: Path) -> None:
    torch.manual_seed(0)
    module, inputs = _NETWORKS[name](batch)
    module.eval()
    if half:
        module, inputs = module.half(), tuple(x.half() if x.is_floating_point() else x for x in inputs)
    torch.onnx.export(module, inputs, dynamo=True).save(str(path), external_data=False)


if __name__ == "__main__":
    sys.exit(main())
