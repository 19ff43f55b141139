"""Values that a step asks for: the usual answer with a note, or a refusal that names the line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import memfix
from memfix.errors import MeasurementError
from memfix.meters.base import Reading
from memfix.meters.simulated.assumptions import state_range
from memfix.meters.timeline import Line

COUNTED = "the step counts the elements of a mask: assumed that all take part"
ALL_SET = "the step asks whether all of a mask is set: assumed that it is"
NONE_SET = "the step asks whether any of a mask is set: assumed that none is"
ALL_CHOSEN = "the step picks elements by a mask: assumed that all are picked, which is the most there can be"
EQUAL = "the step compares tensors by torch.equal: assumed that they are equal"


def asked(question: Any) -> tuple[Any, Reading]:
    """What ``question`` answers in a step of a [10, 20] tensor and its mask, and the reading."""
    answers: list[Any] = []

    def build(device: str) -> Any:
        x = torch.empty(10, 20, device=device, requires_grad=True)
        mask = torch.ones(10, 20, dtype=torch.bool, device=device)

        def step() -> None:
            answers.append(question(x, mask))
            x.grad = None

        return step

    reading = memfix.peak(build)
    return answers[-1], reading


@pytest.mark.parametrize(
    ("question", "answer", "note"),
    [
        (lambda x, mask: mask.sum().item(), 200, COUNTED),
        (lambda x, mask: int(mask[:3].sum()), 60, COUNTED),
        (lambda x, mask: (x > 0).sum().item(), 200, COUNTED),
        (lambda x, mask: mask.sum().clamp(min=1).item(), 200, COUNTED),
        (lambda x, mask: mask.sum().cpu().float().item(), 200, COUNTED),
        (lambda x, mask: mask.float().sum().item(), 200, COUNTED),
        (lambda x, mask: bool(mask.all()), True, ALL_SET),
        (lambda x, mask: "yes" if mask.all() else "no", "yes", ALL_SET),
        (lambda x, mask: bool(x.isnan().any()), False, NONE_SET),
        (lambda x, mask: torch.allclose(x, x + 1), True, ALL_SET),
        (lambda x, mask: torch.equal(x, x + 1), True, EQUAL),
        (lambda x, mask: x[mask].shape, (200,), ALL_CHOSEN),
        (lambda x, mask: x[mask[:, 0]].shape, (10, 20), ALL_CHOSEN),
        (lambda x, mask: x[:, mask[0]].shape, (10, 20), ALL_CHOSEN),
        (lambda x, mask: x.masked_select(mask).shape, (200,), ALL_CHOSEN),
        (lambda x, mask: x[mask].sum().backward(), None, ALL_CHOSEN),
    ],
)
def test_a_usual_answer_is_given_and_noted(question: Any, answer: Any, note: str) -> None:
    given, reading = asked(question)
    assert given == answer
    assert note in reading.notes
    assert not reading.exact


@pytest.mark.parametrize(
    ("question", "node"),
    [
        (lambda x, mask: x.prod().backward(), "ProdBackward"),
        (lambda x, mask: x.prod(1).sum().backward(), "ProdBackward"),
        (lambda x, mask: x.cumprod(1).sum().backward(), "CumprodBackward"),
    ],
)
def test_products_are_differentiated_as_if_no_element_were_zero(question: Any, node: str) -> None:
    _, reading = asked(question)
    assert f"{node} looks at values: assumed that no element is zero" in reading.notes
    assert not reading.exact


def test_a_mask_cast_to_integers_is_an_index_like_any_other() -> None:
    shape, reading = asked(lambda x, mask: x[mask[0].long()].shape)
    assert shape == (20, 20)
    assert reading.notes == ()


@pytest.mark.parametrize(
    ("question", "answer", "is_known"),
    [
        (lambda ids: int((ids != -100).sum()), 12, True),
        (lambda ids: int(((ids != -100) & (ids >= 0) & (ids < 50)).sum()), 12, True),
        (lambda ids: bool((ids < 50).all()), True, True),
        (lambda ids: int((ids != 7).sum()), 12, False),
        (lambda ids: int((ids < 49).sum()), 12, False),
        (lambda ids: int(((ids != -100) & (ids != 7)).sum()), 12, False),
        (lambda ids: int((ids.clone() != -100).sum()), 12, False),
        (lambda ids: int((ids.fill_(-100) != -100).sum()), 12, False),
    ],
)
def test_what_follows_from_a_stated_range_is_no_assumption(question: Any, answer: Any, is_known: bool) -> None:
    def build(device: str) -> Any:
        def step() -> None:
            ids = torch.empty(12, dtype=torch.int64, device=device)
            state_range(ids, 0, 50)
            assert question(ids) == answer

        return step

    assert memfix.peak(build).exact == is_known


def test_assumptions_of_the_warm_up_are_not_notes_of_the_step() -> None:
    def build(device: str) -> Any:
        mask = torch.ones(5, dtype=torch.bool, device=device)
        assert mask.sum().item() == 5
        return lambda: mask.logical_not()

    assert memfix.peak(build).notes == ()


@pytest.mark.parametrize(
    ("question", "operator"),
    [
        (lambda x, mask: x.sum().item(), "aten._local_scalar_dense.default"),
        (lambda x, mask: x.tolist(), "aten._local_scalar_dense.default"),
        (lambda x, mask: (mask.sum() - 1).item(), "aten._local_scalar_dense.default"),
        (lambda x, mask: mask.sum(0)[0].item(), "aten._local_scalar_dense.default"),
        (lambda x, mask: mask.sum().sub_(5).item(), "aten._local_scalar_dense.default"),
        (lambda x, mask: f"loss {x.mean():.3f}", "aten._local_scalar_dense.default"),
        (lambda x, mask: x.nonzero(), "aten.nonzero.default"),
        (lambda x, mask: x.detach().cpu().numpy(), "Tensor.numpy"),
        (lambda x, mask: np.asarray(x.detach().cpu()), "Tensor.numpy"),
        (lambda x, mask: torch.zeros(3).numpy(), "Tensor.numpy"),
    ],
)
def test_any_other_value_is_refused_with_the_users_line(question: Any, operator: str) -> None:
    place = Line(__file__, question.__code__.co_firstlineno, "").place
    with pytest.raises(MeasurementError) as refused:
        asked(question)
    assert str(refused.value) == (
        f"the step needs the values of a tensor ({operator}) at {place}, and simulated tensors have none; "
        "avoid .item() and data-dependent shapes in it, or measure with --meter=cuda"
    )


def test_numpy_of_a_tensor_that_torch_refuses_is_torchs_own_error() -> None:
    with pytest.raises(TypeError, match=r"^can't convert cuda:0 device type tensor to numpy"):
        asked(lambda x, mask: mask.numpy())
    with pytest.raises(RuntimeError, match=r"^Can't call numpy\(\) on Tensor that requires grad"):
        asked(lambda x, mask: x.cpu().numpy())
    with pytest.raises(MeasurementError, match=r"needs the values of a tensor \(Tensor\.numpy\)"):
        asked(lambda x, mask: x.numpy(force=True))


def test_real_tensors_still_have_values_after_a_refusal() -> None:
    with pytest.raises(MeasurementError):
        asked(lambda x, mask: x.detach().cpu().numpy())
    real = torch.ones(3)
    assert real.numpy().tolist() == [1, 1, 1]
    assert f"{real.sum():.1f}" == "3.0"
    assert torch.tensor([True, False]).sum().item() == 1
