"""What convolutions take besides their results: torch's copies, cuDNN's workspace, and where torch runs its own."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from rules_on_meta import hidden, meta

from memfix.meters.simulated.gpus import H200, get_gpu
from memfix.meters.simulated.tables import SHIPPED, file_name, read_table
from memfix.meters.simulated.workspace import Estimated, Range, convolving, cudnn
from memfix.meters.simulated.workspace.cudnn import Convolution
from memfix.meters.simulated.workspace.cudnn.estimate import estimated
from memfix.meters.simulated.workspace.cudnn.plans import Plan, Settings

aten = torch.ops.aten
bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
last = torch.channels_last

KiB = 1024
PLAIN = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)  # stride, padding, dilation, not transposed, one group
BYTES = {"forward": 10 * KiB, "image": 30 * KiB, "weight": 20 * KiB}


def expanded(*size: int) -> torch.Tensor:
    """As the gradient of a sum arrives."""
    return meta(1).expand(size)


def run(operator: Any, *args: Any) -> list[int]:
    return hidden(operator, *args, outputs=operator(*args))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Convolution]:
    """The convolutions that cuDNN was asked for; it takes ``BYTES`` for each."""
    calls: list[Convolution] = []

    def answer(_gpu: object, convolution: Convolution) -> Range:
        calls.append(convolution)
        return Range.of(BYTES[convolution.part])

    monkeypatch.setattr(convolving, "cudnn_workspace", answer)
    return calls


# ---------------------------------------------------------------- what torch does around cuDNN
def test_the_workspace_of_a_forward_is_hidden(asked: list[Convolution]) -> None:
    assert run(aten.convolution.default, meta(2, 8, 16, 16), meta(4, 8, 3, 3), meta(4), *PLAIN) == [10 * KiB]
    assert asked == [
        Convolution("forward", f32, (2, 8, 16, 16), (4, 8, 3, 3), (2, 4, 16, 16), False, (1, 1), (1, 1), (1, 1))
    ]


@pytest.mark.parametrize("copied", ["input", "weight"])
def test_the_other_tensor_is_copied_to_channels_last(asked: list[Convolution], copied: str) -> None:
    x, weight = meta(2, 8, 16, 16), meta(4, 8, 3, 3)
    if copied == "input":
        weight = weight.to(memory_format=last)
    else:
        x = x.to(memory_format=last)
    size = 4 * (x if copied == "input" else weight).numel()
    assert run(aten.convolution.default, x, weight, None, *PLAIN) == [size + 10 * KiB]
    assert asked[0].channels_last


def test_float64_is_never_channels_last(asked: list[Convolution]) -> None:
    x, weight = (
        tensor.to(memory_format=last) for tensor in (meta(2, 8, 16, 16, dtype=f64), meta(4, 8, 3, 3, dtype=f64))
    )
    copies = 8 * (x.numel() + weight.numel())
    assert run(aten.convolution.default, x, weight, None, *PLAIN) == [copies + 10 * KiB]
    assert not asked[0].channels_last


def test_one_dimension_runs_as_an_image_of_one_row(asked: list[Convolution]) -> None:
    rest = ([2], [1], [1], False, [0], 1)
    assert run(aten.convolution.default, meta(2, 8, 64), meta(4, 8, 3), None, *rest) == [10 * KiB]
    assert asked == [
        Convolution("forward", f32, (2, 8, 1, 64), (4, 8, 1, 3), (2, 4, 1, 32), False, (0, 1), (1, 2), (1, 1))
    ]
    strided = meta(2, 64, 8).transpose(1, 2)
    assert run(aten.convolution.default, strided, meta(4, 8, 3), None, *rest) == [strided.numel() * 4 + 10 * KiB]


def test_a_transposed_convolution_is_the_gradient_of_one(asked: list[Convolution]) -> None:
    rest = ([2, 2], [0, 0], [1, 1], True, [0, 0], 1)
    assert run(aten.convolution.default, meta(2, 8, 16, 16), meta(8, 4, 2, 2), None, *rest) == [30 * KiB]
    run(
        aten.convolution_backward.default,
        meta(2, 4, 32, 32),
        meta(2, 8, 16, 16),
        meta(8, 4, 2, 2),
        [4],
        *rest,
        [True] * 3,
    )
    assert [(call.part, call.image, call.output) for call in asked] == [
        (part, (2, 4, 32, 32), (2, 8, 16, 16)) for part in ("image", "forward", "weight")
    ]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([True, False, False], 30 * KiB),
        ([False, True, False], 20 * KiB),
        ([True, True, False], 30 * KiB - 4 * 8 * 9 * 4),  # the weight's gradient is not there yet
        ([False, True, True], 20 * KiB - 4 * 4),
    ],
)
def test_the_gradients_are_taken_one_after_the_other(asked: list[Convolution], mask: list[bool], expected: int) -> None:
    x, weight, grad = meta(2, 8, 16, 16), meta(4, 8, 3, 3), meta(2, 4, 16, 16)
    made = tuple(tensor if wanted else None for tensor, wanted in zip((x, weight, meta(4)), mask, strict=True))
    rest = (grad, x, weight, [4], *PLAIN, mask)
    assert hidden(aten.convolution_backward.default, *rest, outputs=made) == [expected]


def test_an_expanded_gradient_is_copied_once(asked: list[Convolution]) -> None:
    x, weight, grad = meta(2, 8, 16, 16), meta(4, 8, 3, 3), expanded(2, 4, 16, 16)
    copy = grad.numel() * 4
    gradients = run(aten.convolution_backward.default, grad, x, weight, [4], *PLAIN, [True, True, False])
    assert gradients == [copy + 30 * KiB - weight.numel() * 4]


def test_empty_images_run_nothing(asked: list[Convolution]) -> None:
    assert run(aten.convolution.default, meta(0, 8, 16, 16), meta(4, 8, 3, 3), None, *PLAIN) == []
    assert not asked


# ---------------------------------------------------------------- estimates
@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "version", lambda: None)
    monkeypatch.setattr(cudnn, "first_plan", lambda *_: None)


def answering(monkeypatch: pytest.MonkeyPatch, plan: Plan, version: int = 91900) -> None:
    """Let a library of this version answer everything by one plan."""
    monkeypatch.setattr(cudnn, "version", lambda: version)
    monkeypatch.setattr(cudnn, "first_plan", lambda *_: plan)


@pytest.mark.usefixtures("without_library")
def test_without_the_library_the_workspace_is_estimated() -> None:
    x, weight = meta(3, 64, 56, 56, dtype=bf16), meta(64, 64, 3, 3, dtype=bf16)
    message = (
        r"^convolution of \[3, 64, 56, 56\] by \[64, 64, 3, 3\], torch.bfloat16: "
        r"cuDNN chooses its workspace, estimated by its shape$"
    )
    with pytest.raises(Estimated, match=message) as estimate:
        run(aten.convolution.default, x, weight, None, *PLAIN)
    copies = 2 * (2 * x.numel() + weight.numel()) + 16  # to channels last and back
    assert estimate.value.bytes.least == 0
    assert estimate.value.bytes.usual == copies < estimate.value.bytes.most


def test_the_librarys_answer_is_the_usual_one_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, Plan(engine=45, workspace=12_345))
    with pytest.raises(Estimated, match=r", asked of cuDNN 9\.19\.0 without a GPU$") as estimate:
        run(aten.convolution.default, meta(3, 64, 56, 56), meta(64, 64, 3, 3), None, *PLAIN)
    assert (estimate.value.bytes.least, estimate.value.bytes.usual) == (0, 12_345)
    assert estimate.value.bytes.most >= 12_345 + 132 * 131_072  # each multiprocessor may hold a part of a sum


def test_a_plan_larger_than_any_estimate_raises_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, Plan(engine=45, workspace=1 << 40))
    with pytest.raises(Estimated) as estimate:
        run(aten.convolution.default, meta(3, 64, 56, 56), meta(64, 64, 3, 3), None, *PLAIN)
    assert estimate.value.bytes.most == (1 << 40) + 132 * 131_072


def test_the_note_names_both_versions_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, Plan(engine=45, workspace=1), version=91700)
    assert cudnn.origin_of_workspace(H200) == "asked of cuDNN 9.17.0 without a GPU, where 9.19.0 was measured on H200"
    assert cudnn.origin_of_workspace(get_gpu("A100")) == "asked of cuDNN 9.17.0 without a GPU"


def test_matrix_products_are_not_asked_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, Plan(engine=45, workspace=1 << 30))
    rest = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    x, weight, grad = meta(5, 64, 56, 56), meta(128, 64, 1, 1), meta(5, 128, 56, 56)
    with pytest.raises(Estimated) as forward:
        run(aten.convolution.default, x, weight, None, *rest)
    assert forward.value.bytes.usual == 0
    with pytest.raises(Estimated) as gradient:
        run(aten.convolution_backward.default, grad, x, weight, [128], *rest, [False, True, False])
    assert gradient.value.bytes.usual == 5 * 128 * 64 * 4  # one for each image


def test_flags_that_differ_from_those_of_recurrent_layers_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend:
        deterministic = False
        conv = types.SimpleNamespace(fp32_precision="ieee")

        @property
        def allow_tf32(self) -> bool:
            raise RuntimeError("have different TF32 flags")

    monkeypatch.setattr(torch.backends, "cudnn", Backend())
    assert cudnn._settings() == Settings(deterministic=False, allow_tf32=False)


MEASURED = read_table(SHIPPED / file_name(H200)).convolutions


def test_every_measured_convolution_lies_within_its_bounds() -> None:
    """And for most of them the usual amount is near, or right, even without the library."""
    num_near = num_right = 0
    for spelled, workspace in MEASURED.items():
        convolution = Convolution.parsed(spelled)
        assert convolution.spelled == spelled
        bytes = estimated(convolution)
        assert bytes.least <= workspace <= bytes.most, spelled
        num_near += abs(bytes.usual - workspace) <= sum(convolution.sizes) / 20
        num_right += bytes.usual == workspace
    assert len(MEASURED) > 10_000
    assert num_near > 0.75 * len(MEASURED)
    assert num_right > 0.65 * len(MEASURED)


# ---------------------------------------------------------------- as measured
X, WEIGHT = (4, 256, 14, 14), (256, 256, 3, 3)  # of ResNet-18
CALL = "forward float32 4,256,14,14 256,256,3,3 padding=1,1"


@pytest.mark.parametrize("version", [None, 91900])
def test_a_convolution_that_was_measured_is_exact(monkeypatch: pytest.MonkeyPatch, version: int | None) -> None:
    monkeypatch.setattr(cudnn, "version", lambda: version)
    assert run(aten.convolution.default, meta(*X), meta(*WEIGHT), None, *PLAIN) == [MEASURED[CALL]]


def test_it_is_estimated_with_another_version_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, Plan(engine=45, workspace=12_345), version=91700)
    with pytest.raises(Estimated, match=r"where 9\.19\.0 was measured on H200$"):
        run(aten.convolution.default, meta(*X), meta(*WEIGHT), None, *PLAIN)


@pytest.mark.usefixtures("without_library")
@pytest.mark.parametrize("setting", ["benchmark", "deterministic"])
def test_it_is_estimated_under_other_settings(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setattr(torch.backends.cudnn, setting, True)
    with pytest.raises(Estimated):
        run(aten.convolution.default, meta(*X), meta(*WEIGHT), None, *PLAIN)


@pytest.mark.usefixtures("without_library")
def test_it_is_estimated_where_all_of_torch_is_deterministic() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(Estimated):
            run(aten.convolution.default, meta(*X), meta(*WEIGHT), None, *PLAIN)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("batch", "engine", "workspace", "expected"),
    [
        (3, 67, 1_000_131, 1_000_000),
        (3, 45, 1_000_131, 1_000_131),  # an engine that does not share sums
        (3, 67, 1_000_128, 1_000_128),  # nothing is counted
        (300, 67, 1_000_131, 1_000_131),  # 345 tiles for 132 multiprocessors
    ],
)
def test_counters_of_shared_sums_are_left_out_where_there_are_few_tiles(
    monkeypatch: pytest.MonkeyPatch, batch: int, engine: int, workspace: int, expected: int
) -> None:
    answering(monkeypatch, Plan(engine, workspace))
    with pytest.raises(Estimated) as estimate:
        run(aten.convolution.default, meta(batch, 96, 14, 14), meta(96, 96, 3, 3), None, *PLAIN)
    assert estimate.value.bytes.usual == expected


# ---------------------------------------------------------------- depthwise convolutions
@pytest.mark.parametrize(
    ("dtype", "channels", "dilation", "known"),
    [(torch.float32, 64, 1, True), (bf16, 64, 1, True), (f16, 64, 1, False), (f16, 31, 1, True), (f16, 64, 2, True)],
)
def test_a_depthwise_convolution_is_mostly_torchs_own(
    dtype: torch.dtype, channels: int, dilation: int, known: bool
) -> None:
    x, weight = meta(2, channels, 16, 16, dtype=dtype), meta(channels, 1, 3, 3, dtype=dtype)
    args = (x, weight, None, [1, 1], [1, 1], [dilation, dilation], False, [0, 0], channels)
    if known:
        assert hidden(aten.convolution.default, *args) == []
        return
    with pytest.raises(Estimated, match=r"cuDNN chooses its workspace") as estimate:  # if torch chooses cuDNN
        run(aten.convolution.default, *args)
    assert (estimate.value.bytes.least, estimate.value.bytes.usual) == (0, 0)


def test_a_strided_image_of_a_depthwise_convolution_may_be_copied() -> None:
    x, weight, size = meta(2, 64, 8, 9).transpose(2, 3), meta(64, 1, 3, 3), 2 * 64 * 9 * 8 * 4
    with pytest.raises(Estimated, match="depthwise, of a tensor that is not contiguous") as estimate:
        run(aten.convolution.default, x, weight, None, *PLAIN[:-1], 64)
    assert estimate.value.bytes == Range(0, size, 2 * size)
    grad = meta(2, 64, 9, 8)
    with pytest.raises(Estimated) as estimate:
        run(aten.convolution_backward.default, grad, x, weight, None, *PLAIN[:-1], 64, [True, True, False])
    assert estimate.value.bytes == Range(0, size, 2 * size)


def test_the_gradients_of_a_depthwise_convolution_in_3d_are_bounded_by_copies() -> None:
    x, weight, settings = meta(2, 8, 4, 4, 4), meta(8, 1, 3, 3, 3), [[1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 8]
    with pytest.raises(Estimated, match=r"depthwise in 3d") as estimate:
        run(aten.convolution_backward.default, x, x, weight, None, *settings, [True, True, False])
    assert estimate.value.bytes == Range(0, 0, (2 * 2 * 8 * 64 + 8 * 27) * 4)


def test_a_depthwise_convolution_of_channels_last_is_cudnns(asked: list[Convolution]) -> None:
    x, weight = meta(2, 64, 16, 16).to(memory_format=last), meta(64, 1, 3, 3)
    assert run(aten.convolution.default, x, weight, None, *PLAIN[:-1], 64) == [10 * KiB]
    assert asked[0].is_depthwise


def test_a_transposed_depthwise_convolution_is_cudnns(asked: list[Convolution]) -> None:
    rest = ([1, 1], [1, 1], [1, 1], True, [0, 0], 8)
    assert run(aten.convolution.default, meta(2, 8, 16, 16), meta(8, 1, 3, 3), None, *rest) == [30 * KiB]


def test_the_gradient_of_a_depthwise_convolution_is_copied_before_the_bias_is_summed() -> None:
    x, weight = meta(2, 64, 16, 16), meta(64, 1, 3, 3)
    rest = (x, weight, [64], [1, 1], [1, 1], [1, 1], False, [0, 0], 64)
    backward = aten.convolution_backward.default
    assert hidden(backward, meta(2, 64, 16, 16), *rest, [True, True, True]) == []
    assert hidden(backward, expanded(2, 64, 16, 16), *rest, [True, True, False]) == [x.numel() * 4]
    assert hidden(backward, expanded(2, 64, 16, 16), *rest, [True, True, True]) == [x.numel() * 4 - 64 * 4]
