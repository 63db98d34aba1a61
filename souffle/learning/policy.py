"""The policy network: a graph network, attention over the vertices, and logits of priorities (002 §3, Figure 3)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv

from souffle.learning.attention import TransformerLayer
from souffle.learning.problem import GraphFeatures, PolicyError

__all__ = ["Policy", "PolicyConfig"]

# A file says how large its policy is, and a foreign one could ask for all memory there is. No policy of use is near.
_BOUNDS = {
    "features": (1, 1024),
    "width": (2, 256),
    "graph_layers": (0, 8),
    "attention_layers": (0, 8),
    "heads": (1, 16),
    "segment": (2, 1024),
    "memory": (0, 1024),
    "levels": (2, 1024),
}


@dataclass(frozen=True)
class PolicyConfig:
    """The size of a policy.

    Attributes
    ----------
    features : int
        Of a vertex.
    width : int
        Of hidden states. With the defaults a policy has 144,000 parameters, a file of 580 kB.
    graph_layers : int
        Steps along edges that a vertex sees.
    attention_layers : int
    heads : int
        A divisor of `width`.
    segment : int
        Vertices of a segment, which all see each other.
    memory : int
        Vertices before a segment that it sees too.
    levels : int
        Priorities: "the number of priority levels is fixed" (002 §3).

    Raises
    ------
    PolicyError
        If a number is no int or out of bounds.
    """

    features: int
    width: int = 64
    graph_layers: int = 4
    attention_layers: int = 2
    heads: int = 4
    segment: int = 128
    memory: int = 128
    levels: int = 16

    def __post_init__(self) -> None:
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise PolicyError(f"{name} of a policy is {value!r}, and should be an int from {least} to {most}")
        if self.width % self.heads:
            raise PolicyError(f"width {self.width} of a policy is no multiple of its heads, {self.heads}")

    @classmethod
    def of(cls, values: object) -> PolicyConfig:
        """From what :meth:`as_json` gave and a file held.

        Raises
        ------
        PolicyError
            If it is something else.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or set(values) != names:
            raise PolicyError(f"the configuration of a policy should have {', '.join(sorted(names))}")
        return cls(**values)

    def as_json(self) -> dict[str, int]:
        """As a dictionary of ints."""
        return asdict(self)


class _GraphLayer(nn.Module):
    """What the producers and the consumers of a vertex are, added to the vertex.

    Producers and consumers have convolutions of their own: to be fused with what comes before is another thing than
    with what comes after. GraphSAGE because its mean does not grow with the number of consumers, and because it was
    made for graphs that are not seen in training. It knows no weights of edges. So the message of an edge is made
    first, from the vertex at its other end and the weight, and the edges are the convolution's sources. A weight that
    scales messages, as in ``GraphConv``, would silence the small tensors instead of telling that they are small.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.weight = nn.Linear(1, width, bias=False)
        self.producers = SAGEConv((width, width), width)
        self.consumers = SAGEConv((width, width), width, root_weight=False)
        self.out = nn.Linear(width, width)

    def forward(self, hidden: Tensor, edges: Tensor, weights: Tensor) -> Tensor:
        """Hidden states (n, width), edges (2, E) and their weights (E,) to hidden states."""
        normal = self.norm(hidden)
        passed = self.weight(weights[:, None])
        number = torch.arange(edges.shape[1])
        both = self.producers((normal[edges[0]] + passed, normal), torch.stack([number, edges[1]]))
        size = (edges.shape[1], len(hidden))
        both = both + self.consumers((normal[edges[1]] + passed, normal), torch.stack([number, edges[0]]), size)
        return hidden + self.out(nn.functional.gelu(both))


class Policy(nn.Module):
    """Gives every vertex of a graph a distribution over priorities; it draws nothing itself.

    Parameters
    ----------
    config : PolicyConfig
    seed : int
        Of the first parameters. PyTorch's own generator is left as it was.
    """

    def __init__(self, config: PolicyConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.enter = nn.Linear(config.features, config.width)
            self.graph = nn.ModuleList(_GraphLayer(config.width) for _ in range(config.graph_layers))
            size = (config.width, config.heads, config.segment, config.memory)
            self.attention = nn.ModuleList(TransformerLayer(*size) for _ in range(config.attention_layers))
            self.norm = nn.LayerNorm(config.width)
            self.head = nn.Linear(config.width, config.levels)
            # All priorities are about equally likely before training: nothing is ruled out that was never tried.
            with torch.no_grad():
                self.head.weight *= 0.01
                self.head.bias.zero_()

    def forward(self, features: GraphFeatures) -> Tensor:
        """Logits (n, levels) of the priorities of each vertex.

        Raises
        ------
        PolicyError
            If the vertices have another number of features than the policy knows.
        """
        found = features.nodes.shape[1]
        if found != self.config.features:
            raise PolicyError(
                f"the vertices of {features.name!r} have {found} features, and the policy knows "
                f"{self.config.features}; train one for these features"
            )
        hidden = self.enter(_tensor(features.nodes))
        edges, weights = _tensor(features.edges), _tensor(features.edge_weights)
        for layer in self.graph:
            hidden = layer(hidden, edges, weights)
        for layer in self.attention:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))
