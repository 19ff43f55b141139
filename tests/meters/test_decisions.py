"""Values that the user decides: a router's choices, masks and numbers, by module, function and line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfix
from memfix.errors import UsageError
from memfix.meters.base import Reading
from memfix.meters.simulated.assumptions import EVEN

TOKENS, WIDTH, EXPERTS, CHOICES = 256, 64, 8, 2
EVENLY = (torch.arange(TOKENS * CHOICES) % EXPERTS).view(TOKENS, CHOICES)
ALL_ALIKE = torch.arange(CHOICES).expand(TOKENS, CHOICES).contiguous()


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return torch.topk(self.gate(x).softmax(-1), CHOICES)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        )


class Looped(Mixture):
    """As in transformers: a loop over the experts, each of which looks for its tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x)
        masks = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            choice, token = torch.where(masks[number])
            out.index_add_(0, token, expert(x[token]) * weights[token, choice, None])
        return out


class Split(Mixture):
    """Tokens sorted by expert, and split by how many each has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x)
        ids = chosen.flatten()
        order = ids.argsort()
        parts = x[order // CHOICES].split(torch.bincount(ids, minlength=EXPERTS).tolist())
        done = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return torch.zeros_like(x).index_add(0, order // CHOICES, done * weights.flatten()[order, None])


class Grouped(nn.Module):
    """Tokens sorted by expert, and one product of all groups."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, chosen = self.router(x)
        ids = chosen.flatten()
        order = ids.argsort()
        ends = torch.bincount(ids, minlength=EXPERTS).cumsum(0).to(torch.int32)
        done = torch._grouped_mm(x[order // CHOICES].bfloat16(), self.up, offs=ends)
        return torch.zeros_like(x).index_add(0, order // CHOICES, done.float())


def peak(mixture: type[nn.Module], assume: Any = None, layers: int = 1) -> Reading:
    def build(device: str) -> Any:
        model = nn.Sequential(*(mixture() for _ in range(layers))).to(device)
        x = torch.randn(TOKENS, WIDTH, device=device)

        def step() -> None:
            model.zero_grad()
            model(x).sum().backward()

        return step

    return memfix.peak(build, assume=assume)


# ---------------------------------------------------------------- mixtures of experts
@pytest.mark.parametrize("mixture", [Looped, Split])
def test_undecided_choices_are_even_and_the_worst_is_their_bound(mixture: type[nn.Module]) -> None:
    undecided, even, worst = peak(mixture), peak(mixture, {"router": EVENLY}), peak(mixture, {"router": ALL_ALIKE})
    assert undecided.peak_bytes == even.peak_bytes
    assert not undecided.exact
    assert undecided.at_most is not None
    assert even.peak_bytes < worst.peak_bytes <= undecided.at_most < 2 * worst.peak_bytes


def test_decided_choices_leave_the_reading_exact() -> None:
    reading = peak(Looped, {"router": EVENLY})
    assert (reading.exact, reading.notes) == (True, ())


@pytest.mark.parametrize(
    ("how", "values"), [("even", EVENLY), ("worst", ALL_ALIKE), (lambda fake: ALL_ALIKE.reshape(fake.shape), ALL_ALIKE)]
)
def test_choices_are_decided_in_a_word_or_by_a_function(how: Any, values: torch.Tensor) -> None:
    assert peak(Looped, {"router": how}).peak_bytes == peak(Looped, {"router": values}).peak_bytes


def test_the_shape_of_grouped_products_does_not_depend_on_choices() -> None:
    assert peak(Grouped).peak_bytes == peak(Grouped, {"router": ALL_ALIKE}).peak_bytes


def test_a_module_is_named_after_its_parents_where_there_are_several() -> None:
    both, first = peak(Looped, {"router": "even"}, layers=2), peak(Looped, {"1.router": "even"}, layers=2)
    assert both.exact
    assert not first.exact
    assert peak(Looped, {"1.router": "even", "0.router": "even"}, layers=2).peak_bytes == both.peak_bytes


def test_a_note_names_the_line_that_a_key_may_name() -> None:
    (note,) = peak(Looped).notes
    assert note.startswith(EVEN)
    place = note.rpartition("(at ")[2].rstrip(")")
    assert place.startswith("tests/meters/test_decisions.py:")
    decided = peak(Looped, {place: "even"})
    assert (decided.exact, decided.peak_bytes) == (True, peak(Looped).peak_bytes)
    assert peak(Looped, {place.rpartition("/")[2]: "worst"}).peak_bytes == peak(Looped).at_most


# ---------------------------------------------------------------- masks and numbers
def asked(question: Any, assume: Any) -> tuple[Reading, Any]:
    """The reading of a step with a [10, 20] tensor, and what ``question`` answers in it."""
    answers: list[Any] = []

    def build(device: str) -> Any:
        x = torch.empty(10, 20, device=device)
        return lambda: answers.append(question(x))

    reading = memfix.peak(build, assume=assume)
    return reading, answers[1]  # after the warm-up, under the usual answers


def picked(x: torch.Tensor) -> Any:
    return x[x.sum(1) > 0].shape


def read(x: torch.Tensor) -> Any:
    return x.sum().item()


MASK = torch.tensor([True] * 3 + [False] * 7)


@pytest.mark.parametrize("decision", [3, MASK, lambda fake: MASK if fake.dtype == torch.bool else None])
def test_a_mask_is_decided_by_its_values_or_their_number(decision: Any) -> None:
    reading, shape = asked(picked, {"picked": decision})
    assert shape == (3, 20)
    assert (reading.exact, reading.notes) == (True, ())


def test_a_number_is_decided() -> None:
    reading, number = asked(read, {"read": 7.5})
    assert number == 7.5
    assert (reading.exact, reading.notes) == (True, ())


def split(x: torch.Tensor) -> Any:
    return [len(part) for part in x.split((x.sum(1) > 0).long().cumsum(0)[:3].tolist())]


def test_a_list_is_decided_by_its_values() -> None:
    reading, lengths = asked(split, {"split": torch.tensor([2, 3, 5])})
    assert lengths == [2, 3, 5]
    assert (reading.exact, reading.notes) == (True, ())


def chosen(x: torch.Tensor) -> torch.Tensor:
    return x[:, :5].argmax(1)


def shared(x: torch.Tensor) -> list[int]:
    """As in transformers: experts that have tokens are asked by an index, which copies each mask."""
    masks = F.one_hot(chosen(x), 5).permute(1, 0)
    hit = (masks.sum(1) > 0).nonzero()
    return [len(torch.where(masks[number].squeeze(0))[0]) for number in hit]


@pytest.mark.parametrize(("how", "shares"), [("even", [2, 2, 2, 2, 2]), ("worst", [10, 0, 0, 0, 0])])
def test_experts_share_the_tokens(how: str, shares: list[int]) -> None:
    assert asked(shared, {"shared": how})[1] == shares
    assert asked(shared, {"chosen": how})[1] == [share for share in shares if share]


# ---------------------------------------------------------------- refusals
IDS = "(256, 2) of torch.int64"
RETURNS = f"assume['router'] must return values on the CPU, {IDS}, got "


@pytest.mark.parametrize(
    ("assume", "message"),
    [
        ({"rooter": EVENLY}, "assume: the step has no place 'rooter' (did you mean '0.router'?); notes name the lines"),
        (["router"], "assume must have values by their places, such as {'router': 'even'}, got ['router']"),
        ({"moe.py:12": "even"}, "assume: the step has no place 'moe.py:12'"),
        (
            {"router": EVENLY[:5]},
            "assume['router'], (5, 2) of torch.int64, decides nothing there; the undecided tensors",
        ),
        ({"router": EVENLY.int()}, "assume['router'], (256, 2) of torch.int32, decides nothing there"),
        ({"router": lambda fake: ALL_ALIKE[:3]}, f"{RETURNS}(3, 2) of torch.int64"),
        ({"router": lambda fake: fake}, f"{RETURNS}{IDS} on meta"),
        ({"router": lambda fake: 3}, f"{RETURNS}3"),
        ({"router": "uneven"}, "assume['router'] must be values, a function, 'even' or 'worst', got 'uneven'"),
    ],
)
def test_a_decision_that_contradicts_the_code_is_refused(assume: Any, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        peak(Looped, assume)
    assert str(refused.value).startswith(message)
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not torch.nn.modules.module._global_forward_hooks


def test_more_than_a_mask_has_cannot_be_picked() -> None:
    with pytest.raises(UsageError, match=r"^assume\['picked'\] must pick 0 to 10 elements there, got 11$"):
        asked(picked, {"picked": 11})


def test_values_on_a_real_gpu_are_not_decided() -> None:
    with pytest.raises(
        UsageError, match=r"^assume decides values that only the simulated meter lacks, got meter='cuda'$"
    ):
        memfix.peak(lambda device: lambda: None, meter="cuda", assume={"router": "even"})
