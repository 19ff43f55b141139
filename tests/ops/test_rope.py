"""Rope: the table that all layers share, what the incident report got wrong, and what nothing may disturb."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import pickle
import threading
import weakref
from collections.abc import Iterator
from itertools import pairwise

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import memfix
from memfix.ops.rope import RopeTables, RotaryEmbedding, default_tables, reported, rope, shared_table
from memfix.ops.rope import tables as tables_module
from memfix.ops.rope.naive import naive_rope
from memfix.ops.rope.reported import ReportedRotary, reported_low_precision_rope
from memfix.ops.rope.tables import BLOCK

CONTEXT = 131_072


@pytest.fixture
def tables() -> RopeTables:
    return RopeTables()


Stretches = list[tuple[int, int]]


@contextlib.contextmanager
def counted_builds() -> Iterator[Stretches]:
    """Every stretch of rows that is computed inside, as (start, stop)."""
    stretches: Stretches = []
    compute = tables_module._new_rows

    def counted(start: int, stop: int, *more: object) -> torch.Tensor:
        stretches.append((start, stop))
        return compute(start, stop, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables_module, "_new_rows", counted)
        yield stretches


@pytest.fixture
def built() -> Iterator[Stretches]:
    with counted_builds() as stretches:
        yield stretches


def heads(num_positions: int, width: int = 8, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, num_positions, 3, width, generator=generator).to(device, dtype)


# ---------------------------------------------------------------- what it computes
def test_the_first_half_is_paired_with_the_second() -> None:
    unit = torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(1, 1, 4)
    first, second, third, fourth = rope(unit, offset=3)[0, 0].tolist()
    assert (first, third) == pytest.approx((math.cos(3), math.sin(3)))
    assert (second, fourth) == (0, 0)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=["none", "batch", "two"])
def test_any_leading_dims(lead: tuple[int, ...]) -> None:
    x = torch.randn(*lead, 7, 3, 8)
    torch.testing.assert_close(rope(x, offset=5), naive_rope(x, offset=5))


def test_no_positions_and_no_heads_are_allowed() -> None:
    assert rope(torch.empty(2, 0, 3, 8)).shape == (2, 0, 3, 8)
    assert rope(torch.empty(2, 5, 0, 8, dtype=torch.bfloat16)).shape == (2, 5, 0, 8)


def test_products_of_queries_and_keys_depend_on_their_distance_alone() -> None:
    q, k = heads(16, dtype=torch.float64), heads(16, dtype=torch.float64).flip(0)
    near = torch.einsum("bthd,bshd->bhts", rope(q), rope(k))
    far = torch.einsum("bthd,bshd->bhts", rope(q, offset=CONTEXT), rope(k, offset=CONTEXT))
    torch.testing.assert_close(near, far, atol=1e-9, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_worked_on_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    x = heads(50, dtype=dtype)
    assert torch.equal(rope(x, offset=1000), rope(x.float(), offset=1000).to(dtype))


def test_the_chunk_does_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    x = heads(50, dtype=torch.bfloat16)
    whole = rope(x)
    monkeypatch.setattr(shared_table, "SCRATCH_BYTES", 7 * 2 * 3 * 4 * 4)  # seven positions, so that one is left over
    assert shared_table._positions_that_fit(x) == 7
    assert torch.equal(rope(x), whole)


def test_first_and_second_derivatives() -> None:
    x = heads(3, width=4, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: rope(t, offset=9), x)
    assert torch.autograd.gradgradcheck(lambda t: rope(t, offset=9), x)
    per_call = torch.func.grad(lambda t: rope(t).square().sum())(x.detach())
    torch.testing.assert_close(per_call, 2 * x.detach())  # a turn keeps lengths


def test_nothing_of_the_size_of_x_is_saved_for_backward() -> None:
    x = heads(64, dtype=torch.bfloat16).requires_grad_()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        rope(x)
    table = default_tables().rows(x, base=10_000.0, num_positions=64)
    assert [t.untyped_storage().data_ptr() for t in saved] == [table.untyped_storage().data_ptr()]


# ---------------------------------------------------------------- positions
def test_positions_in_order_are_an_offset() -> None:
    x = heads(20)
    assert torch.equal(rope(x, positions=torch.arange(300, 320)), rope(x, offset=300))
    assert torch.equal(rope(x, positions=torch.arange(300, 320, dtype=torch.int32)), rope(x, offset=300))


@pytest.mark.parametrize(
    ("position", "length"), [(BLOCK - 1, BLOCK), (BLOCK, 2 * BLOCK), (2 * BLOCK - 1, 2 * BLOCK), (2 * BLOCK, 4 * BLOCK)]
)
def test_a_table_reaches_the_largest_position_and_is_no_longer(position: int, length: int) -> None:
    """Where it is exactly as long as a table, one row less would be none, and one more twice as many."""
    x, tables = heads(1), RopeTables()
    assert torch.equal(rope(x, positions=torch.tensor([position]), tables=tables), rope(x, offset=position))
    assert tables.bytes == length * x.shape[-1] * 4


def test_a_promise_that_positions_keep_changes_nothing() -> None:
    x, positions = heads(5), torch.tensor([3, 1, 4, 1, 5])
    for promised in (6, 1000):
        assert torch.equal(rope(x, positions=positions, max_positions=promised), rope(x, positions=positions))


def test_each_sequence_of_a_batch_may_have_its_own_positions() -> None:
    x = heads(4).requires_grad_()
    positions = torch.tensor([[0, 1, 0, 1], [9, 9, 131_071, 0]])
    turned = rope(x, positions=positions)
    for b, t in torch.cartesian_prod(torch.arange(2), torch.arange(4)).tolist():
        assert torch.equal(turned[b, t], rope(x[b, t : t + 1], offset=int(positions[b, t]))[0])
    turned.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(naive_rope(x.grad[1, 2:3], offset=131_071)[0], torch.ones(3, 8))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"positions": torch.arange(4)}, r"positions must be \[..., T\] and broadcast to \[2, 5\], got shape \[4\]"),
        ({"positions": torch.zeros(3, 5, dtype=torch.int64)}, r"broadcast to \[2, 5\], got shape \[3, 5\]"),
        ({"positions": torch.zeros(1, 2, 5, dtype=torch.int64)}, r"broadcast to \[2, 5\], got shape \[1, 2, 5\]"),
        ({"positions": torch.arange(5.0)}, "positions must be int64 or int32, got torch.float32"),
        ({"positions": torch.arange(5) - 1}, "positions must be at least 0, got -1"),
        ({"positions": torch.arange(5), "max_positions": 4}, "positions must be below max_positions=4, got 4"),
        ({"positions": torch.arange(5), "offset": 2}, "give offset or positions, not both; got offset=2"),
        ({"positions": torch.arange(5, device="meta")}, "x and positions must have the same device, got cpu, meta"),
        ({"form": "complex"}, "form must be one of auto, shared_table, triton, got 'complex'"),
    ],
)
def test_positions_that_do_not_fit_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope(heads(5), **settings)  # type: ignore[arg-type]


def test_positions_without_values_need_only_their_promise(tables: RopeTables) -> None:
    x, positions = heads(5, device="meta"), torch.empty(5, dtype=torch.int64, device="meta")
    assert rope(x, positions=positions, max_positions=CONTEXT, tables=tables).shape == x.shape


# ---------------------------------------------------------------- the table
@pytest.mark.parametrize("position", [1, BLOCK - 1, BLOCK, 65_535, CONTEXT - 1, 1_000_000])
def test_every_number_is_the_nearest_float32(position: int) -> None:
    """To one part in fifty of a rounding: the angle is right to far below what float32 can hold."""
    width = 6
    row = default_tables().rows(heads(1, width), base=500_000.0, num_positions=position + 1)[position]
    with mpmath.workdps(50):
        angles = [position * mpmath.mpf(500_000) ** (-mpmath.mpf(i) / width) for i in range(0, width, 2)]
        true = [mpmath.cos(a) for a in angles] + [mpmath.sin(a) for a in angles]
        for got, exact in zip(row.tolist(), true, strict=True):
            spacing = torch.finfo(torch.float32).eps * 2.0 ** (mpmath.floor(mpmath.log(abs(exact), 2)))
            assert abs(got - exact) <= 0.52 * spacing


def test_angles_in_float32_would_be_off_by_nine_thousandths() -> None:
    narrow = reported._inverse_frequencies(80, 10_000.0, "cpu")
    wide = 10_000.0 ** (-torch.arange(0, 80, 2, dtype=torch.float64) / 80)
    positions = torch.arange(CONTEXT - 20_000, CONTEXT)[:, None]
    error = (positions.float() * narrow).double() - positions.double() * wide
    assert error.abs().max().item() == pytest.approx(0.009, abs=0.0005)


@given(lengths=st.lists(st.integers(1, 40_000), min_size=1, max_size=8))
def test_a_table_grows_only_when_it_must_and_keeps_its_prefix(lengths: list[int]) -> None:
    tables = RopeTables()
    with counted_builds() as stretches:
        like, before = heads(1, width=2), torch.empty(0, 2)
        for length in lengths:
            num_builds = len(stretches)
            rows = tables.rows(like, base=10_000.0, num_positions=length)
            assert rows.shape[0] >= length
            assert (len(stretches) > num_builds) == (length > before.shape[0])
            assert torch.equal(rows[: before.shape[0]], before)
            before = rows
    # every row was computed once, in stretches that follow each other and at least double the table
    assert stretches[0][0] == 0
    assert stretches[-1][1] == before.shape[0] < max(BLOCK + 1, 2 * max(lengths))
    assert all(stop == following for (_, stop), (following, _) in pairwise(stretches))
    assert all(stop >= 2 * start for start, stop in stretches)


def test_a_table_that_grew_has_the_bits_of_one_made_at_once() -> None:
    grown, at_once = RopeTables(), RopeTables()
    like = heads(1, width=10)
    for length in (1, 5000, 40_000):
        rows = grown.rows(like, base=10_000.0, num_positions=length)
    assert torch.equal(rows, at_once.rows(like, base=10_000.0, num_positions=40_000))


def test_a_table_is_not_made_anew_by_calls_that_it_serves(built: Stretches, tables: RopeTables) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for length in (2048, 1, 700):
            rope(heads(length, dtype=dtype), tables=tables)
    assert built == [(0, 2048)]
    rope(heads(1, dtype=torch.float64), tables=tables)  # the only dtype that float32 rows would not serve
    rope(heads(1), base=500_000.0, tables=tables)
    assert built == [(0, 2048)] * 3


def test_threads_grow_one_table(built: Stretches, tables: RopeTables) -> None:
    start = threading.Barrier(8)
    answers: dict[int, torch.Tensor] = {}

    def call(number: int) -> None:
        start.wait()
        for length in (1, 3000, 9000):
            answers[number] = rope(heads(length, width=2), offset=number, tables=tables)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(stop - start for start, stop in built) == 16_384
    for number, answer in answers.items():
        torch.testing.assert_close(answer, naive_rope(heads(9000, width=2), offset=number))


def test_tables_can_be_reserved_and_forgotten(built: Stretches, tables: RopeTables) -> None:
    tables.reserve(heads(1), base=10_000.0, num_positions=5000)
    assert tables.bytes == 8192 * 8 * 4
    rope(heads(5000), tables=tables)
    assert built == [(0, 8192)]
    tables.clear()
    assert tables.bytes == 0


# ---------------------------------------------------------------- modules
def test_thirty_six_layers_share_one_table_where_the_report_had_one_each(tables: RopeTables) -> None:
    """Of the report's 8.72 "GB of parameters" 1.41 GiB were caches: one float32 table is 40 MiB."""
    private = [ReportedRotary(80, cached_positions=1).to("meta", torch.bfloat16) for _ in range(36)]
    for layer in private:
        layer(torch.empty(1, CONTEXT, 1, 80, dtype=torch.bfloat16, device="meta"))
    caches = [buffer for layer in private for name, buffer in layer.named_buffers() if name != "inv_freq"]
    assert sum(buffer.nbytes for buffer in caches) == 36 * 2 * CONTEXT * 80 * 2 == 1_509_949_440
    layers = torch.nn.ModuleList(RotaryEmbedding(80, max_positions=CONTEXT, tables=tables) for _ in range(36))
    for layer in layers.to(torch.bfloat16):
        layer(heads(2, width=80, dtype=torch.bfloat16))
    assert tables.bytes == CONTEXT * 80 * 4 == 40 << 20
    assert list(layers.buffers()) == list(layers.parameters()) == []


