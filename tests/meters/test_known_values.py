"""Values that are known: what the user gave, and what operators made of it, can be read and leaves a reading exact."""

from __future__ import annotations

import contextlib
import copy
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorConverter
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

import memfix
from memfix.meters.base import Reading
from memfix.meters.simulated.assumptions import COPIED, DRAWN, OTHER_DRAWS
from memfix.meters.simulated.values import MOST_FLOATS, MOST_INTEGERS


def answered(question: Any) -> tuple[Any, Reading]:
    """What ``question`` gives in a step on the simulated GPU, and the reading."""
    answers = []

    def build(device: str) -> Any:
        return lambda: answers.append(question(device))

    reading = memfix.peak(build)
    return answers[-1], reading


def ones(device: str, *size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.int64, device=device)


def written(device: str) -> torch.Tensor:
    mask = ones(device, 2, 5)
    mask[0, 3:] = 0
    view = mask.t()[4]
    view.mul_(0)
    return mask


def in_parts(device: str) -> torch.Tensor:
    parts = torch.empty(5, dtype=torch.int64, device=device)
    parts[:2] = 7
    parts[2:4].copy_(torch.tensor([3, 4], device=device))
    parts[4:].random_(6, 7)
    return parts


def summed_into_a_part(device: str) -> torch.Tensor:
    sums = torch.empty(4, dtype=torch.int64, device=device)
    sums[:1].zero_()
    torch.cumsum(torch.tensor([2, 0, 5], device=device), 0, out=sums[1:])
    return sums


def filled_in_a_part(device: str) -> torch.Tensor:
    counts = torch.arange(3, device=device)
    torch.zeros(2, dtype=torch.int64, device=device, out=counts[1:])
    return counts


def unscaled(device: str, num_elements: int) -> list[float]:
    gradient, found_inf = torch.ones(num_elements, device=device), torch.zeros(1, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_([gradient], found_inf, torch.tensor(0.5, device=device))
    return [gradient[-1].item(), found_inf.item()]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (lambda d: bool(ones(d, 2, 5).all()), True),
        (lambda d: unscaled(d, 3), [0.5, 0]),
        (lambda d: in_parts(d).tolist(), [7, 7, 3, 4, 6]),
        (lambda d: summed_into_a_part(d).tolist(), [0, 2, 2, 7]),
        (lambda d: filled_in_a_part(d).tolist(), [0, 0, 0]),
        (lambda d: (torch.ones(2, 3, device=d) @ torch.ones(3, device=d)).tolist(), [3, 3]),
        (lambda d: int(ones(d, 2, 5).sum()), 10),
        (lambda d: written(d).tolist(), [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]),
        (lambda d: written(d).sum(-1).tolist(), [3, 4]),
        (lambda d: written(d).bool()[1].nonzero().flatten().tolist(), [0, 1, 2, 3]),
        (lambda d: torch.empty(2, 5, device=d)[written(d).bool()].shape[0], 7),
        (lambda d: torch.empty(2, 5, device=d).masked_select(written(d).bool()).shape[0], 7),
        (lambda d: torch.unique(written(d)).tolist(), [0, 1]),
        (lambda d: torch.repeat_interleave(torch.tensor([2, 0, 1], device=d)).tolist(), [0, 0, 2]),
        (lambda d: torch.tensor([3, 5], device=d).cumsum(0)[-1].item(), 8),
        (lambda d: (torch.arange(4, device=d) == 9).any().item(), False),
        (lambda d: torch.linspace(0, 0.1, 3).tolist(), pytest.approx([0, 0.05, 0.1])),
        (lambda d: torch.full((3,), 2.5, device=d).cpu().numpy().tolist(), [2.5, 2.5, 2.5]),
        (lambda d: bool(torch.ones(2**12, 2**12, dtype=torch.bool, device=d).logical_not().any()), False),
        (lambda d: int(torch.ones(2**12, 2**12, device=d).sum()), 2**24),
        (lambda d: torch.empty(3).data.fill_(0.5).tolist(), [0.5, 0.5, 0.5]),
        (lambda d: torch.equal(torch.tensor([1, 2], device=d), torch.tensor([1, 3], device=d)), False),
    ],
)
def test_known_values_give_the_true_answer(question: Any, answer: Any) -> None:
    given, reading = answered(question)
    assert given == answer
    assert not any("assumed" in note for note in reading.notes)


