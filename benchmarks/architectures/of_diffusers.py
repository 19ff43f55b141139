"""The architectures of ``diffusers``: every model, with few layers and few channels, and inputs by their names."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from memfix.meters.base import StepBuilder

from ..third_party.training import Batch, moved
from .package import Attempt, Package
from .steps import Made, require_few_parameters, trained

_Config = Mapping[str, Any]
_TOKENS, _PIXELS = 8, 16

_FEW: dict[str, Any] = {
    name: value
    for value, names in {
        1: "num_layers num_single_layers num_refiner_layers n_layers n_refiner_layers num_mmdit_layers mmdit_layers "
        "num_single_dit_layers transformer_num_layers num_hidden_layers num_lyric_encoder_hidden_layers "
        "num_timbre_encoder_hidden_layers num_attention_pooler_hidden_layers nlayers num_text_blocks num_visual_blocks "
        "dit_depth depth layers_per_block num_res_blocks encoder_num_hidden_layers decoder_num_hidden_layers n_layer "
        "decoder_num_layers layers_per_down_block layers_per_up_block num_enc_blocks num_dec_blocks",
        _PIXELS: "sample_size",
        2: "num_attention_heads num_cross_attention_heads audio_num_attention_heads num_key_value_attention_heads",
    }.items()
    for name in names.split()
}
"""Settings of small configurations. Widths stay as they are, except those of all heads together."""
_HEADS = (("num_attention_heads", "attention_head_dim"), ("num_cross_attention_heads", "cross_attention_head_dim"))
"""The settings whose product is such a width."""
_IF_NONE = {"in_channels": 4, "out_channels": 4, "patch_size": 2, "sample_size": _PIXELS, "caption_channels": 64}
"""Settings that a transformer needs although they are None by default."""
_IF_NONE_IN_GROUPS = {"in_channels": 32, "out_channels": 32}
"""The same for a transformer that normalises groups of channels."""
_TEXT_WIDTHS = (
    "joint_attention_dim", "caption_channels", "text_dim", "text_embed_dim", "cap_feat_dim", "context_in_dim",
    "text_hidden_dim", "in_text_dim", "cond_token_dim", "cross_attention_input_dim", "dit_text_dim", "condition_dim",
    "encoder_hid_dim", "encoder_hidden_size", "embedding_dim", "cross_attention_dim",
)  # fmt: skip
"""The names under which a configuration has the width of its text, in the order of preference."""
_CHANNELS = (
    "in_channels", "input_channels", "audio_channels", "num_channels", "in_visual_dim", "io_channels", "in_dim",
    "num_mels", "mel_bins", "latent_dim", "latent_channels", "audio_acoustic_hidden_dim", "embedding_dim",
    "hidden_size",
)  # fmt: skip
_SHAPES: tuple[Callable[[int], tuple[int, ...]], ...] = (
    lambda channels: (2, channels, _PIXELS, _PIXELS),
    lambda channels: (2, _PIXELS, channels),
    lambda channels: (2, channels, 4, _PIXELS, _PIXELS),
    lambda channels: (2, channels, 5, 64, 64),
    lambda channels: (2, channels, 64, 64),
    lambda channels: (2, 3, channels, _PIXELS, _PIXELS),
    lambda channels: (2, channels, 64),
    lambda channels: (2, channels, 16384),
    lambda channels: (2, 1, 16384),
)
"""The shapes of the main input to try in turn: images, tokens, films, and so on."""
_MAIN = ("hidden_states", "sample", "x", "latents", "mel", "inputs_embeds", "z")
_IF_NEEDED = ("timestep_r", "r_timestep", "fps")
"""Inputs that some models take only with other settings, and then by default."""


def _architectures() -> dict[str, tuple[str, str]]:
    from diffusers import ModelMixin, models

    found = {}
    for name in dir(models):
        kind: Any = None
        with contextlib.suppress(Exception):  # it may need a package that is not installed
            kind = getattr(models, name)
        if not inspect.isclass(kind) or not issubclass(kind, ModelMixin) or kind.__module__.count(".") < 3:
            continue
        folder = kind.__module__.split(".")[2]
        if folder in ("autoencoders", "controlnets", "transformers", "unets"):
            found[f"{folder}: {name}"] = folder, name
    return found


def _attempts(task: str, name: str) -> Iterator[Attempt]:
    from diffusers import models

    kind: Any = getattr(models, name)
    narrow, wide = _configured(kind, is_narrow=True), _configured(kind, is_narrow=False)
    for shape in _SHAPES:
        for config in (narrow, wide) if narrow != wide else (narrow,):
            yield functools.partial(_step, kind, config, shape)


def _step(kind: Any, config: _Config, shape: Callable[[int], tuple[int, ...]]) -> StepBuilder:
    make = functools.partial(kind, **{each: value for each, value in config.items() if value is not inspect._empty})
    require_few_parameters(make)
    channels = next((config[each] for each in _CHANNELS if isinstance(config.get(each), int)), 3)
    inputs = _inputs(kind, config, shape(channels))
    _require_that_shapes_fit(make, inputs)
    return trained(make, inputs, _called)


def _require_that_shapes_fit(make: Made, inputs: Batch) -> None:
    """Raise what the forward raises on the meta device, unless it needs values: that is soon known of most shapes."""
    with torch.device("meta"):
        model = make()
        try:
            model(**moved(inputs, "meta"))
        except Exception as error:
            if "meta" not in str(error).lower():
                raise


def _called(model: nn.Module, batch: Any) -> Any:
    return model(**batch)


def _configured(kind: Any, is_narrow: bool) -> dict[str, Any]:
    """Return the settings of a class: its defaults with fewer layers, and with fewer channels if ``is_narrow``."""
    parameters = inspect.signature(kind.__init__).parameters
    usual = {name: each.default for name, each in parameters.items() if name not in ("self", "args", "kwargs")}
    few = {name: _fewer(name, value, is_narrow) for name, value in usual.items()}
    if ".transformers." in kind.__module__:
        if_none = _IF_NONE_IN_GROUPS if usual.get("norm_num_groups") and usual.get("patch_size") is None else _IF_NONE
        few |= {name: if_none.get(name) for name, value in usual.items() if value is None}
    for heads, width in _HEADS:
        if isinstance(usual.get(heads), int) and isinstance(usual.get(width), int):
            all_heads = usual[heads] * usual[width]
            few |= {name: few[heads] * few[width] for name, value in usual.items() if value == all_heads}
    return few


def _fewer(name: str, value: Any, is_narrow: bool) -> Any:
    if name in _FEW and isinstance(value, int):
        return min(value, _FEW[name])
    if name in _FEW and isinstance(value, (list, tuple)) and all(isinstance(each, int) for each in value):
        return type(value)(min(each, _FEW[name]) for each in value)
    if is_narrow and name.endswith("block_out_channels") and isinstance(value, (list, tuple)):
        return type(value)(min(each, 64) for each in value)
    return value


def _inputs(kind: Any, config: _Config, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the inputs of a model whose main one has this shape. Raise if one that it needs is not known."""
    inputs = {}
    for name, each in inspect.signature(kind.forward).parameters.items():
        if name in ("self", "kwargs", "args", "return_dict"):
            continue
        is_needed = each.default is inspect._empty
        value = None if name in _IF_NEEDED and not is_needed else _input(name, config, shape)
        if value is not None:
            inputs[name] = value
        elif is_needed:
            raise ValueError(f"no value is known for the input {name}")
    return inputs


