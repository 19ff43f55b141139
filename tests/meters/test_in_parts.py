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
