"""What an incident brings to the one training loop: the schema of its model section, and its model."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from . import incident_names, require_incident

if TYPE_CHECKING:
    import torch

    from .config import TrainingConfig


@dataclass(frozen=True)
class Trainable:
    """``trainable`` in ``memfix/incidents/<incident>/trainable.py``.

    ``model_schema`` is a frozen dataclass whose fields are :func:`memfix.incidents.schema.setting`. ``build`` makes
    the model on the CPU, in float32, from torch's global generator. ``loss_sum(model, ids_BT, target_BT)`` is the
    sum of the losses of all targets that are not :data:`memfix.incidents.tokens.IGNORED`; it must go through one
    call of the model, since that is when sharded parameters are whole. ``layers`` are the parts that are sharded
    one by one, so that no more than one of them is whole at a time.
    """

    model_schema: type[Any]
    vocabulary_size: Callable[[Any], int]
    build: Callable[[Any, TrainingConfig], torch.nn.Module]
    loss_sum: Callable[[torch.nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
    layers: Callable[[torch.nn.Module], Iterable[torch.nn.Module]]


def get_trainable(incident: str) -> Trainable:
    """What the incident of this name brings."""
    module = _module_of(require_incident(incident))
    if importlib.util.find_spec(module) is None:
        known = [name for name in incident_names() if importlib.util.find_spec(_module_of(name)) is not None]
        raise UsageError(f"incident {incident} has no model to train; those that have: {', '.join(known)}")
    return importlib.import_module(module).trainable


def _module_of(incident: str) -> str:
    return f"{__package__}.{incident}.trainable"