def test_what_an_unknown_value_is_mixed_into_is_unknown() -> None:
    def mixed(device: str) -> int:
        counts = torch.zeros(3, dtype=torch.int64, device=device)
        counts[1] = (torch.empty(9, device=device) > 0).sum()
        return int(counts.sum())

    _, reading = answered(mixed)
    assert any("unknown" in note or "assumed" in note for note in reading.notes)


@pytest.mark.parametrize("known_first", [True, False])
def test_one_unknown_part_makes_the_whole_unknown(known_first: bool) -> None:
    def mixed(device: str) -> int:
        counts = torch.empty(2, dtype=torch.int64, device=device)
        parts = [torch.ones(1, dtype=torch.int64, device=device), torch.empty(1, device=device).long()]
        for place in (0, 1) if known_first else (1, 0):
            counts[place : place + 1].copy_(parts[place])
        return int(counts.sum())

    _, reading = answered(mixed)
    assert any("unknown" in note for note in reading.notes)


@pytest.mark.parametrize("part", [torch.arange(2), None])
def test_a_known_part_that_is_written_as_out_does_not_make_the_whole_known(part: torch.Tensor | None) -> None:
    def mixed(device: str) -> int:
        counts = torch.empty(3, device=device).long() if part is not None else torch.arange(3, device=device)
        source = torch.empty(2, device=device).long() if part is None else part.to(device)
        torch.cumsum(source, 0, out=counts[1:])
        return int(counts[0]) + int(counts[2])

    _, reading = answered(mixed)
    assert any("unknown" in note for note in reading.notes)


def test_memory_that_nothing_was_written_into_has_no_values() -> None:
    _, reading = answered(lambda d: torch.empty(3, device=d)[1].item())
    assert any("unknown" in note for note in reading.notes)


def count(ids, counts):
    """A kernel, once ``triton.jit`` has it."""
    tl.atomic_add(counts + tl.load(ids + tl.program_id(0)), 1)  # noqa: F821


def test_what_a_kernel_writes_into_is_unknown_and_what_it_reads_is_not() -> None:
    kernel = pytest.importorskip("triton").jit(count)

    def counted(device: str, words: bool) -> tuple[int, int]:
        ids, counts = torch.ones(3, dtype=torch.int64, device=device), torch.zeros(3, dtype=torch.int64, device=device)
        if words:
            kernel[(3,)](counts=counts, ids=ids)
        else:
            kernel[(3,)](ids, counts)
        return int(ids.sum()), int(counts.sum())

    for words in (False, True):
        (known, _), reading = answered(partial(counted, words=words))
        assert known == 3
        assert len(reading.notes) == 1
        assert "the step reads an unknown flag or count at " in reading.notes[0]


def test_what_an_unknown_value_is_written_into_has_no_old_value() -> None:
    def written_to(device: str) -> float:
        total = torch.zeros(2)
        total[0].copy_(torch.empty(9, device=device).sum())
        return total[0].item()

    number, reading = answered(written_to)
    assert number != 0
    assert COPIED in reading.notes


def test_unscaling_forgets_gradients_that_it_cannot_compute_but_not_its_flag() -> None:
    (_, found_inf), reading = answered(lambda d: unscaled(d, MOST_FLOATS + 1))
    assert found_inf == 0
    assert any("unknown" in note for note in reading.notes)


@pytest.mark.parametrize("factor", [torch.rand, torch.empty])
def test_lists_written_in_place_rest_on_what_is_written(factor: Any) -> None:
    def written(device: str) -> float:
        weights = [torch.ones(4, device=device)]
        torch._foreach_mul_(weights, factor((), device=device).norm())
        return weights[0][0].item()

    _, reading = answered(written)
    assert reading.notes != ()