def test_nothing_is_saved_and_loading_works() -> None:
    module = RotaryEmbedding(8, max_positions=100)
    module(heads(5))
    assert module.state_dict() == {}
    RotaryEmbedding(8).load_state_dict(module.state_dict(), strict=True)


def test_a_deep_copy_shares_the_table(tables: RopeTables) -> None:
    layer = torch.nn.Sequential(RotaryEmbedding(8, tables=tables))
    layer(heads(5))
    copied = copy.deepcopy(layer)
    assert copied[0].tables is tables
    assert torch.equal(copied(heads(5)), layer(heads(5)))


def test_a_pickle_holds_no_table_and_what_was_shared_stays_shared(tables: RopeTables) -> None:
    pair = [RotaryEmbedding(8, max_positions=CONTEXT, tables=tables) for _ in range(2)]
    pair[0](heads(5))
    data = pickle.dumps([*pair, RotaryEmbedding(8)])
    assert len(data) < 4096
    first, second, plain = pickle.loads(data)
    assert first.tables is second.tables is not tables
    assert plain.tables is default_tables()
    assert torch.equal(first(heads(5)), pair[0](heads(5)))


def test_a_module_in_bfloat16_grows_as_precisely_as_before(tables: RopeTables) -> None:
    module = RotaryEmbedding(8, tables=tables)
    module(heads(4))
    module.to(torch.bfloat16)
    x = heads(3, dtype=torch.bfloat16)
    assert torch.equal(module(x, offset=CONTEXT - 3), rope(x.float(), offset=CONTEXT - 3).to(torch.bfloat16))
    assert {table.dtype for table in tables._tables.values()} == {torch.float32}


