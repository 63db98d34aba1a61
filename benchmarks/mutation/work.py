"""What workers do for a campaign of mutants: they say which there are of a network, and try one.

A network is compiled once by each worker that is asked for it, and kept for the next job on it, with what runs its
mutants.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import onnx

import souffle
from souffle import models
from souffle.mutation.mutants import Mutation, Mutations
from souffle.mutation.sandbox import OTHER_BITS, Sandbox
from souffle.mutation.trial import Trials, inputs_of
from souffle.pipeline import compile_cuda
from souffle.verify import REFUTED

__all__ = ["sampled", "tried"]

_KEPT = 4
"""Networks that a worker has at a time: jobs of one come after those of another, and some of both are under way."""

Payload = Mapping[str, Any]
Shared = Mapping[str, bytes]


class _Network:
    """A compiled network, its mutations, and what runs them once one is to be tried."""

    def __init__(self, network: Mapping[str, Any], model: bytes) -> None:
        self._model = onnx.ModelProto.FromString(model)
        self._seed = network["seed"]
        compiled = compile_cuda(souffle.import_onnx(self._model), **network["options"], cubin=False)
        self.mutations = Mutations(compiled, thorough=network["thorough"])
        self._sandbox: Sandbox | None = None

    @cached_property
    def trials(self) -> Trials:
        inputs = inputs_of(self.mutations.compiled.plan, models.random_inputs(self._model, seed=self._seed))
        self._sandbox = Sandbox()
        return Trials(self.mutations, inputs, self._sandbox)

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close(at_once=True)


_networks: OrderedDict[str, _Network] = OrderedDict()


def _network(payload: Payload, shared: Shared) -> _Network:
    network = payload["network"]
    key = json.dumps(network, sort_keys=True)
    if key in _networks:
        _networks.move_to_end(key)
    else:
        while len(_networks) >= _KEPT:
            _networks.popitem(last=False)[1].close()
        _networks[key] = _Network(network, shared[network["model"]])
    return _networks[key]


def sampled(payload: Payload, shared: Shared) -> dict[str, Any]:
    """Some mutations of a network.

    Parameters
    ----------
    payload : mapping
        ``network``: ``model``, the key of an ONNX model; ``options`` of the compiler; ``thorough``; ``seed``, of the
        inputs. ``count``, ``seed`` and ``kinds`` of the sample (:meth:`souffle.mutation.mutants.Mutations.sample`).
    shared : mapping
        The model.

    Returns
    -------
    dict
        ``possible``, how many there are in all; ``mutations``, those of the sample as dictionaries.
    """
    mutations = _network(payload, shared).mutations
    found = mutations.sample(payload["count"], payload["seed"], payload["kinds"])
    return {"possible": len(mutations), "mutations": [asdict(mutation) for mutation in found]}


def tried(payload: Payload, shared: Shared) -> dict[str, Any]:
    """What is said of a mutant: a :class:`souffle.mutation.trial.Trial` as a dictionary.

    Parameters
    ----------
    payload : mapping
        ``network``, as for :func:`sampled`; ``mutation``, one of those; ``refuted``, whether those that the certificate
        refutes are run, too.
    shared : mapping
        The model.
    """
    trials = _network(payload, shared).trials
    trial = trials.run(Mutation(**payload["mutation"]), refuted=payload["refuted"])
    if trial.verdict == REFUTED and trial.outcome == OTHER_BITS:
        # Which they are differs from run to run where a thread reads outside of an array of its own.
        trial = replace(trial, detail=trial.detail.partition(":")[0])
    return asdict(trial)
