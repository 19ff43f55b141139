"""Linear cross entropy with its classes spread over two processes, held against naive in one."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_python import forked_python
from torch.utils._python_dispatch import TorchDispatchMode

from memfix.ops.linear_cross_entropy.naive import naive_linear_cross_entropy
from memfix.ops.linear_cross_entropy.vocabulary_parallel import vocabulary_parallel_linear_cross_entropy

TOKENS, WIDTH, CLASSES = 37, 9, 23
EVEN, UNEVEN, ONE_CLASS = (12, 11), (17, 6), (22, 1)


@dataclass(frozen=True)
class Case:
    sizes: tuple[int, int] = EVEN
    dtype: torch.dtype = torch.float64
    ignored: float = 0.3
    scale: float = 1.0  # of hidden: logits of tens at 8
    masked: tuple[int, ...] = ()  # classes whose bias is -inf
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "mean": Case(),
    "sum, uneven": Case(UNEVEN, options={"reduction": "sum", "rows_per_chunk": 8}),
    "none, uneven": Case(UNEVEN, options={"reduction": "none", "rows_per_chunk": 5}),
    "none, nothing ignored": Case(ONE_CLASS, ignored=0.0, options={"reduction": "none", "rows_per_chunk": 64}),
    "all ignored": Case(ignored=1.0),
    "float32": Case(UNEVEN, torch.float32, options={"rows_per_chunk": 8}),
    "float32, peaked": Case(UNEVEN, torch.float32, scale=8.0, options={"reduction": "none", "rows_per_chunk": 8}),
    "bfloat16": Case(UNEVEN, torch.bfloat16, options={"rows_per_chunk": 8}),
    "every option": Case(
        UNEVEN, options={"label_smoothing": 0.1, "softcap": 3.0, "z_loss": 0.01, "rows_per_chunk": 10}
    ),
    "every option, none": Case(
        options={"label_smoothing": 0.1, "softcap": 3.0, "z_loss": 0.01, "rows_per_chunk": 10, "reduction": "none"}
    ),
    "a shard without a class": Case(UNEVEN, masked=(17, 18, 19, 20, 21, 22)),
}


def inputs_of(case: Case) -> dict[str, torch.Tensor]:
    """The same on every process."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    target_N = torch.randint(CLASSES - len(case.masked), (TOKENS,), generator=generator)
    ignored_N = torch.rand(TOKENS, generator=generator) < case.ignored
    bias_V = random(CLASSES)
    bias_V[list(case.masked)] = -torch.inf
    return {
        "hidden": (random(TOKENS, WIDTH) * case.scale).to(case.dtype).requires_grad_(),
        "weight": random(CLASSES, WIDTH).to(case.dtype).requires_grad_(),
        "bias": bias_V.to(case.dtype).requires_grad_(),
        "target": target_N.masked_fill(ignored_N, -100),
        "upstream": random(TOKENS),
    }


def backward(loss: torch.Tensor, upstream_N: torch.Tensor) -> None:
    loss.backward((upstream_N if loss.dim() else upstream_N[0]).to(loss.dtype))


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that an operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def one_process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        inputs = inputs_of(case)
        hidden = inputs["hidden"]
        weight, bias = (inputs[part].detach().split(case.sizes)[rank].requires_grad_() for part in ("weight", "bias"))
        loss = vocabulary_parallel_linear_cross_entropy(
            hidden, weight, inputs["target"], bias_shard=bias, **case.options
        )
        backward(loss, inputs["upstream"])
        results[name] = [tensor.detach() for tensor in (loss, hidden.grad, weight.grad, bias.grad)]
    results["large"] = largest_of_a_large_call(rank)
    results["refusals"] = refusals(rank)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def largest_of_a_large_call(rank: int) -> int:
    """256 tokens in chunks of 8, and 100 classes on each process."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 128, 4, generator=generator, requires_grad=True)
    weight = torch.randn(200, 4, generator=generator)[100 * rank : 100 * rank + 100].clone().requires_grad_()
    target = torch.randint(200, (2, 128), generator=generator)
    with LargestTensor() as largest:
        loss = vocabulary_parallel_linear_cross_entropy(hidden, weight, target, reduction="none", rows_per_chunk=8)
        loss.sum().backward()
    assert loss.shape == (2, 128)
    return largest.numel


def refusals(rank: int) -> list[str]:
    hidden, target = torch.randn(3, 2), torch.tensor([0, 1, 4])
    said = []
    for weight in (torch.randn(2, 2), torch.randn(2 * rank, 2)):  # 4 classes in all; none on the first process
        try:
            vocabulary_parallel_linear_cross_entropy(hidden, weight, target)
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes had of every case."""
    folder = tmp_path_factory.mktemp("processes")
    code = "import sys, torch.multiprocessing as processes, test_vocabulary_parallel as here\n"
    code += "processes.start_processes(here.one_process, sys.argv[1:], nprocs=2, start_method='fork')"
    places = os.pathsep.join([*map(str, Path(__file__).parents[:3]), os.environ.get("PYTHONPATH", "")])
    done = forked_python("-c", code, str(folder), env={**os.environ, "PYTHONPATH": places})
    assert done.returncode == 0, done.stderr
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_give_the_loss_and_gradients_of_one(results: Any, name: str) -> None:
    case = CASES[name]
    inputs = inputs_of(case)
    wide = {key: t.detach().double().requires_grad_() if t.requires_grad else t for key, t in inputs.items()}
    options = {key: value for key, value in case.options.items() if key != "rows_per_chunk"}
    loss = naive_linear_cross_entropy(wide["hidden"], wide["weight"], wide["target"], wide["bias"], **options)
    backward(loss, wide["upstream"])
    expected = [loss.detach(), wide["hidden"].grad, wide["weight"].grad, wide["bias"].grad]

    first, second = (rank[name] for rank in results)
    assert torch.equal(first[1], second[1])
    torch.testing.assert_close(first[0], second[0], rtol=0, atol=0, equal_nan=True)
    got = [first[0], first[1], torch.cat([first[2], second[2]]), torch.cat([first[3], second[3]])]
    tolerance = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 2e-2}[case.dtype]
    for mine, right in zip(got, expected, strict=True):
        assert mine.dtype == case.dtype
        assert right is not None
        # relative to the largest: a small element of a sum of large ones has their rounding
        atol = tolerance * float(right.abs().nan_to_num().max())
        torch.testing.assert_close(mine.double(), right, rtol=0, atol=atol, equal_nan=True)


def test_nothing_of_tokens_times_classes_is_made(results: Any) -> None:
    # a chunk of 8 tokens and 100 classes at most, or hidden, of 256 * 4 numbers
    assert [rank["large"] for rank in results] == [1024, 1024]


def test_what_cannot_be_computed_is_refused_on_every_process(results: Any) -> None:
    for rank in results:
        out_of_range, empty = rank["refusals"]
        assert out_of_range.startswith("target must be at least 0 and below the vocabulary of 4")
        assert "got 4 at index 2" in out_of_range
        assert empty == "weight_shard must have at least one row on every process, got [0, 2]"


def test_without_other_processes_it_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"start them with torchrun and call torch.distributed.init_process_group"):
        vocabulary_parallel_linear_cross_entropy(torch.randn(2, 3), torch.randn(4, 3), torch.tensor([0, 1]))