def test_a_model_first_used_for_inference_can_be_trained(tables: RopeTables) -> None:
    module = RotaryEmbedding(8, tables=tables)
    with torch.inference_mode():
        module(heads(5))
    x = heads(5).requires_grad_()
    module(x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype: torch.dtype, tables: RopeTables) -> None:
    x = heads(5, dtype=dtype).requires_grad_()
    plain = rope(x, offset=70_000)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = rope(x, offset=70_000, tables=tables)
    assert cast.dtype == dtype
    assert torch.equal(cast, plain)
    (gradient,) = torch.autograd.grad(cast.sum(), x)
    assert torch.equal(gradient, torch.autograd.grad(plain.sum(), x)[0])


def test_a_module_says_what_it_is_and_refuses_what_it_is_not() -> None:
    assert repr(RotaryEmbedding(8, max_positions=64)) == "RotaryEmbedding(8, base=10000, max_positions=64)"
    with pytest.raises(ValueError, match="dim must be even and at least 2, got 7"):
        RotaryEmbedding(7)
    with pytest.raises(TypeError, match=r"dim must be an int, got 8\.0"):
        RotaryEmbedding(8.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="base must be above 0 and finite, got -1"):
        RotaryEmbedding(8, base=-1)
    with pytest.raises(ValueError, match="max_positions must be at least 0, got -1"):
        RotaryEmbedding(8, max_positions=-1)
    with pytest.raises(ValueError, match=r"x must be \[..., T, H, 8\], got shape \[2, 5, 3, 6\]"):
        RotaryEmbedding(8)(heads(5, width=6))


