"""Operators of other packages: run as the parts of their kernels, or with a rule under their names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memfix
from memfix.errors import MeasurementError
from memfix.meters.simulated import in_parts
from memfix.meters.simulated.workspace import Estimated, Range
from memfix.meters.simulated.workspace.rules import FOREIGN_RULES, Call

NAME = "memfix_in_parts"


@pytest.fixture(scope="module")
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library(NAME, "FRAGMENT") as library:
        library.define("pick(Tensor boxes, Tensor scores, float most) -> Tensor")
        library.define("pool(Tensor x) -> Tensor")
        torch.library.register_fake(f"{NAME}::pick", _unknown_size, lib=library)
        torch.library.register_fake(f"{NAME}::pool", torch.empty_like, lib=library)
        yield library


def _unknown_size(boxes: torch.Tensor, scores: torch.Tensor, most: float) -> torch.Tensor:
    return boxes.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)


def picking(device: str) -> Any:
    boxes, scores = torch.empty(1000, 4, device=device), torch.empty(1000, device=device)
    return lambda: boxes[torch.ops.memfix_in_parts.pick(boxes, scores, 0.5)].relu()


@pytest.mark.usefixtures("library")
def test_boxes_that_are_suppressed_are_bounded_by_none_and_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeasurementError, match=r"needs the values of a tensor \(memfix_in_parts.pick.default\)"):
        memfix.peak(picking)
    monkeypatch.setitem(in_parts.PARTS, f"{NAME}.pick", in_parts.PARTS["torchvision.nms"])
    from memfix.meters.simulated import tracking

    tracking._traits_of.cache_clear()
    reading = memfix.peak(picking)
    overlaps, in_order = 1000 * 16 * 8, 1000 * 16
    assert not reading.exact
    assert reading.at_least is not None
    assert reading.at_least >= overlaps + in_order
    assert reading.at_least < reading.peak_bytes == reading.at_most
    assert any("its parts are taken from its source" in note for note in reading.notes)


@pytest.mark.usefixtures("library")
def test_an_operator_of_another_package_may_have_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(device: str) -> Any:
        x = torch.empty(1000, device=device)
        return lambda: torch.ops.memfix_in_parts.pool(x)

    assert memfix.peak(build).notes == (f"no workspace rule for {NAME}.pool.default",)
    monkeypatch.setitem(FOREIGN_RULES, f"{NAME}.pool", lambda call: [300])
    assert memfix.peak(build).peak_bytes == 4300


def test_pooling_of_regions_copies_what_is_not_contiguous() -> None:
    rule = FOREIGN_RULES["torchvision.roi_align"]
    x = torch.empty(2, 3, 4, 5, device="meta")
    for given, copies in ((x, 0), (x.transpose(2, 3), 2 * 3 * 4 * 5 * 4)):
        call: Any = Call(None, "torchvision.roi_align.default", (given,), {}, None)  # type: ignore[arg-type]
        with pytest.raises(Estimated) as estimate:
            rule(call)
        assert estimate.value.bytes == Range(0, copies, copies)


# ---------------------------------------------------------------- transformer encoders in inference
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("is_masked", [False, True])
def test_the_fast_path_of_an_encoder_is_run_in_parts(norm_first: bool, activation: str, is_masked: bool) -> None:
    shapes = []

    def build(device: str) -> Any:
        layer = torch.nn.TransformerEncoderLayer(
            64, 4, 128, batch_first=True, activation=activation, norm_first=norm_first
        )
        layer, x = layer.to(device).eval(), torch.randn(3, 10, 64, device=device)
        mask = torch.zeros(10, 10, device=device) if is_masked else None

        def step() -> torch.Tensor:
            with torch.inference_mode():
                result = layer(x, mask)
            shapes.append(result.shape)
            return result

        return step

    reading = memfix.peak(build)
    assert any("_transformer_encoder_layer_fwd" in note for note in reading.notes)
    assert shapes[-1] == (3, 10, 64)
    assert reading.held_bytes == 3 * 10 * 64 * 4
    # the packed projections, and the wider hidden layer beside its input
    assert reading.peak_bytes >= 3 * 3 * 10 * 64 * 4


@pytest.mark.parametrize("averages", [False, True])
def test_attention_in_inference_returns_its_weights(averages: bool) -> None:
    shapes = []

    def build(device: str) -> Any:
        layer = torch.nn.MultiheadAttention(64, 4, batch_first=True, device=device).eval()
        x = torch.randn(3, 10, 64, device=device)

        def step() -> None:
            with torch.inference_mode():
                shapes.append([tensor.shape for tensor in layer(x, x, x, average_attn_weights=averages)])

        return step

    reading = memfix.peak(build)
    assert any("_native_multi_head_attention" in note for note in reading.notes)
    assert shapes[-1] == [(3, 10, 64), (3, 10, 10) if averages else (3, 4, 10, 10)]


@pytest.mark.parametrize(
    ("rows", "unknowns", "shape"), [(300, 120, (300, 3)), (120, 300, (120, 3)), (300, 120, (300,))]
)
def test_least_squares_have_the_shapes_of_real_ones(rows: int, unknowns: int, shape: tuple[int, ...]) -> None:
    def solved(device: str) -> Any:
        a, b = torch.randn(rows, unknowns, device=device), torch.randn(shape, device=device)
        found = torch.linalg.lstsq(a, b, driver="gels")
        return found.solution.shape, found.residuals.shape, found.rank.shape, found.singular_values.shape

    found = []
    reading = memfix.peak(lambda device: lambda: found.append(solved(device)))
    assert found[-1] == solved("cpu")
    assert reading.at_most is None
