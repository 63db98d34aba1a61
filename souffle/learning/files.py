"""Policies as files: tensors in the format safetensors, and beside them what they are, as JSON.

Reading one runs no code of it, and takes no more memory than the file is long.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save
from torch import Tensor

from souffle.learning.policy import Policy, PolicyConfig
from souffle.learning.problem import PolicyError

__all__ = ["StoredPolicy", "fill_policy", "load_policy", "read_tensors", "save_policy", "write_tensors"]

FORMAT = 1
_MOST_BYTES = 256 << 20
"""Several times a checkpoint of the largest policy."""


@dataclass(frozen=True, eq=False)
class StoredPolicy:
    """What a file holds.

    Attributes
    ----------
    policy : Policy
    provenance : dict
        What :func:`save_policy` was given.
    """

    policy: Policy
    provenance: dict


def save_policy(path: str | Path, policy: Policy, provenance: Mapping[str, object]) -> None:
    """Write a policy, so that a reader finds the whole of it or what was there before.

    Parameters
    ----------
    path : path
    policy : Policy
    provenance : mapping
        Where the policy comes from, as JSON has it: :attr:`souffle.learning.training.Training.provenance` and more.

    Raises
    ------
    PolicyError
        If the file cannot be written.
    """
    values = {"policy": policy.config.as_json(), "provenance": dict(provenance)}
    write_tensors(Path(path), "policy", dict(policy.state_dict()), values)


def load_policy(path: str | Path, features: int | None = None) -> StoredPolicy:
    """Read a policy.

    Parameters
    ----------
    path : path
    features : int, optional
        How many features the vertices have that the policy is wanted for.

    Raises
    ------
    PolicyError
        If the file is missing, damaged, foreign or of another version, or the policy knows another number of features.
    """
    path = Path(path)
    tensors, values = read_tensors(path, "policy")
    provenance = values.get("provenance")
    if not isinstance(provenance, dict):
        raise _damaged(path, "it does not say where the policy comes from")
    try:
        config = PolicyConfig.of(values.get("policy"))
    except PolicyError as error:
        raise _damaged(path, str(error)) from error
    if features not in (None, config.features):
        raise PolicyError(
            f"{path}: the policy knows {config.features} features of a vertex, and {features} are given; "
            "it was trained by another version of Souffle: train one again"
        )
    return StoredPolicy(fill_policy(path, config, tensors), provenance)


def fill_policy(path: Path, config: PolicyConfig, tensors: Mapping[str, Tensor]) -> Policy:
    """A policy with parameters that a file holds.

    Raises
    ------
    PolicyError
        If they are not those of such a policy.
    """
    with torch.device("meta"):
        # Takes no memory: a small file may claim to be a large policy.
        expected = Policy(config).state_dict()
    if set(tensors) != set(expected):
        name = min(set(tensors) ^ set(expected))
        raise _damaged(path, f"the parameter {name} is {'missing' if name in expected else 'not one of its policy'}")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape or tensor.dtype != torch.float32:
            shape = tuple(expected[name].shape)
            found = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise _damaged(path, f"the parameter {name} is {found}, and its policy has torch.float32 {shape}")
        if not tensor.isfinite().all():
            raise _damaged(path, f"the parameter {name} has values that are no finite numbers")
    policy = Policy(config)
    policy.load_state_dict(dict(tensors))
    return policy


def write_tensors(path: Path, kind: str, tensors: Mapping[str, Tensor], values: Mapping[str, object]) -> None:
    """Write tensors and JSON values as one file of a kind.

    It is written under another name first and then put into its place, so that whoever interrupts finds a whole file.

    Raises
    ------
    PolicyError
        If it cannot be written.
    """
    text = json.dumps({"format": FORMAT, "kind": kind, **values}, sort_keys=True)
    content = save({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, {"souffle": text})
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(content)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise PolicyError(f"{path}: the {kind} cannot be written: {error}") from error


def read_tensors(path: Path, kind: str) -> tuple[dict[str, Tensor], dict]:
    """What :func:`write_tensors` wrote.

    Raises
    ------
    PolicyError
        If there is something else, or of another version.
    """
    try:
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise PolicyError(f"{path}: {size} bytes are too many for a {kind}; name a file that Souffle wrote")
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            values = _values(path, kind, metadata.get("souffle", ""))
            # What is mapped of a file changes with the file; copies stay.
            return {name: file.get_tensor(name).clone() for name in file.keys()}, values  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise PolicyError(
            f"{path}: no {kind} of Souffle, or a damaged one ({error}); name another file, or train again"
        ) from error
    except OSError as error:
        raise PolicyError(f"{path}: the {kind} cannot be read: {error}") from error


def _values(path: Path, kind: str, text: str) -> dict:
    """The JSON values of a file, after a look at its version and kind."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"{path}: Souffle did not write this file; name one that it wrote as a {kind}") from error
    if not isinstance(values, dict) or not {"format", "kind"} <= set(values):
        raise _damaged(path, "it does not say what it holds")
    if values["format"] != FORMAT:
        raise PolicyError(
            f"{path}: format {values['format']!r} of another version of Souffle, which reads {FORMAT}; train again"
        )
    if values["kind"] != kind:
        raise PolicyError(f"{path}: a {values['kind']!r} and no {kind}")
    return values


def _damaged(path: Path, what: str) -> PolicyError:
    return PolicyError(f"{path}: damaged: {what}; train again, or fetch the file again")