@pytest.mark.parametrize("num_elements", [4, MOST_FLOATS + 1])
@pytest.mark.parametrize("of_storage", [True, False])
def test_memory_that_a_storage_gains_has_no_values(num_elements: int, of_storage: bool) -> None:
    def grown(device: str) -> float:
        tensor = torch.ones(num_elements, device=device)
        if of_storage:
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            storage.resize_(0)
            storage.resize_(size)
        else:
            tensor.resize_(num_elements + 1)
        return tensor.amax().item()

    _, reading = answered(grown)
    assert any("unknown" in note for note in reading.notes)


def test_values_of_many_elements_are_not_kept() -> None:
    def read(device: str, number: int, dtype: torch.dtype) -> None:
        torch.arange(number, dtype=dtype, device=device)[-1].item()

    for most, dtype in ((MOST_INTEGERS, torch.int64), (MOST_FLOATS, torch.float32)):
        assert answered(lambda d, m=most, t=dtype: read(d, m, t))[1].notes == ()
        assert answered(lambda d, m=most, t=dtype: read(d, m + 1, t))[1].notes != ()


def test_random_numbers_are_drawn_and_leave_the_callers_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    kept, reading = answered(
        lambda d: [torch.rand([]).item() < 2, torch.randint(0, 9, (4,), device=d).max().item() < 9]
    )
    assert kept == [True, True]
    assert reading.exact
    assert torch.equal(torch.rand(2), expected)

    def shortened(device: str) -> Any:
        torch.manual_seed(0)
        return torch.empty(1000, 64, device=device)[torch.randint(0, 2, (1000,), device=device) == 0]

    _, reading = answered(lambda d: (shortened(d), None)[1])
    assert {DRAWN, OTHER_DRAWS} <= {*reading.notes}
    assert (reading.exact, reading.at_least) == (False, None)


def test_a_simulation_leaves_the_generators_of_real_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    memfix.peak(lambda device: lambda: torch.randn(3, device=device))
    assert seeds == []


def test_ones_like_random_numbers_rest_on_nothing() -> None:
    _, reading = answered(lambda d: bool(torch.ones_like(torch.randint(0, 9, (2, 5))).to(d).all()))
    assert reading.notes == ()


# ---------------------------------------------------------------- as users write it
def test_a_loop_over_a_loader_that_logs_its_loss_is_exact() -> None:
    losses: list[float] = []

    def build(device: str) -> Any:
        model = nn.Linear(8, 3).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))

        def step() -> None:
            for x, y in DataLoader(data, batch_size=16, shuffle=True, num_workers=2, pin_memory=True):
                loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())

        return step

    reading = memfix.peak(build)
    assert losses
    assert reading.exact


def test_an_attention_mask_of_ones_is_seen_to_be_one() -> None:
    paths: list[str] = []

    def build(device: str) -> Any:
        mask = torch.ones(2, 16, dtype=torch.int64).to(device)
        x = torch.randn(2, 4, 16, 8, device=device)

        def step() -> None:
            paths.append("no mask" if mask.sum() == mask.numel() else "mask")
            nn.functional.scaled_dot_product_attention(x, x, x)

        return step

    assert memfix.peak(build).exact
    assert set(paths) == {"no mask"}


def test_packed_sequences_are_measured_by_their_lengths() -> None:
    shapes = []

    def build(device: str) -> Any:
        x, lengths = torch.randn(4, 10, 8, device=device), torch.tensor([10, 7, 5, 2])
        cells = nn.LSTM(8, 16, batch_first=True).to(device)

        def step() -> None:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            shapes.append(packed.data.shape)
            padded, _ = nn.utils.rnn.pad_packed_sequence(cells(packed)[0], batch_first=True)
            padded.sum().backward()

        return step

    memfix.peak(build)
    assert set(shapes) == {(24, 8)}


def test_an_index_on_the_cpu_is_copied_to_the_gpu() -> None:
    def build(device: str) -> Any:
        table, rows = torch.randn(100, 512, device=device, requires_grad=True), torch.randint(0, 100, (20,))

        def step() -> None:
            table[rows].sum().backward()
            table.grad = None

        return step

    reading = memfix.peak(build)
    assert reading.exact
    assert any(row.what.startswith("_to_copy") and row.bytes == 20 * 8 for row in reading.alive_at_peak)


