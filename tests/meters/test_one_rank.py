"""One rank of many: its shards, what it gathers, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import memfix
from memfix.errors import MeasurementError, UsageError
from memfix.meters.base import Reading
from memfix.meters.one_rank import one_rank_of
from memfix.meters.simulated.assumptions import ANY_COUNT
from memfix.meters.simulated.peers import SAME

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


@pytest.mark.parametrize("gives_room", [False, True])
def test_a_functional_collective_takes_its_result_once(gives_room: bool) -> None:
    def build(device: str) -> Any:
        mine = torch.randn(1024, 1024, device=device)
        room = torch.empty(4096, 1024, device=device) if gives_room else None

        def step() -> None:
            group = dist.group.WORLD.group_name
            if room is None:
                gathered = torch.ops._c10d_functional.all_gather_into_tensor(mine, 4, group)
            else:
                gathered = torch.ops._c10d_functional.all_gather_into_tensor_out(mine, 4, group, out=room)
            torch.ops._c10d_functional.wait_tensor(gathered).zero_()

        return step

    reading = memfix.peak(build, world_size=4)
    assert reading.peak_bytes == (0 if gives_room else 16 * 2**20)


# ---------------------------------------------------------------- meshes
def both_ways(device: str, mesh: DeviceMesh) -> Any:
    model = layers(device)
    plan = {str(number): (RowwiseParallel if number % 2 else ColwiseParallel)() for number in range(LAYERS)}
    parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"])
    return stepping(model, device)


def test_a_mesh_is_given_to_the_build_by_the_names_of_its_dimensions() -> None:
    reading = memfix.peak(both_ways, mesh={"data": 4, "tensor": 2})
    assert reading.base_bytes == pytest.approx(LAYERS * LAYER_BYTES / 8, rel=0.05)
    assert memfix.peak(both_ways, world_size=8, mesh={"data": -1, "tensor": 2}).peak_bytes == reading.peak_bytes
    assert not dist.is_initialized()


def test_a_mesh_without_names_has_sizes_alone() -> None:
    seen: list[Any] = []

    def build(device: str, mesh: DeviceMesh) -> Any:
        seen.append((tuple(mesh.mesh.shape), mesh.mesh_dim_names, tuple(mesh.get_coordinate()), dist.get_rank()))
        return lambda: None

    memfix.peak(build, mesh=(2, 3), rank=4)
    assert seen == [((2, 3), None, (1, 1), 4)]


def test_a_world_of_one_rank_has_a_group_too() -> None:
    alone = memfix.peak(sharded, world_size=1)
    assert alone.base_bytes == pytest.approx(LAYERS * LAYER_BYTES, rel=0.05)


def uneven(device: str) -> Any:
    """1030 rows over 4 ranks: 258, 258, 258 and 256."""
    mesh = init_device_mesh("cuda", (4,))
    rows = distribute_tensor(torch.randn(1030, 64, device=device), mesh, [Shard(0)])
    return lambda: rows.redistribute(mesh, [Shard(1)]).redistribute(mesh, [Shard(0)]).relu().to_local()


def test_a_rank_knows_nothing_of_one_that_was_measured_before() -> None:
    """DTensor keeps plans by the mesh, and meshes of different ranks are equal."""
    first, last = (memfix.peak(uneven, world_size=4, rank=rank) for rank in (0, 3))
    again = memfix.peak(uneven, world_size=4, rank=0)
    assert (first.held_bytes, last.held_bytes, again.held_bytes) == (258 * 256, 256 * 256, 258 * 256)
    assert again.peak_bytes == first.peak_bytes


def test_a_build_that_first_imports_dtensor_is_measured_as_any_other() -> None:
    """DTensor infers shapes on fake tensors as large as all shards together, which must not count."""
    code = textwrap.dedent("""
        import memfix, torch

        def build(device, mesh):
            from torch.distributed.tensor import Shard, distribute_tensor

            rows = distribute_tensor(torch.randn(4096, 1024, device=device), mesh, [Shard(0)])
            return lambda: rows.relu().sum(1).to_local()

        print([memfix.peak(build, mesh=(64,)).peak_bytes for _ in range(2)])
        """)
    path = {**os.environ, "PYTHONPATH": str(Path(memfix.__file__).parents[1])}
    ended = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True, check=True)
    first, second = json.loads(ended.stdout)
    assert first == second < 2 * 4096 * 1024 * 4 // 64


def test_what_a_rank_reads_of_others_is_its_own() -> None:
    numbers: list[Any] = []

    def build(device: str) -> Any:
        def step() -> None:
            own = torch.tensor([7, 9], device=device)
            gathered = [torch.empty_like(own) for _ in range(4)]
            dist.all_gather(gathered, own)
            numbers.append([part.tolist() for part in gathered])
            swapped = torch.empty(4, dtype=torch.int64, device=device)
            dist.all_to_all_single(swapped, torch.tensor([1, 2, 3, 4], device=device))
            numbers.append(swapped.tolist())

        return step

    reading = memfix.peak(build, world_size=4, rank=2)
    assert numbers[:2] == [[[7, 9]] * 4, [3] * 4]
    assert not reading.exact
    assert SAME in reading.notes


def test_objects_that_ranks_exchange_are_its_own() -> None:
    gathered: list[Any] = [None] * 4

    def build(device: str) -> Any:
        own = {"heads": 8, "name": "of every rank"}
        dist.all_gather_object(gathered, own)
        dist.broadcast_object_list([own], src=0)
        return lambda: torch.empty(gathered[3]["heads"], dtype=torch.uint8, device=device)

    assert memfix.peak(build, world_size=4).peak_bytes == 8
    assert gathered == [{"heads": 8, "name": "of every rank"}] * 4


def received(dtype: torch.dtype) -> Reading:
    """The reading of a step that allocates 4,000 bytes if another rank says so."""

    def build(device: str) -> Any:
        def step() -> torch.Tensor | None:
            flag = torch.zeros(1, dtype=dtype, device=device)
            dist.recv(flag, src=1)
            return torch.empty(1000, device=device) if flag.item() else None

        return step

    return memfix.peak(build, world_size=2)


def test_a_flag_that_a_rank_receives_is_not_known() -> None:
    reading = received(torch.bool)
    assert not reading.exact
    assert reading.at_least is not None
    assert reading.at_least < 4000 <= reading.highest_bytes


def test_a_number_that_a_rank_receives_may_be_any() -> None:
    reading = received(torch.int64)
    assert (reading.exact, reading.at_least, reading.at_most) == (False, None, None)
    assert reading.peak_bytes >= 4000
    assert ANY_COUNT in reading.notes


# ---------------------------------------------------------------- several ranks
def staged(device: str, mesh: DeviceMesh) -> Any:
    """A later stage holds less."""
    size = 1000 * (4 - mesh.get_local_rank("stage"))
    return lambda: torch.empty(size, dtype=torch.uint8, device=device)


def test_ranks_that_differ_are_measured_and_the_others_are_not() -> None:
    found = memfix.peak_of_ranks(staged, mesh={"data": 64, "stage": 4})
    assert sorted(found.readings) == [0, 1, 2, 3, 128, 252]
    assert (found.largest_rank, found.largest.peak_bytes) == (0, 4000)
    assert found.readings[3].peak_bytes == 1000
    table = found.table().splitlines()
    assert table[1].split()[:5] == ["0", "data", "0", "stage", "0"]
    assert table[1].endswith("largest")
    assert table[-1] == "  250 of 256 ranks were not measured: each lies between alike ones"
    assert found.as_dict()["largest_rank"] == 0


def test_uneven_shards_are_found_between_ranks_that_differ() -> None:
    found = memfix.peak_of_ranks(uneven, world_size=4)
    assert sorted(found.readings) == [0, 2, 3]
    assert found.largest_rank == 0


def test_ranks_can_be_named() -> None:
    found = memfix.peak_of_ranks(staged, mesh={"data": 2, "stage": 4}, ranks=[3, 7])
    assert {rank: reading.peak_bytes for rank, reading in found.readings.items()} == {3: 1000, 7: 1000}
    assert found.table().endswith("  6 of 8 ranks were not measured")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "peak_of_ranks needs a world_size, a mesh, or both"),
        ({"world_size": 2, "rank": 1}, "peak_of_ranks measures several ranks: name them by ranks, not by rank"),
        ({"world_size": 2, "ranks": []}, "ranks must name at least one rank, got none"),
        ({"world_size": 2, "ranks": [2]}, r"rank must be at least 0 and below world_size \(2\), got 2"),
    ],
)
def test_ranks_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}$"):
        memfix.peak_of_ranks(sharded, **options)


# ---------------------------------------------------------------- refusals
MESH = {"data": 4, "tensor": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 12, "mesh": MESH}, f"world_size must be 8, the ranks of mesh {MESH}, got 12"),
        (
            {"world_size": 9, "mesh": {"data": -1, "tensor": 2}},
            "world_size must be a multiple of 2 for mesh {'data': -1, 'tensor': 2}, got 9",
        ),
        (
            {"mesh": (-1, 2)},
            "mesh (-1, 2): one size may be -1, the rest of the ranks, and needs a world_size",
        ),
        ({"mesh": {}}, "mesh must have sizes of at least 1, such as {'data': 4, 'tensor': 2}, got {}"),
        ({"mesh": 8}, "mesh must have sizes of at least 1, such as {'data': 4, 'tensor': 2}, got 8"),
        ({"mesh": (4, 0)}, "mesh must have sizes of at least 1, such as {'data': 4, 'tensor': 2}, got (4, 0)"),
        ({"mesh": MESH, "rank": 8}, "rank must be at least 0 and below world_size (8), got 8"),
    ],
)
def test_a_mesh_that_contradicts_itself_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        memfix.peak(both_ways, **options)
    assert str(refused.value) == message
    assert not dist.is_initialized()


def test_a_build_that_takes_no_mesh_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^with mesh, the step is built by build\(device, mesh\), which <function sh"):
        memfix.peak(sharded, mesh=MESH)


def test_nothing_stays_of_a_step_that_raises() -> None:
    def build(device: str, mesh: DeviceMesh) -> Any:
        raise KeyError("theirs")

    with pytest.raises(KeyError, match="theirs"):
        memfix.peak(build, mesh=MESH)
    assert not dist.is_initialized()
    assert memfix.peak(both_ways, mesh=MESH).peak_bytes > 0


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


def test_an_operator_of_fsdp_that_serves_all_devices_is_taken_apart() -> None:
    """As FSDP2 has one since torch 2.15; it is given the numbers of a stream."""
    library = torch.library.Library("fsdp", "FRAGMENT")
    library.define("memfix_doubled(Tensor x, int stream_id, int device_index, int device_type) -> Tensor")
    library.impl("memfix_doubled", lambda x, *stream: (x + 1) * 2, "CompositeExplicitAutograd")

    def build(device: str) -> Any:
        x, stream = torch.ones(100, device=device), torch.cuda.current_stream()
        numbers = (stream.stream_id, stream.device_index, stream.device_type)
        return lambda: torch.ops.fsdp.memfix_doubled(x, *numbers)

    try:
        reading = memfix.peak(build)
    finally:
        library._destroy()
    assert (reading.peak_bytes, reading.held_bytes, reading.exact) == (800, 400, True)
