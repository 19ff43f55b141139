"""One rank of many: its shards, what it gathers, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import memfix
from memfix.errors import MeasurementError, UsageError
from memfix.meters.one_rank import one_rank_of

WIDTH, LAYERS = 256, 4
LAYER_BYTES = WIDTH * WIDTH * 4

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")


def layers(device: str) -> nn.Sequential:
    with torch.device(device):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def stepping(model: nn.Module, device: str) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, WIDTH, device=device)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def sharded(device: str) -> Any:
    model = layers(device)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return stepping(model, device)


def test_a_rank_holds_its_shards_and_gathers_a_few_layers() -> None:
    for world_size in (2, 8):
        reading = memfix.peak(sharded, world_size=world_size)
        assert reading.base_bytes == pytest.approx(LAYERS * LAYER_BYTES / world_size, rel=0.05)
        assert LAYER_BYTES < reading.peak_bytes < (LAYERS + 2) * LAYER_BYTES
    assert not dist.is_initialized()


def test_every_rank_of_even_shards_takes_the_same() -> None:
    first, last = (memfix.peak(sharded, world_size=8, rank=rank) for rank in (0, 7))
    assert first.peak_bytes == last.peak_bytes


def test_tensor_parallel_layers_hold_a_part_of_each_weight() -> None:
    def build(device: str) -> Any:
        model = layers(device)
        plan = {str(number): (RowwiseParallel if number % 2 else ColwiseParallel)() for number in range(LAYERS)}
        return stepping(parallelize_module(model, init_device_mesh("cuda", (4,)), plan), device)

    reading = memfix.peak(build, world_size=4)
    assert reading.base_bytes == pytest.approx(LAYERS * LAYER_BYTES / 4, rel=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, "world_size must be at least 1, got 0"),
        ({"world_size": 4, "rank": 4}, r"rank must be at least 0 and below world_size \(4\), got 4"),
        ({"rank": 1}, r"rank must be at least 0 and below world_size \(1\), got 1"),
    ],
)
def test_a_rank_that_does_not_exist_is_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}$"):
        memfix.peak(sharded, **options)


def test_a_group_that_is_there_already_is_refused_and_stays() -> None:
    with one_rank_of(2):
        with pytest.raises(MeasurementError, match=r"^this process is a rank of another group already; simulate in"):
            memfix.peak(sharded, world_size=2)
        assert dist.get_world_size() == 2
    assert not dist.is_initialized()