def test_a_model_compiles_in_one_graph_and_uses_the_shared_table(built: Stretches, tables: RopeTables) -> None:
    module = RotaryEmbedding(8, tables=tables)
    x = heads(5, dtype=torch.bfloat16)
    plain = module(x, offset=300)
    compiled = torch.compile(lambda t: module(t * 1, offset=300) * 2, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), plain * 2)
    assert built == [(0, BLOCK)]


# ---------------------------------------------------------------- devices, real and not
def test_the_table_is_on_the_device_of_x_also_after_the_module_moved(tables: RopeTables) -> None:
    module = RotaryEmbedding(8, tables=tables)
    for device, length in (("cpu", 4), ("meta", 5000), ("cpu", 5000), ("meta", 9000)):
        turned = module.to(device)(heads(length, device=device))
        assert turned.device.type == device
    assert sorted(key[0].type for key in tables._tables) == ["cpu", "meta"]
    assert {key[0].type: table.device.type for key, table in tables._tables.items()} == {"cpu": "cpu", "meta": "meta"}


def test_a_default_device_elsewhere_does_not_move_the_table(tables: RopeTables) -> None:
    x = heads(5)
    with torch.device("meta"):
        turned = rope(x, tables=tables)
    assert torch.equal(turned, rope(x))


def test_each_simulation_has_a_table_of_its_own_that_goes_with_it(tables: RopeTables) -> None:
    modes = []

    def build(device: str):
        x = torch.empty(1, 8192, 4, 80, dtype=torch.bfloat16, device=device, requires_grad=True)
        assert isinstance(x, FakeTensor)
        modes.append(weakref.ref(x.fake_mode))

        def step() -> None:
            for _ in range(2):
                rope(x, tables=tables).sum().backward()
                x.grad = None

        return step

    first, second = (memfix.peak(build) for _ in range(2))
    assert first.peak_bytes == second.peak_bytes
    assert (first.base_bytes, second.base_bytes) == (8192 * 80 * (4 * 2 + 4),) * 2  # x, and the table as a given
    assert (first.leaked_bytes, first.exact) == (0, True)
    assert tables._tables == {}
    gc.collect()
    assert [mode() for mode in modes] == [None, None]
    assert torch.equal(rope(heads(5), tables=tables), rope(heads(5)))


