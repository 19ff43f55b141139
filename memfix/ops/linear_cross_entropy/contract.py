"""The contract of linear cross entropy. The incident: 131,072 tokens, a vocabulary of 151,936, bfloat16."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...contract import Contract, Dim, Form, Integers, Normal, Pattern, TensorSpec, Uniform
from ...laws import Budget, Scaling, SpeedBudget, Tolerance, at_most, below_naive
from ..bad_inputs import bad_chunk_sizes, mixed, not_classes, not_floating, not_integer, refused
from .auto import auto_linear_cross_entropy
from .checkpoint import checkpoint_linear_cross_entropy
from .floor import three_products
from .naive import naive_linear_cross_entropy
from .options import FEW_LOGITS, ROWS_PER_CHUNK
from .recompute import TILES_PER_CHUNK, recompute_linear_cross_entropy
from .reported import reported_linear_cross_entropy
from .triton import Tiles, triton_linear_cross_entropy

# masks, sums and coefficients of every token; bias, class weights and a gradient of every class
_SMALL = "80*N + 40*V + 4*KiB"
_CHUNK = "min(rows_per_chunk, N)*V*e"
# the default rows of a chunk; a chunk that holds all tokens is rounded up to a multiple of 128 rows
_USUAL_ROWS = f"min(max({ROWS_PER_CHUNK}, min({2 * ROWS_PER_CHUNK}, {FEW_LOGITS}/V)), N + 127)"


def chunked_limits(
    *, num_tokens: str = "N", rows: str | None = None, small: str = _SMALL, at_least: str = "2*MiB"
) -> dict[str, str]:
    """Return the budget of each phase for a form that makes ``rows`` logits at a time. ``small`` is what a token and a
    class take, and ``at_least`` the temporaries that are as large where chunks are small."""
    rows = rows or f"min(rows_per_chunk, {num_tokens})"
    # the float32 tile of a chunk's softmax, or two tiles of half the rows if a cap needs its slope
    tile = f"2*ceil_div({rows}, {2 * TILES_PER_CHUNK})*V*max(e, 4)"
    gradients = f"{num_tokens}*D*e + V*D*max(e, 4)"
    return {
        "forward": f"{tile} + {small}",
        "held": f"{gradients} + 16*V + 8*{num_tokens} + KiB",
        "train": f"{gradients} + max({rows}*V*e + {tile}, {at_least}) + {small}",
    }


LOSS_TOLERANCE = Tolerance(ulps=2, rms_factor=1.5, absolute_ulps=4)
# each chunk's loss and gradients are rounded before they are added up, and there may be a hundred chunks
_ROUNDED_SUMS_TOLERANCE = replace(LOSS_TOLERANCE, ulps=32, rms_factor=16)
# these forms do not round the logits, which is most of naive's error for logits in the tens; but they multiply rounded
# gradients by the upstream gradient, which naive knows before it rounds
UNROUNDED_LOGITS_TOLERANCE = replace(LOSS_TOLERANCE, rms_ulps=0.65)
# a row of the logits' gradient sums to zero, so in its products with equal rows the terms cancel: what is left is the
# rounding of the operands to the working dtype, as in naive, and says nothing about the dtype of the logits
PATTERNS_WITHOUT_EQUAL_ROWS: tuple[Pattern, ...] = ("even", "runs")
# constants lowered for the equality checks, so that small calls have several parts and tiles
_SMALL_PARTS = {
    f"{__package__}.logits_gradient._ROWS_OF_A_SUM": 8,
    f"{__package__}.narrowing._FIRST_ELEMENTS": 64,
    "memfix.ops.products._UPCAST_ELEMENTS": 512,
}
_SMALL_TILES = Tiles(
    tokens=16, classes=16, depth=16, scanned=16, many_classes=128,
    summed_tokens=8, summed_classes=16, target_tokens=2, target_width=16, scaled=256,
)  # fmt: skip


_SMALL_CASE = {"N": 512, "D": 64, "V": 1000, "rows_per_chunk": 128, "dtype": "float32"}
_EVERY_OPTION = {"present": ("bias", "class_weight"), "label_smoothing": 0.1, "softcap": 20.0, "z_loss": 1e-2}

contract = Contract(
    "linear_cross_entropy",
    naive=naive_linear_cross_entropy,
    floor=three_products,
    forms={
        "reported": Form(reported_linear_cross_entropy, reported=True, tolerance=_ROUNDED_SUMS_TOLERANCE),
        "checkpoint": Form(checkpoint_linear_cross_entropy, tolerance=_ROUNDED_SUMS_TOLERANCE),
        "recompute": Form(
            recompute_linear_cross_entropy,
            tolerance=UNROUNDED_LOGITS_TOLERANCE,
            repeats_backward=False,
            compared_with=_SMALL_PARTS,
        ),
        # as users call the op: triton on the GPU of the meter, recompute on a CPU
        "auto": Form(
            auto_linear_cross_entropy,
            tolerance=UNROUNDED_LOGITS_TOLERANCE,
            repeats_backward=False,
            compared_with=_SMALL_PARTS,
        ),
        "triton": Form(
            triton_linear_cross_entropy,
            tolerance=UNROUNDED_LOGITS_TOLERANCE,
            repeats_backward=False,
            has_kernels=True,
            compared_with={**_SMALL_PARTS, f"{__package__}.triton.TILES": _SMALL_TILES},
        ),
    },
    # with one class the gradient is zero: naive has no rounding error to compare that of smoothed terms with
    dims={"N": Dim(1, 128), "D": Dim(1, 48), "V": Dim(2, 160), "rows_per_chunk": Dim(1, 140)},
    choices={
        "reduction": ("mean", "sum", "none"),
        "ignore_index": (-100, 0),
        "label_smoothing": (0.0, 0.1),
        "softcap": (None, 20.0),
        "z_loss": (0.0, 1e-2),
    },
    inputs=[
        TensorSpec("hidden", "N D", grad=True, patterns=PATTERNS_WITHOUT_EQUAL_ROWS),
        TensorSpec("weight", "V D", grad=True, values=Normal(fan_in="D"), patterns=PATTERNS_WITHOUT_EQUAL_ROWS),
        TensorSpec("target", "N", dtype="int64", values=Integers("V"), sometimes="ignore_index"),
        TensorSpec("bias", "V", grad=True, optional=True),
        TensorSpec("class_weight", "V", values=Uniform(0.25, 2.0), optional=True),
    ],
    cases={
        "incident": {"N": 131_072, "D": 2560, "V": 151_936, "rows_per_chunk": 4096, "dtype": "bfloat16"},
        # an eighth of the incident's tokens in equal chunks: fast enough to time, and naive fits on smaller GPUs
        "large": {"N": 16_384, "D": 2560, "V": 151_936, "rows_per_chunk": 4096, "dtype": "bfloat16"},
        "medium": {"N": 8192, "D": 1024, "V": 32_000, "rows_per_chunk": 1024, "dtype": "bfloat16"},
        "small": _SMALL_CASE,
        "options": {**_SMALL_CASE, **_EVERY_OPTION},  # so that the memory of every option has a lock entry
    },
    tolerance=LOSS_TOLERANCE,
    budgets=[
        # the report promised one chunk at a time: true without gradients, false with them
        *below_naive("reported", "incident", forward=20),
        Budget("reported", phase="train", case="incident", times_below_naive=20, known_broken=True),
        Budget("reported", phase="held", case="incident", times_below_naive=20, known_broken=True),
        *below_naive("checkpoint", "incident", forward=20, train=20),
        *at_most("checkpoint", "incident", held="KiB"),
        *at_most(
            "checkpoint",
            forward=f"3*{_CHUNK} + 8*N + 16*V + KiB",
            held="N*max(e, 4) + KiB",
            train=f"N*D*e + 2*V*D*e + 6*{_CHUNK} + 16*N + 16*V + 4*KiB",
        ),
        *below_naive("recompute", "incident", forward=100, train=25),
        Budget("recompute", case="incident", times_below={"reported": 8}),
        *below_naive("triton", "incident", forward=1000, train=40),
        Budget("triton", case="incident", times_below={"reported": 14}),
        # the forward computes the gradients: no input is saved for backward
        *at_most("recompute", "incident", held="N*D*e + V*D*e + KiB", train="4 GiB", saved="0"),
        *at_most("triton", "incident", held="N*D*e + V*D*e + KiB", train="2.7 GiB", saved="0"),
        *at_most("recompute", **chunked_limits()),
        *at_most("triton", **chunked_limits()),
        # the default is small: chunks of half the report's rows, at any size
        *at_most("auto", "incident", train="2.1 GiB", saved="0"),
        Budget("auto", case="incident", times_below={"reported": 19}),
        *below_naive("auto", "large", train=9),
        # V*D*e: a gradient is copied to the strides of a non-contiguous weight once the chunks are freed
        *at_most("auto", **chunked_limits(rows=_USUAL_ROWS, at_least="V*D*e, 2*MiB")),
    ],
    scaling=[
        Scaling("checkpoint", dim="N", at_most=1, case="small", doublings=3),
        Scaling("auto", dim="N", at_most=1, case="medium", doublings=3),
        Scaling("triton", dim="N", at_most=1, case="medium", doublings=3),
        Scaling("recompute", dim="N", at_most=1, case="small", doublings=3),
        Scaling("recompute", dim="V", at_most=1, case="small"),
    ],
    speed=[
        SpeedBudget("recompute", case="small", times_naive=3.0),
        # the kernels of 1024 tokens and 32,000 classes take longer to launch than to run: on an H200 1.4 times naive,
        # and 1.8 to 2.8 depending on the CPU that launches them
        SpeedBudget("reported", case="medium", times_naive=1.5, device="cuda"),
        SpeedBudget("triton", case="medium", times_naive=4.0, device="cuda"),
        # the report promised 5 to 10 %
        SpeedBudget("reported", case="large", times_naive=1.10, device="cuda"),
        SpeedBudget("checkpoint", case="large", times_naive=2.0, device="cuda"),
        SpeedBudget("recompute", case="large", times_naive=1.3, device="cuda"),
        SpeedBudget("triton", case="large", times_naive=0.95, device="cuda"),
    ],
    bad_inputs=[
        *bad_chunk_sizes("rows_per_chunk"),
        refused("negative switch", "standard_up_to: a size must be at least 0 bytes, got -1", standard_up_to=-1),
        refused(
            "fractional switch",
            "standard_up_to: a size must be an int or a string such as '24GiB', got 0.5",
            standard_up_to=0.5,
        ),
        refused("switch in words", "standard_up_to: cannot read 'much' as a size", standard_up_to="much"),
        *not_floating("hidden", "weight"),
        *not_integer("target", rule="int64"),
        *mixed("dtype", "hidden", "weight"),
        *mixed("device", "hidden", "weight", "target"),
        refused("unknown reduction", "reduction must be one of mean, sum, none, got 'max'", reduction="max"),
        refused("batched hidden", "hidden must be [N, D], got shape [1, 5, 5]", hidden=lambda t: t[None]),
        refused("narrow weight", "must have the same width D, got 5, 4", weight=lambda t: t[:, 1:]),
        refused("short target", "must have the same number of rows N, got 5, 4", target=lambda t: t[1:]),
        refused("no rows", "must have the same number of rows N", hidden=lambda t: t[:0]),
        *not_classes("target"),
        refused("softcap of zero", "softcap must be above 0, got 0.0", softcap=0.0),
        refused("softcap in words", "softcap must be a number, got '30'", TypeError, softcap="30"),
        refused("much smoothing", "label_smoothing must be between 0 and 1, got 1.1", label_smoothing=1.1),
        refused("negative smoothing", "label_smoothing must be between 0 and 1", label_smoothing=-0.1),
        refused("negative z-loss", "z_loss must be at least 0, got -0.0001", z_loss=-1e-4),
        refused("z-loss of nan", "z_loss must be at least 0, got nan", z_loss=float("nan")),
        refused("short bias", "must have the same number of classes V, got 4, 5", bias=torch.ones(4)),
        refused("bias as a matrix", "bias must be [V], got shape [5, 1]", bias=torch.ones(5, 1)),
        refused("wide bias", "bias and weight must have the same dtype", bias=torch.ones(5).double()),
        refused(
            "wide class weight", "class_weight and weight must have the same dtype", class_weight=torch.ones(5).double()
        ),
        refused("short class weight", "the same number of classes V, got 6, 5", class_weight=torch.ones(6)),
        refused("integer class weight", "class_weight must be floating", class_weight=torch.ones(5).int()),
        refused(
            "class weight with a gradient",
            "class_weight takes no gradient",
            class_weight=torch.ones(5, requires_grad=True),
        ),
    ],
    repeats_backward=True,
)
