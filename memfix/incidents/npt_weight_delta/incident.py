"""The NPT weight delta as an incident: its model, its switches, and the report's table of configurations."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...errors import UsageError
from ..config import ReportSwitches, RunConfig
from ..incident import Growth, Incident
from ..profile import ReportedRun
from ..schema import setting
from ..tokens import TokenData, num_token_targets, token_batches
from .conversion import convert
from .int8_linear import description, make_8bit
from .layer import FORMS, LINEAR, MODULATIONS, OFFLOAD
from .model import SIZES, Decoder

PRECISION_OF = {"fp16": "float16", "bf16": "bfloat16"}
WARMUP_TOKENS = 8


@dataclass(frozen=True)
class ModelConfig:
    """The ``model`` section."""

    size: str = setting(choices=SIZES, about="the decoder, in its published shape")
    converted_layers: int = setting(
        low=1, about="number of layers whose attention changes the weight of their feed-forward"
    )
    first_converted: int | None = setting(
        None, low=0, about="the first converted layer, counted from 0; null: the last layers are converted"
    )
    rank: int = setting(low=1, about="rank of the change of the weight")
    modulation: str = setting(
        LINEAR, choices=MODULATIONS, about="linear is attention @ A; tanh is 0.1 * tanh(attention @ A)"
    )
    drops_attention: bool = setting(
        True,
        about="attention acts only through the weight, as published; false: its output is also added to the hidden "
        "states",
    )
    form: str = setting("auto", choices=FORMS, about="form of npt_linear; naive and reported are the report's own code")

    def __post_init__(self) -> None:
        layers = SIZES[self.size].layers
        if (self.first_converted or 0) + self.converted_layers > layers:
            raise ValueError(
                f"converted_layers {self.converted_layers} from layer {self.first_converted or 0} on: "
                f"{self.size} has {layers} layers"
            )


@dataclass(frozen=True)
class NptSwitches(ReportSwitches):
    """The ``optimization`` section, with the report's names."""

    use_cpu_offload: bool = setting(False, about="compute the low-rank change of the weight on the CPU")
    mixed_precision: str | None = setting(
        None, choices=PRECISION_OF, about="set training.precision to float16 or bfloat16"
    )
    use_8bit: bool = setting(
        False, about="store the weights of the decoder's frozen linear layers in 8 bits; needs a GPU"
    )


def _resolved(config: RunConfig) -> RunConfig:
    """Set ``training.precision`` by ``optimization.mixed_precision``. Refuses switches that contradict other keys."""
    optimization, form, precision = config.optimization, config.model.form, config.training.precision
    if form != "auto" and (optimization.use_cpu_offload or optimization.use_8bit):
        raise UsageError(
            f"optimization.use_cpu_offload and use_8bit choose the form: model.form must be auto with them, got {form}"
        )
    if optimization.mixed_precision is None:
        return config
    wanted = PRECISION_OF[optimization.mixed_precision]
    if precision not in ("float32", wanted):
        raise UsageError(
            f"optimization.mixed_precision {optimization.mixed_precision} contradicts training.precision {precision}: "
            "give one of them"
        )
    return config.replaced({"training.precision": wanted})


def _require_device(config: RunConfig, device: torch.device) -> None:
    if config.optimization.use_8bit and device.type == "cpu":
        raise UsageError(
            "optimization.use_8bit needs a GPU, and the run is on the CPU: "
            "set optimization.use_8bit=false, or training.device=cuda if there is a GPU"
        )


def _build(config: RunConfig) -> Decoder:
    model, optimization = config.model, config.optimization
    decoder = Decoder(SIZES[model.size], gradient_checkpointing=config.training.gradient_checkpointing)
    convert(
        decoder,
        num_layers=model.converted_layers,
        first_layer=model.first_converted,
        rank=model.rank,
        modulation=model.modulation,
        drops_attention=model.drops_attention,
        form=OFFLOAD if optimization.use_cpu_offload else model.form,
    )
    if optimization.use_8bit:
        make_8bit(decoder.layers)
    return decoder


def _describe(config: RunConfig) -> list[str]:
    model, optimization = config.model, config.optimization
    size = SIZES[model.size]
    return [
        f"{model.size}, {size.num_parameters:,} parameters",
        f"{model.converted_layers} of {size.layers} layers converted, rank {model.rank}",
        f"{config.batch_size} x {config.data.context_length:,} tokens",
        f"npt_linear/{OFFLOAD if optimization.use_cpu_offload else model.form}",
        *([description()] if optimization.use_8bit else []),
    ]


# ---------------------------------------------------------------- beside the report
_BATCH_4 = ("training.batch_size=4", "training.gradient_accumulation_steps=8")
_OFFLOAD, _FP16 = "optimization.use_cpu_offload=true", "optimization.mixed_precision=fp16"
_BASIC = ("model.form=reported",)
RUNS = (
    ReportedRun("original", (*_BATCH_4, "model.form=naive"), ">80 GB, fails", "NPT-27"),
    ReportedRun("basic optimization", _BASIC, "~79 GB, fails", "NPT-28", linear_in="model.converted_layers"),
    ReportedRun("product of low rank", (), "", "NPT-21"),
    ReportedRun("+ CPU offload", (_OFFLOAD,), "~78 GB", "NPT-28"),
    ReportedRun("+ fp16", (_OFFLOAD, _FP16), "~40 GB", "NPT-29"),
    ReportedRun("+ fewer layers", (), "~35 GB", "NPT-30", file="config_optimized.yaml"),
    ReportedRun("+ 8-bit", ("optimization.use_8bit=true",), "", "NPT-33", file="config_optimized.yaml"),
    ReportedRun("small model", ("data.context_length=256",), "~2 GB", "NPT-31", file="small.yaml"),
)


incident = Incident(
    package=__package__,
    model_schema=ModelConfig,
    data_schema=TokenData,
    optimization_schema=NptSwitches,
    resolved=_resolved,
    require_device=_require_device,
    build=_build,
    data=lambda config: token_batches(config.data, SIZES[config.model.size].vocabulary),
    loss=lambda model, batch: model(*batch),
    num_targets=num_token_targets,
    layers=lambda model: model.layers,
    config="config.yaml",
    capacity="80GiB",  # the report's card
    grows=(
        Growth("training.batch_size", unit="sequences"),
        Growth("data.context_length", unit="tokens"),
        Growth("model.rank", unit="columns of A"),
    ),
    describe=_describe,
    warm_up=lambda batch: tuple(tensor_BT[:, :WARMUP_TOKENS] for tensor_BT in batch),
    runs=RUNS,
    num_parameters=lambda config: SIZES[config.model.size].num_parameters,
    conclusions=lambda measured: [measured.peak_sentence],
)