def test_a_real_call_inside_a_fake_mode_leaves_no_fake_table(tables: RopeTables) -> None:
    x = heads(5)
    with FakeTensorMode(allow_non_fake_inputs=True):
        rope(x, tables=tables)
    assert tables._tables == {}
    assert torch.equal(rope(x, tables=tables), rope(x))


def test_fake_tensors_outside_their_mode_are_served_too(tables: RopeTables) -> None:
    with FakeTensorMode():
        x = torch.empty(2, 5000, 3, 8)
    assert isinstance(rope(x, tables=tables), FakeTensor)
    assert tables._tables == {}


@pytest.mark.gpu(use="beside")
def test_tables_on_a_gpu_have_the_bits_of_the_cpu(tables: RopeTables) -> None:
    for length in (5, 5000, 9000):
        rows = tables.rows(heads(1, device="cuda"), base=10_000.0, num_positions=length)
        assert rows.device.type == "cuda"
        on_cpu = default_tables().rows(heads(1), base=10_000.0, num_positions=length)
        assert torch.equal(rows.cpu(), on_cpu[: len(rows)])
    x = heads(64, dtype=torch.bfloat16, device="cuda")
    torch.testing.assert_close(rope(x, offset=CONTEXT), naive_rope(x, offset=CONTEXT))
    positions = torch.randint(0, CONTEXT, (64,), device="cuda")
    torch.testing.assert_close(
        rope(x, positions=positions).cpu(), rope(x.cpu(), positions=positions.cpu()), atol=0.02, rtol=0.01
    )