def _input(name: str, config: _Config, shape: tuple[int, ...]) -> Any:
    """Return an input by its name, or None."""
    if name in _MAIN:
        return torch.randn(shape)
    if name == "controlnet_cond":
        channels = config.get("conditioning_channels")
        return torch.randn(2, channels, *(8 * size for size in shape[2:])) if channels else torch.randn(shape)
    if name in ("timestep", "timesteps", "t", "fps"):
        return torch.tensor([3, 7])
    if name in ("timestep_r", "r_timestep"):
        return torch.tensor([1, 2])
    if name == "global_hidden_states" and isinstance(config.get("global_states_input_dim"), int):
        return torch.randn(2, 1, config["global_states_input_dim"])
    if name == "padding_mask":
        return torch.zeros(1, 1, *shape[-2:])
    if name in ("encoder_hidden_states", "text_hidden_states"):
        width = next((config[each] for each in _TEXT_WIDTHS if isinstance(config.get(each), int)), None)
        return None if width is None else torch.randn(2, config.get("max_text_seq_length", _TOKENS), width)
    if name in ("pooled_projections", "clip_text_pooled", "pooled_embeds"):
        width = config.get("pooled_projection_dim") or config.get("in_text_dim2")
        return torch.randn(2, width) if isinstance(width, int) else None
    if name in ("encoder_attention_mask", "encoder_hidden_states_mask", "encoder_mask", "text_embedding_mask"):
        return torch.ones(2, _TOKENS, dtype=torch.bool)
    if name in ("img_ids", "txt_ids"):
        axes = config.get("axes_dims_rope") or (0, 0, 0)
        return torch.zeros(shape[1] if name == "img_ids" else _TOKENS, len(axes))
    if name == "img_shapes":
        return [[(1, 4, 4)]] * 2
    if name == "guidance":
        return torch.tensor([3.5, 3.5]) if config.get("guidance_embeds") else None
    if name == "class_labels":
        return torch.tensor([1, 2]) if config.get("num_embeds_ada_norm") else None
    if name in ("num_frames", "height", "width"):
        return {"num_frames": 1, "height": 4, "width": 4}[name] if len(shape) == 3 else None
    return None


PACKAGE = Package("diffusers", _architectures, _attempts)
