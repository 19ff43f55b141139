"""Unknown values: the usual answer with a note, bounds under other answers, or a refusal with its line."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memfix
from memfix.errors import ON_A_GPU, MeasurementError
from memfix.meters.base import Reading
from memfix.meters.simulated import values
from memfix.meters.simulated.assumptions import (
    ALL_CHOSEN,
    ALL_SET,
    ANY_COUNT,
    COMPUTED,
    COUNTED,
    DRAWN,
    DRAWN_ONCE,
    EQUAL,
    EVEN,
    NO_BOUNDS,
    NO_LARGER_ID,
    NONE_SET,
    ONE_SIDED,
    OTHER_DRAWS,
)
from memfix.meters.simulated.tracking import state_range
from memfix.meters.simulated.workspace import cudnn
from memfix.meters.simulated.workspace.cudnn.plans import Plan

NUMBER = ": any value is assumed"


def asked(question: Any) -> tuple[Any, Reading]:
    """What ``question`` answers in a step of a [10, 20] tensor and a mask of it, and the reading."""
    answers: list[Any] = []

    def build(device: str) -> Any:
        x = torch.empty(10, 20, device=device, requires_grad=True)

        def step() -> None:
            answers.append(question(x, x > 0))
            x.grad = None

        return step

    reading = memfix.peak(build)
    return answers[1], reading  # after the warm-up, under the usual answers


@pytest.mark.parametrize(
    ("question", "answer", "note"),
    [
        (lambda x, mask: mask.sum().item(), 200, COUNTED),
        (lambda x, mask: int(mask[:3].sum()), 60, COUNTED),
        (lambda x, mask: mask.sum().clamp(min=1).item(), 200, COUNTED),
        (lambda x, mask: (mask.sum() - 1).item(), 199, COUNTED),
        (lambda x, mask: mask.sum(0)[0].item(), 10, COUNTED),
        (lambda x, mask: mask.sum().sub_(5).cpu().float().item(), 195, COUNTED),
        (lambda x, mask: mask.float().sum().item(), 200, COUNTED),
        (lambda x, mask: bool(mask.sum() == mask.numel()), True, COUNTED),
        (lambda x, mask: "yes" if mask.all() else "no", "yes", ALL_SET),
        (lambda x, mask: bool(mask.any()), False, NONE_SET),
        (lambda x, mask: torch.allclose(x, x + 1), True, ALL_SET),
        (lambda x, mask: torch.equal(x, x + 1), True, EQUAL),
        (lambda x, mask: x[mask].shape, (200,), ALL_CHOSEN),
        (lambda x, mask: x[mask[:, 0]].shape, (10, 20), ALL_CHOSEN),
        (lambda x, mask: x[:, mask[0]].shape, (10, 20), ALL_CHOSEN),
        (lambda x, mask: x.masked_select(mask).shape, (200,), ALL_CHOSEN),
        (lambda x, mask: x.nonzero().shape, (200, 2), ALL_CHOSEN),
        (lambda x, mask: x[mask].sum().backward(), None, ALL_CHOSEN),
    ],
)
def test_a_usual_answer_is_given_and_noted(question: Any, answer: Any, note: str) -> None:
    given, reading = asked(question)
    assert given == answer
    at_its_line = f"{note} (at tests/meters/test_assumptions.py:{question.__code__.co_firstlineno})"
    assert (at_its_line if note == ALL_CHOSEN else note) in reading.notes


def test_a_share_of_a_one_hot_mask_is_even() -> None:
    """As the experts of a mixture are asked for their tokens."""

    def tokens_of_an_expert(x: Any, mask: Any) -> int:
        experts = torch.nn.functional.one_hot(x.argmax(1), 5).permute(1, 0)
        (rows,) = torch.where(experts[3])
        return len(x[rows])

    number, reading = asked(tokens_of_an_expert)
    assert number == 2
    assert [note.partition(" (at ")[0] for note in reading.notes] == [EVEN]
    assert reading.at_least is not None
    assert reading.at_most is not None
    assert reading.at_least < reading.peak_bytes < reading.at_most


@pytest.mark.parametrize(
    "question",
    [
        lambda x, mask: x.sum().item(),
        lambda x, mask: f"loss {x.mean():.3f}",
        lambda x, mask: x.detach().tolist(),
        lambda x, mask: x.detach().cpu().numpy(),
        lambda x, mask: np.asarray(x.detach().cpu()),
        lambda x, mask: x.detach().numpy(force=True),
    ],
)
def test_a_number_that_goes_into_a_log_line_leaves_the_reading_exact(question: Any) -> None:
    _, reading = asked(lambda x, mask: (question(x, mask), None)[1])
    (note,) = reading.notes
    assert note.endswith(NUMBER)
    assert f"test_assumptions.py:{question.__code__.co_firstlineno}" in note
    assert reading.exact
    assert reading.at_most is None


def test_a_number_that_decides_what_is_allocated_gives_bounds() -> None:
    _, reading = asked(lambda x, mask: x.repeat(100, 1) if x.sum() > 1 else x * 2)
    assert not reading.exact
    assert reading.at_most is not None
    assert reading.at_most >= 100 * 200 * 4 > reading.peak_bytes
    assert reading.at_least == reading.peak_bytes


def test_a_number_that_a_step_refuses_does_not_hide_what_else_is_assumed() -> None:
    """As layers are dropped by chance in a step that checks its loss."""

    def dropped(x: Any, mask: Any) -> Any:
        if not 0 <= x.sum().item() < 1e9:
            raise ValueError("the loss is not finite")
        return x if torch.rand([]) < 0.001 else x.repeat(100, 1)

    _, reading = asked(dropped)
    assert not reading.exact
    assert reading.at_least is not None
    assert reading.at_least < 100 * 200 * 4 <= reading.peak_bytes


@pytest.mark.parametrize(
    ("question", "num_runs"),
    [
        (lambda x, mask: None, 1),
        (lambda x, mask: mask.sum().item(), 2),
        (lambda x, mask: len(x[mask]), 2),
        (lambda x, mask: bool(mask.all()), 2),
        (lambda x, mask: bool(mask.any()), 3),
        (lambda x, mask: (mask.sum().item(), x.sum().item()), 3),
        (lambda x, mask: (mask.sum().item(), bool(torch.rand((), device=x.device) < 0.5)), 3),
        (lambda x, mask: (mask.sum().item(), torch.rand(3)), 3),  # code may read its real memory unnoticed
    ],
)
def test_the_most_is_tried_only_where_the_usual_answers_are_not_it(question: Any, num_runs: int) -> None:
    num_built = 0

    def build(device: str) -> Any:
        nonlocal num_built
        num_built += 1
        x = torch.empty(10, 20, device=device)
        return lambda: question(x, x > 0)

    memfix.peak(build)
    assert num_built == num_runs


def rows_if(large: Any, device: str) -> torch.Tensor:
    return torch.empty(1000 if large else 1, 10, device=device)


def decided_in_build(x: torch.Tensor, kept: list[torch.Tensor]) -> Any:
    kept.append(rows_if(x.sum().item() > 1, "cuda"))
    return lambda: kept[0] * 2


def decided_at_the_first_call(x: torch.Tensor, kept: list[torch.Tensor]) -> Any:
    def step() -> Any:
        if not kept:
            kept.append(rows_if(x.sum().item() > 1, "cuda"))
        return kept[0] * 2

    return step


def asked_again_but_kept_from_the_first_call(x: torch.Tensor, kept: list[torch.Tensor]) -> Any:
    def step() -> Any:
        number = x.sum().item()
        if not kept:
            kept.append(rows_if(number > 1, "cuda"))
        return kept[0] * 2

    return step


@pytest.mark.parametrize(
    "decided", [decided_in_build, decided_at_the_first_call, asked_again_but_kept_from_the_first_call]
)
def test_a_number_that_decides_what_the_step_begins_with_gives_bounds(decided: Any) -> None:
    reading = memfix.peak(lambda device: decided(torch.empty(10, 20, device=device), []))
    assert not reading.exact
    assert (reading.peak_bytes, reading.at_least, reading.at_most) == (40, 40, 40_000)
    (note,) = reading.notes
    assert note.endswith(NUMBER)


def test_random_numbers_that_the_build_reads_are_noted_however_they_agree() -> None:
    def build(device: str) -> Any:
        rows = rows_if(torch.randn(8, device=device).sum().item() > 1e9, device)
        return lambda: rows * 2

    reading = memfix.peak(build)
    assert reading.exact
    assert reading.notes == (DRAWN,)


def drawing(*, of_labels: bool) -> Callable[[str], Callable[[], Any]]:
    """A step whose sizes depend on many random numbers, such as labels, or on a single one, as dropped layers do."""

    def build(device: str) -> Callable[[], Any]:
        labels = torch.randint(0, 2000, (200,), device=device)

        def step() -> torch.Tensor:
            if of_labels:
                return torch.empty(int((labels < 100).sum()) * 1000, device=device)
            return torch.empty(1000 if torch.rand([]) < 0.5 else 2000, device=device)

        return step

    return build


def test_many_random_numbers_that_decide_are_not_bounded_by_a_few_draws() -> None:
    reading = memfix.peak(drawing(of_labels=True))
    assert not reading.exact
    assert (reading.at_least, reading.at_most) == (None, None)
    assert {DRAWN, OTHER_DRAWS} <= {*reading.notes}


def test_a_single_random_number_that_decides_is_bounded_by_its_least_and_largest() -> None:
    reading = memfix.peak(drawing(of_labels=False))
    assert reading.notes == (DRAWN_ONCE,)
    assert (reading.at_least, reading.at_most) == (4000, 8000)


@pytest.mark.parametrize("reads", [False, True])
def test_a_kernel_without_bounds_leaves_none_to_a_kernel_that_has_some(reads: bool) -> None:
    """The kernel without bounds may take any workspace, at the peak too."""

    def build(device: str) -> Callable[[], Any]:
        ids, x = torch.randint(0, 9, (4096,), device=device), torch.rand(64, 64, device=device)

        def step() -> Any:
            rows = int((x.sum() > 0).item()) if reads else 0
            return ids.unique(), torch.linalg.eigh(x), torch.empty(1000 + rows, device=device)

        return step

    reading = memfix.peak(build)
    assert any("cuSOLVER" in note for note in reading.notes)
    assert any("how many values differ" in note for note in reading.notes)
    assert (reading.exact, reading.at_least, reading.at_most) == (False, None, None)


def test_distinct_values_keep_the_memory_of_all_elements() -> None:
    """Torch makes room before it knows how many values differ, and then only changes the shape."""

    def build(device: str) -> Callable[[], Any]:
        ids = torch.arange(1000, device=device) % 7
        return lambda: ids.unique()

    reading = memfix.peak(build)
    assert reading.held_bytes == 8000
    assert reading.at_least is not None
    assert reading.at_most is not None


def test_ids_that_are_counted_before_the_step_stay_a_doubt() -> None:
    def build(device: str) -> Any:
        counts = torch.bincount(torch.empty(10_000, dtype=torch.int64, device=device), minlength=5)
        return lambda: counts * 2

    reading = memfix.peak(build)
    assert not reading.exact
    assert reading.notes == (NO_LARGER_ID,)


@pytest.mark.parametrize(
    ("question", "num_built", "num_calls"),
    [
        (lambda x: None, 1, 2),
        (lambda x: x.sum().item(), 1, 4),  # the warm-up, the step, and one call for each other number
        (lambda x: 1 / (x.sum().item() > 0), 1, 4),  # the last call refuses its number
        (lambda x: x.repeat(9, 1) if x.sum().item() > 1 else None, 3, 7),  # the first other number matters
    ],
)
def test_a_number_for_a_log_line_is_tried_without_building_anew(question: Any, num_built: int, num_calls: int) -> None:
    built, called = [], []

    def build(device: str) -> Any:
        built.append(device)
        x = torch.empty(10, 20, device=device)

        def step() -> Any:
            called.append(device)
            return question(x)

        return step

    memfix.peak(build)
    assert (len(built), len(called)) == (num_built, num_calls)


def test_a_step_that_refuses_a_third_call_is_built_anew() -> None:
    built = []

    def build(device: str) -> Any:
        built.append(device)
        batches = iter(torch.empty(2, 10, 20, device=device))
        return lambda: (next(batches) * 2).sum().item()

    reading = memfix.peak(build)
    assert reading.exact
    assert len(built) == 3


def test_an_answer_that_ends_the_step_is_not_among_its_runs() -> None:
    def check(x: Any, mask: Any) -> Any:
        if x.sum() > 1:
            raise ValueError("a check of the user's")
        return x * 2

    assert asked(check)[1].exact


def test_a_loop_until_a_value_changes_comes_to_an_end() -> None:
    def until(x: Any, mask: Any) -> int:
        number = 0
        while x.sum() < 1:
            number += 1
        return number

    def until_not(x: Any, mask: Any) -> int:
        number = 0
        while not x.sum() < 1:
            number += 1
        return number

    assert asked(until)[1].peak_bytes == asked(until_not)[1].peak_bytes


def test_an_error_under_all_answers_is_the_users_own_or_names_the_value() -> None:
    def always(x: Any, mask: Any) -> None:
        x.sum().item()
        raise KeyError("theirs")

    def by_value(x: Any, mask: Any) -> None:
        raise KeyError(x.sum().item())

    with pytest.raises(KeyError, match="theirs"):
        asked(always)
    with pytest.raises(MeasurementError) as refused:
        asked(by_value)
    assert f"{NUMBER}; under all that were tried the step raises KeyError" in str(refused.value)
    assert str(refused.value).endswith(ON_A_GPU)


@pytest.mark.parametrize(
    "question",
    [
        lambda x, mask: x.isnan().any(),
        lambda x, mask: x.isinf().any(),
        lambda x, mask: (x != x).any(),
        lambda x, mask: not torch.isfinite(x.sum()),
        lambda x, mask: torch.isnan(x.new_empty(2**13, 2**10)).any(),
        lambda x, mask: torch.linalg.cholesky_ex(x @ x.T).info.any(),
    ],
)
def test_a_step_is_healthy(question: Any) -> None:
    """Its numbers are finite and its factorisations succeed: no assumption that could be another way."""
    answer, reading = asked(lambda x, mask: bool(question(x, mask)))
    assert answer is False
    assert not any("assumed" in note for note in reading.notes)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (lambda x: x.norm() + 1 > x.norm(), True),
        (lambda x: (x.norm() * 2 - 1).clamp(min=3) >= 3, True),
        (lambda x: x.sum() == x.mean(), False),
        (lambda x: 0.0 < x.mean() < 1.0, True),
    ],
)
def test_comparisons_of_one_step_agree_with_each_other(question: Any, answer: bool) -> None:
    found, reading = asked(lambda x, mask: bool(question(x)))
    assert found is answer
    assert reading.exact
    assert any(NUMBER in note for note in reading.notes)


def test_both_branches_of_a_comparison_are_measured() -> None:
    """Whatever the usual answer is, the other one is tried."""
    for limit in (0.1, 1e9):
        _, reading = asked(lambda x, mask, limit=limit: x.new_empty(1000) if x.norm() < limit else None)
        assert not reading.exact
        assert reading.at_least is not None
        assert reading.at_most >= reading.at_least + 3000


def test_a_solver_with_an_adaptive_step_comes_to_its_end() -> None:
    num_steps: list[int] = []

    def build(device: str) -> Any:
        x = torch.empty(100, device=device)

        def step() -> None:
            now, size = torch.zeros((), device=device), torch.full((), 0.1, device=device)
            num_steps.append(0)
            while now < 1:
                assert now + size > now, "underflow"
                error = (x * size).norm()
                if error <= 1:
                    now = now + size
                size = size * (0.9 / error).clamp(0.2, 5)
                num_steps[-1] += 1

        return step

    assert memfix.peak(build).peak_bytes > 0
    assert 1 < num_steps[1] < 10


def test_a_loop_whose_number_never_falls_comes_to_its_end() -> None:
    def descend(x: torch.Tensor) -> None:
        while x.norm() > 1e-6:
            x = x.detach() * 0.5

    _, reading = asked(lambda x, mask: descend(x))
    assert reading.peak_bytes > 0


@pytest.mark.parametrize("read", [lambda x: x.cpu().numpy(), lambda x: x.cpu().tolist(), lambda x: f"{x:.2f}"])
def test_a_number_that_is_read_is_noted_wherever_it_is_copied(read: Any) -> None:
    _, reading = asked(lambda x, mask: read(x.detach().mean()))
    assert any(NUMBER in note for note in reading.notes)


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
        (lambda ids: int((ids.fill_(-100) != -100).sum()), 0, True),
        (lambda ids: int((ids != 7).sum()), 12, False),
        (lambda ids: int((ids < 49).sum()), 12, False),
        (lambda ids: int(((ids != -100) & (ids != 7)).sum()), 12, False),
    ],
)
def test_what_follows_from_a_stated_range_is_no_assumption(question: Any, answer: Any, is_known: bool) -> None:
    answers = []

    def build(device: str) -> Any:
        def step() -> None:
            ids = torch.empty(12, dtype=torch.int64, device=device)
            state_range(ids, 0, 50)
            answers.append(question(ids))

        return step

    assert (memfix.peak(build).notes == ()) == is_known
    assert answers[0] == answer


def picking(refuses: Callable[[int], bool]) -> Reading:
    """The reading of a step that picks rows of a tensor by a mask, and refuses some numbers of them."""

    def build(device: str) -> Any:
        x = torch.empty(4000, 1000, device=device)

        def step() -> None:
            picked = x[x.mean(1) > 0]
            if refuses(len(picked)):
                raise ValueError("so many cannot be picked")
            picked * 2

        return step

    return memfix.peak(build)


ALL_PICKED = 4000 * 1000 * 4


def test_a_step_that_raises_if_nothing_is_picked_is_measured_with_one_element() -> None:
    reading = picking(lambda number: number == 0)
    assert not reading.exact
    assert reading.at_least is not None
    assert reading.at_least < ALL_PICKED < reading.peak_bytes == reading.at_most


@pytest.mark.parametrize("refuses", [lambda number: number < 100, lambda number: number > 3000], ids=["few", "many"])
def test_a_step_that_raises_at_an_unknown_number_has_no_bounds(refuses: Callable[[int], bool]) -> None:
    reading = picking(refuses)
    assert (reading.exact, reading.at_least, reading.at_most) == (False, None, None)
    assert ONE_SIDED in reading.notes


def test_a_count_that_decides_may_be_any_number() -> None:
    def build(device: str) -> Any:
        counts = torch.empty(3_000_000, dtype=torch.int64, device=device)
        return lambda: torch.empty(10 * int(counts.max()), device=device)

    reading = memfix.peak(build)
    assert (reading.exact, reading.at_least, reading.at_most) == (False, None, None)
    assert ANY_COUNT in reading.notes


def test_a_step_that_only_runs_if_all_are_picked_takes_no_less() -> None:
    assert picking(lambda number: number < 4000).exact


def test_assumptions_of_the_build_that_do_not_matter_are_not_notes_of_the_step() -> None:
    def build(device: str) -> Any:
        mask = torch.empty(5, device=device) > 0
        assert mask.sum().item() == 5
        return lambda: mask.logical_not()

    assert memfix.peak(build).notes == ()


def test_too_many_values_are_refused_with_the_users_line() -> None:
    question = lambda x, mask: x.detach().repeat(2**14, 2**14).cpu().numpy()  # noqa: E731
    with pytest.raises(MeasurementError) as refused:
        asked(question)
    assert str(refused.value) == (
        f"the step needs the values of a tensor (Tensor.numpy) at {__file__}:{question.__code__.co_firstlineno}, "
        f"which are unknown; {ON_A_GPU}"
    )


def test_numpy_of_a_tensor_that_torch_refuses_is_torchs_own_error() -> None:
    with pytest.raises(TypeError, match=r"^can't convert cuda:0 device type tensor to numpy"):
        asked(lambda x, mask: mask.numpy())
    with pytest.raises(RuntimeError, match=r"^Can't call numpy\(\) on Tensor that requires grad"):
        asked(lambda x, mask: x.cpu().numpy())


def test_real_tensors_still_have_values_afterwards() -> None:
    asked(lambda x, mask: x.detach().cpu().numpy())
    real = torch.ones(3)
    assert real.numpy().tolist() == [1, 1, 1]
    assert f"{real.sum():.1f}" == "3.0"
    assert torch.tensor([True, False]).sum().item() == 1


def halves(start: Callable[[str], torch.Tensor], device: str) -> Callable[[], int]:
    """Halves a tensor until its norm is below 1, and keeps every half."""
    x = start(device)

    def step() -> int:
        kept = [x]
        while kept[-1].norm().item() >= 1:
            kept.append(kept[-1] / 2)
        return len(kept) - 1

    return step


def weights(device: str) -> torch.Tensor:
    return torch.linspace(-1, 1, 2**16).to(device)


def test_values_are_computed_where_they_end_a_loop() -> None:
    """So many values are not kept otherwise; a third of 2**16 is their square's sum, so the norm is 148."""
    num_halves = halves(weights, "cpu")()
    assert num_halves == 8
    reading = memfix.peak(partial(halves, weights))
    assert reading.peak_bytes >= num_halves * 2**18
    assert reading.peak_bytes < num_halves * 2**18 + 2**12
    assert (reading.exact, reading.notes) == (False, (COMPUTED,))