def small_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> Any:
    x = torch.ones(4, 16, device=device)

    def step() -> None:
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_an_optimizer_from_before_the_move_trains_the_moved_parameters() -> None:
    def build(device: str, moves_first: bool) -> Any:
        net = small_net()
        net = net.to(device) if moves_first else net
        optimizer = torch.optim.AdamW(net.parameters())
        return trained(net.to(device), optimizer, device)

    before, after = (memfix.peak(partial(build, moves_first=moves_first)) for moves_first in (True, False))
    assert (before.peak_bytes, before.base_bytes) == (after.peak_bytes, after.base_bytes)


@pytest.mark.parametrize("move", ["to", "data"])
def test_what_a_step_makes_moves_and_drops_is_freed(move: str) -> None:
    """As a loss of detection does, which is a module with a buffer."""

    def build(device: str) -> Any:
        def step() -> None:
            net = small_net()
            if move == "to":
                net.to(device)
            else:
                for tensor in (*net.parameters(), *net.buffers()):
                    tensor.data = tensor.data.to(device)
            optimizer = torch.optim.AdamW(net.parameters())
            trained(net, optimizer, device)()

        return step

    reading = memfix.peak(build)
    assert reading.peak_bytes > 0
    assert (reading.held_bytes, reading.leaked_bytes) == (0, 0)


@pytest.mark.parametrize("kind", ["AdamW", "LBFGS", "Adagrad"])
def test_the_state_of_an_optimizer_that_resumed_is_freed_with_it(kind: str) -> None:
    def build(device: str) -> Any:
        net, x = nn.Linear(50, 50, device=device), torch.ones(4, 50, device=device)
        make = getattr(torch.optim, kind)
        optimizer = make(net.parameters())

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(x).square().sum()
            loss.backward()
            return loss

        def step() -> None:
            nonlocal optimizer
            optimizer.step(closure)
            saved = copy.deepcopy(optimizer.state_dict())
            states = [weakref.ref(leaf) for leaf in tree_leaves(optimizer.state) if getattr(leaf, "is_cuda", False)]
            optimizer = make(net.parameters())
            num_alive.append(sum(state() is not None for state in states))
            optimizer.load_state_dict(saved)

        return step

    num_alive: list[int] = []
    memfix.peak(build)
    assert num_alive
    assert not any(num_alive)


def test_lists_in_the_state_of_an_optimizer_from_outside_are_as_before() -> None:
    parameter = nn.Parameter(torch.ones(50))
    optimizer = torch.optim.LBFGS([parameter], max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (parameter.square() - 3).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    before = copy.deepcopy(optimizer.state_dict()["state"])

    def build(device: str) -> Any:
        parameter.data = parameter.data.to(device)
        return lambda: optimizer.step(closure)

    with contextlib.suppress(Exception):  # its state is on the CPU
        memfix.peak(build)
    after = optimizer.state_dict()["state"]
    assert str(after) == str(before)


@pytest.mark.parametrize("move", ["to", "data"])
def test_an_optimizer_from_outside_and_its_model_are_as_before(move: str) -> None:
    net = small_net()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(4, 16)).sum().backward()
    parameters, values = [*net.parameters()], copy.deepcopy(net.state_dict())
    gradients = [parameter.grad for parameter in parameters]

    def build(device: str) -> Any:
        if move == "to":
            net.to(device).half().float()
        else:
            for tensor in (*net.parameters(), *net.buffers()):
                tensor.grad, tensor.data = None, tensor.data.to(device)
        return trained(net, optimizer, device)

    assert memfix.peak(build).exact
    assert all(one is other for one, other in zip(net.parameters(), parameters, strict=True))
    assert all(type(parameter) is nn.Parameter for parameter in parameters)
    assert all(torch.equal(tensor, values[name]) for name, tensor in net.state_dict().items())
    if move == "to":
        assert all(p.grad is gradient for p, gradient in zip(parameters, gradients, strict=True))
    assert not optimizer.state
    assert "data" not in vars(torch.Tensor)