# ---------------------------------------------------------------- the incident report
def test_positions_on_the_cpu_fail_when_the_cache_grows_on_another_device() -> None:
    """LOG-23, LOG-24: the report's crash, with a device that every machine has."""
    broken = ReportedRotary(8, cached_positions=4, positions_on_cpu=True).to("meta")
    assert broken(heads(4, device="meta")).device.type == "meta"
    with pytest.raises(RuntimeError, match="device meta"):
        broken(heads(5, device="meta"))
    assert ReportedRotary(8, cached_positions=4).to("meta")(heads(5, device="meta")).device.type == "meta"


@pytest.mark.gpu(use="beside")
def test_positions_on_the_cpu_fail_on_a_gpu_in_the_words_of_the_report() -> None:
    broken = ReportedRotary(8, cached_positions=4, positions_on_cpu=True).to("cuda")
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        broken(heads(5, device="cuda"))
    fixed = ReportedRotary(8, cached_positions=4).to("cuda")
    assert fixed(heads(5, device="cuda")).device.type == "cuda"


def test_the_fix_leaves_1409_of_131072_positions_distinct_in_bfloat16() -> None:
    """LOG-27. The first wrong position is 257; cosines are off by up to 2, by 0.48 on average over width 80."""
    fixed = ReportedRotary(2, cached_positions=1).to(torch.bfloat16)
    positions = torch.arange(CONTEXT, dtype=fixed.inv_freq.dtype)
    assert positions.unique().numel() == 1409
    assert int((positions.long() != torch.arange(CONTEXT)).nonzero()[0]) == 257
    x = torch.tensor([1.0, 0.0]).expand(1, CONTEXT, 1, 2)
    ours, theirs = rope(x).flatten(0, 2), fixed(x.bfloat16()).flatten(0, 2)
    assert ours.double().unique(dim=0).shape[0] > 0.99 * CONTEXT
    assert theirs.double().unique(dim=0).shape[0] <= 1409
    fixed = ReportedRotary(80, cached_positions=1).to(torch.bfloat16)
    fixed(torch.empty(1, CONTEXT, 1, 80, dtype=torch.bfloat16))
    cos = default_tables().rows(heads(1, width=80), base=10_000.0, num_positions=CONTEXT)[:CONTEXT:7, :40]
    error = (fixed.cos_cached[::7, :40].float() - cos).abs()
    assert error.max() > 1.99
    assert error.mean().item() == pytest.approx(0.48, abs=0.005)


@pytest.mark.parametrize(("position", "finite"), [(65_519, True), (65_520, False)])
def test_the_fix_overflows_in_float16_from_65520_on(position: int, finite: bool) -> None:
    x = heads(1, dtype=torch.float16)
    assert reported_low_precision_rope(x, offset=position).isfinite().all() == finite
    assert rope(x, offset=position).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("offset", [0, 250, 5000])
def test_the_reported_form_is_the_reported_module_after_a_cast(dtype: torch.dtype, offset: int) -> None:
    module = ReportedRotary(8, cached_positions=1).to(dtype)
    x = heads(20, dtype=dtype)
    assert torch.equal(reported_low_precision_rope(x, offset=offset), module(x, offset=offset))


def test_the_report_grows_only_when_a_sequence_is_longer() -> None:
    """LOG-28: at least that it did; each layer on its own, and from the first row."""
    module = ReportedRotary(8, cached_positions=10)
    cache = module.cos_cached
    module(heads(10))
    assert module.cos_cached is cache
    module(heads(11))
    assert torch.equal(module.cos_cached[:10], cache)
    assert module.state_dict() == {}