@pytest.mark.parametrize("loss_of", [torch.mean, lambda x: nn.functional.mse_loss(x, x.detach())])
def test_a_loop_that_ends_when_a_loss_stays_depends_on_it(loss_of: Any) -> None:
    """A patience of three: whether the loss falls far enough is tried too."""

    def build(device: str) -> Any:
        x = torch.empty(2**23, device=device)  # too many values to be computed

        def step() -> list[torch.Tensor]:
            best, waited, kept = float("inf"), 0, []
            while waited < 3 and len(kept) < 9:
                kept.append(loss_of(x))
                loss = kept[-1].item()
                waited = 0 if loss < best - 1e-2 else waited + 1
                best = min(best, loss)
            return kept

        return step

    reading = memfix.peak(build)
    assert not reading.exact
    assert NO_BOUNDS in reading.notes


def test_a_loop_that_drawn_values_end_is_bounded_beyond_what_was_drawn() -> None:
    def scaled(device: str) -> torch.Tensor:
        return weights(device) * 2.0 ** torch.randint(0, 9, (1,), device=device)

    reading = memfix.peak(partial(halves, scaled))
    assert {DRAWN, COMPUTED} <= {*reading.notes}
    assert reading.at_least is not None
    assert reading.at_most is not None
    drawn = reading.at_most - reading.at_least  # three times the range of the draws
    assert reading.at_least + drawn // 3 <= reading.peak_bytes <= reading.at_most - drawn // 3