def test_a_model_from_outside_has_its_weights_afterwards() -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300), nn.LSTM(300, 20))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = list(model.parameters())

    def build(device: str) -> Any:
        model.to(device)
        x = torch.randn(16, 300, device=device)
        return lambda: model(x)[0].sum().backward()

    assert memfix.peak(build).peak_bytes > 300 * 300 * 4
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    model(torch.randn(4, 300))[0].sum().backward()


@pytest.mark.parametrize("is_dropped", [True, False])
def test_gradients_that_move_with_a_real_model_take_memory_until_they_are_dropped(is_dropped: bool) -> None:
    model = nn.Linear(32, 32)
    model(torch.ones(1, 32)).sum().backward()
    numbers, held = model.weight.grad.clone(), None if is_dropped else model.weight.grad

    def build(device: str) -> Any:
        def step() -> None:
            model.to(device)
            if is_dropped:
                model.zero_grad()

        return step

    weights = (32 * 32 + 32) * 4
    reading = memfix.peak(build, warmup=0)
    assert (reading.peak_bytes, reading.held_bytes) == (2 * weights, weights if is_dropped else 2 * weights)
    assert torch.equal(model.weight.grad, numbers)
    assert held is None or model.weight.grad is held


def test_experts_in_float32_and_speech_losses_have_fakes() -> None:
    def build(device: str) -> Any:
        tokens = torch.randn(24, 16, device=device, requires_grad=True)
        experts = torch.randn(3, 16, 6, device=device, requires_grad=True)
        ends = torch.tensor([8, 16, 24], dtype=torch.int32, device=device)
        log_probs = torch.randn(50, 2, 20, device=device, requires_grad=True)
        targets = torch.randint(1, 20, (2, 7), device=device)

        def step() -> None:
            torch._grouped_mm(tokens, experts, offs=ends).sum().backward()
            lengths = torch.tensor([50, 50]), torch.tensor([7, 5])
            nn.functional.ctc_loss(log_probs.log_softmax(2), targets, *lengths).backward()

        return step

    assert memfix.peak(build).peak_bytes > 2 * 50 * 15 * 4


def test_the_step_counts_of_an_optimizer_are_written_without_fakes_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are real tensors on the CPU, and FakeTensorMode took longer for their fakes than for the whole update."""
    made, counts, from_real = [], [], FakeTensorConverter.from_real_tensor

    def noted(converter: Any, mode: Any, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        made.append(tensor)
        return from_real(converter, mode, tensor, *args, **options)

    def build(device: str) -> Any:
        parameters = [nn.Parameter(torch.ones(4, device=device)) for _ in range(3)]
        optimizer = torch.optim.AdamW(parameters)

        def step() -> None:
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            counts.append([int(state["step"]) for state in optimizer.state.values()])

        return step

    monkeypatch.setattr(FakeTensorConverter, "from_real_tensor", noted)
    memfix.peak(build)
    assert (made, counts) == ([], [[1] * 3, [2] * 3])


def test_a_composite_on_the_cpu_that_resizes_its_result_gives_its_shape() -> None:
    """Frequencies of rotary positions as complex numbers, too many for their values to be followed."""
    shapes = []

    def build(device: str) -> Any:
        angles = torch.outer(torch.arange(4096), torch.arange(4.0))
        turns = torch.polar(torch.ones_like(angles), angles)

        def step() -> torch.Tensor:
            shapes.append(turns.to(device).split([1, 3], dim=1)[1].shape)
            return turns.to(device)

        return step

    assert memfix.peak(build).peak_bytes == 4096 * 4 * 8
    assert {*shapes} == {(4096, 3)}


def test_distinct_values_keep_the_memory_of_all_and_results_not_asked_for_keep_none() -> None:
    def build(device: str) -> Any:
        ids = torch.arange(1000, device=device) // 10
        return lambda: torch.unique(ids)

    reading = memfix.peak(build)
    assert (reading.held_bytes, reading.at_least) == (8 * 1000, 8 * 1000)
