"""Turns layers of a decoder into NPT layers, and back. A decoder is recognised by its structure, not by its class."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.utils.hooks import RemovableHandle

from ...errors import UsageError
from ...ops.arguments import require_at_least_one, require_int
from .layer import LINEAR, NptLinear

# attribute names of a layer's parts: ours, Llama's and GPT-2's
ATTENTIONS = ("attention", "self_attn", "attn")
FEED_FORWARDS = ("ffn", "mlp")
# the first projection of a feed-forward; in a gated feed-forward, the gate
FIRST_PROJECTIONS = ("gate", "gate_proj", "c_fc", "up")


@dataclass(frozen=True)
class LayerParts:
    """The parts of a decoder layer that a conversion changes."""

    attention: nn.Module
    feed_forward: nn.Module
    projection: str

    @property
    def base(self) -> nn.Module:
        return getattr(self.feed_forward, self.projection)


@dataclass
class Conversion:
    """The NPT layers of a model. :meth:`undo` restores the model's own modules and their ``requires_grad``."""

    layers: tuple[NptLinear, ...]
    _parts: tuple[LayerParts, ...]
    _hooks: tuple[RemovableHandle, ...]
    _frozen: tuple[nn.Parameter, ...]

    def undo(self) -> None:
        """Put the original projections back and remove the hooks. The trained parameters stay in ``layers``."""
        for parts, layer in zip(self._parts, self.layers, strict=True):
            if parts.base is not layer:
                raise UsageError("this conversion was undone already, or the model was changed after it")
        for parts, layer, hook in zip(self._parts, self.layers, self._hooks, strict=True):
            setattr(parts.feed_forward, parts.projection, layer.base)
            hook.remove()
        for parameter in self._frozen:
            parameter.requires_grad_(True)


def convert(
    model: nn.Module,
    *,
    num_layers: int,
    rank: int,
    first_layer: int | None = None,
    modulation: str = LINEAR,
    drops_attention: bool = True,
    form: str = "auto",
) -> Conversion:
    """Turn ``num_layers`` layers of a decoder into NPT layers: those from ``first_layer`` on, or the last ones.

    All parameters that the model has are frozen. The other layers are left as they are. With ``drops_attention``,
    attention acts through the weight alone, as published. Without it, the output of attention is also added to the
    hidden states, and the converted model starts with the results of the original one.
    """
    decoder = layer_parts_of(model)
    require_at_least_one("num_layers", num_layers)
    first = len(decoder) - num_layers if first_layer is None else require_int("first_layer", first_layer, at_least=0)
    if not 0 <= first <= len(decoder) - num_layers:
        raise ValueError(
            f"num_layers {num_layers} from layer {max(first, 0)} on: the decoder has {len(decoder)} layers"
        )
    parts = decoder[first : first + num_layers]
    for place, one in enumerate(parts, first):
        if isinstance(one.base, NptLinear):
            raise UsageError(f"layer {place} was converted already: undo that conversion first")
    layers = tuple(
        NptLinear(one.base, rank, modulation=modulation, form=form, drops_attention=drops_attention) for one in parts
    )
    frozen = tuple(parameter for parameter in model.parameters() if parameter.requires_grad)
    for parameter in frozen:
        parameter.requires_grad_(False)
    for one, layer in zip(parts, layers, strict=True):
        setattr(one.feed_forward, one.projection, layer)
    hooks = tuple(one.attention.register_forward_hook(layer.remember) for one, layer in zip(parts, layers, strict=True))
    return Conversion(layers, parts, hooks, frozen)


def layer_parts_of(model: nn.Module) -> tuple[LayerParts, ...]:
    """The layers of a decoder: those of the first ModuleList in which all have an attention and a feed-forward."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module):
            found = [next(_parts(layer), None) for layer in module]
            parts = tuple(one for one in found if one is not None)
            if len(parts) == len(found):
                return parts
    raise UsageError(
        f"no decoder layers in {type(model).__name__}: looked for a ModuleList whose modules each have an attention "
        f"({', '.join(ATTENTIONS)}) and a feed-forward ({', '.join(FEED_FORWARDS)}) with a first projection "
        f"({', '.join(FIRST_PROJECTIONS)})"
    )


def _parts(layer: nn.Module) -> Iterator[LayerParts]:
    own = dict(layer.named_children())
    for attention in filter(own.__contains__, ATTENTIONS):
        for feed_forward in filter(own.__contains__, FEED_FORWARDS):
            children = dict(own[feed_forward].named_children())
            for projection in filter(children.__contains__, FIRST_PROJECTIONS):
                yield LayerParts(own[attention], own[feed_forward], projection)