@pytest.mark.parametrize("limit", ["MORE_FLOATS", "MOST_WORK", "MOST_BYTES"])
def test_a_loop_whose_values_are_too_much_work_has_no_bounds(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(values, limit, 2**14)
    reading = memfix.peak(partial(halves, weights))
    assert (reading.exact, reading.at_least, reading.at_most) == (False, None, None)
    assert NO_BOUNDS in reading.notes


def test_values_on_the_cpu_take_no_more_memory_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(device: str) -> Any:
        layers = [nn.Linear(64, 64) for _ in range(64)]  # 1 MiB and more
        step = halves(weights, device)
        return lambda: (step(), layers)[0]

    monkeypatch.setattr(values, "MOST_BYTES", 2**22)
    assert COMPUTED in memfix.peak(partial(halves, weights)).notes
    assert NO_BOUNDS not in memfix.peak(build).notes
    monkeypatch.setattr(values, "MOST_BYTES", 2**20)
    assert NO_BOUNDS in memfix.peak(build).notes


def test_freed_values_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is freed can be used again: eight halves of 256 KiB, one after the other, fit into 1 MiB."""

    def build(device: str) -> Any:
        x = weights(device)

        def step() -> torch.Tensor:
            half = x
            while half.norm().item() >= 1:
                half = half / 2
            return torch.zeros(int(half.norm().item() * 2**20), device=device)

        return step

    monkeypatch.setattr(values, "MOST_BYTES", 2**20)
    assert COMPUTED in memfix.peak(build).notes


def test_layers_that_a_drawn_number_drops_are_bounded_by_all_and_none() -> None:
    def build(device: str) -> Any:
        layers = nn.Sequential(*(nn.Linear(64, 64, device=device) for _ in range(8)))
        x = torch.randn(32, 64, device=device, requires_grad=True)

        def step() -> None:
            y = x
            for layer in layers:
                if torch.rand([]) >= 0.5:
                    y = layer(y)
            y.sum().backward()

        return step

    reading = memfix.peak(build)
    assert not reading.exact
    assert reading.at_least is not None
    assert reading.at_most is not None
    every, size = 8 * 32 * 64 * 4, 32 * 64 * 4
    assert reading.at_least <= size < every <= reading.at_most


def test_ids_that_are_not_known_are_counted_up_to_the_given_number() -> None:
    def build(device: str) -> Any:
        ids = torch.randn(9999, 8, device=device).argmax(-1)
        return partial(torch.bincount, ids, minlength=64)

    reading = memfix.peak(build)
    assert not reading.exact
    assert NO_LARGER_ID in reading.notes
    assert reading.held_bytes == 64 * 8


def convolved(device: str) -> Any:
    image = torch.empty(3, 40, 33, 35, device=device, dtype=torch.bfloat16)
    weight = torch.empty(24, 40, 3, 3, device=device, dtype=torch.bfloat16)
    return lambda: torch.nn.functional.conv2d(image, weight)


def test_a_convolution_that_was_not_measured_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "first_plan", lambda *_: None)
    reading = memfix.peak(convolved)
    assert not reading.exact
    assert reading.at_least == 3 * 24 * 31 * 33 * 2  # the output alone
    assert reading.at_least < reading.peak_bytes < reading.highest_bytes


def test_bounds_that_meet_are_still_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "first_plan", lambda *_: None)

    def build(device: str) -> Any:
        convolve = convolved(device)
        return lambda: (torch.empty(10**9, device=device), None)[1] or convolve()

    reading = memfix.peak(build)
    assert not reading.exact
    assert reading.at_least == reading.peak_bytes == reading.at_most == 4 * 10**9


def test_bounds_of_values_and_of_convolutions_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "first_plan", lambda *_: None)
    picked = 100 * 200 * 4

    def build(device: str) -> Any:
        convolve, x = convolved(device), torch.empty(100, 200, device=device)
        return lambda: (x[x > 0], convolve())

    plain, both = memfix.peak(convolved), memfix.peak(build)
    assert both.at_least == plain.at_least
    assert both.highest_bytes >= plain.highest_bytes + picked


def test_a_convolution_whose_plan_is_asked_is_still_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "version", lambda: 91900)
    monkeypatch.setattr(cudnn, "first_plan", lambda *_: Plan(engine=45, workspace=1_000_000))
    reading = memfix.peak(convolved)
    assert reading.peak_bytes == 3 * 24 * 31 * 33 * 2 + 1_000_000
    assert not reading.exact
    assert any(note.endswith("asked of cuDNN 9.19.0 without a GPU") for note in reading.notes)
