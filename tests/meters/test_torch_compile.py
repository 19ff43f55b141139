"""Regions under ``torch.compile`` are measured as Inductor allocates them, or eagerly with a note."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_steps import STEPS, WARMUP, adamw_step, block_inference, block_train, classifier_train, mlp_train
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfix
from memfix.errors import MeasurementError
from memfix.meters.base import Reading
from memfix.meters.simulated import SimulatedMeter
from memfix.meters.simulated.compiled import compilation, inductor
from memfix.meters.simulated.compiled.compiler import RAN_EAGER
from memfix.meters.simulated.environment import _NoDeviceFakeMode

pytest.importorskip("triton")

FLOAT = 4
COUNTED = f"a region under torch.compile is counted as Inductor of torch {torch.__version__[:4]} allocates it"


@pytest.fixture(autouse=True)
def as_if_never_compared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(compilation, "COMPARED", frozenset())


def step_of(function: Callable[[torch.Tensor], object], *size: int) -> Callable[[str], Any]:
    def build(device: str) -> Any:
        x = torch.randn(*size, device=device)
        return lambda: function(x)

    return build


@functools.cache
def reading_of(build: Callable[..., Any], *, compiles: bool) -> Reading:
    """A compilation takes seconds, and several tests look at the same one."""
    return memfix.peak(functools.partial(build, compiles=compiles))


# ---------------------------------------------------------------- what is counted
def test_a_fused_region_allocates_its_result_only() -> None:
    reading = memfix.peak(step_of(torch.compile(lambda x: ((x + 1) * 2).exp().sin()), 1000))
    assert (reading.peak_bytes, reading.held_bytes, reading.leaked_bytes) == (1000 * FLOAT, 1000 * FLOAT, 0)
    assert (reading.notes, reading.exact) == ((COUNTED,), False)


def test_a_compiled_step_is_exact_where_steps_were_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "COMPARED", frozenset({("H200", torch.__version__[:4])}))
    reading = memfix.peak(step_of(torch.compile(lambda x: ((x + 1) * 2).exp().sin()), 1000))
    assert (reading.peak_bytes, reading.notes, reading.exact) == (1000 * FLOAT, (), True)


def test_a_buffer_that_kernels_share_is_counted_until_it_is_reused() -> None:
    """Pointwise operators between two products are one kernel, which writes into the first product's buffer."""

    def products(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        return (y.exp() + y).relu() @ x

    num_buffers = [
        memfix.peak(step_of(function, 256, 256)).peak_bytes / (256 * 256 * FLOAT)
        for function in (products, torch.compile(products))
    ]
    assert num_buffers == [3, 2]


@pytest.mark.parametrize("build", [mlp_train, block_train, block_inference])
def test_a_compiled_step_takes_less_than_eager_where_kernels_are_fused(build: Any) -> None:
    eager, reading = reading_of(build, compiles=False), reading_of(build, compiles=True)
    assert reading.notes == (COUNTED,)
    assert eager.exact
    assert reading.peak_bytes < 0.85 * eager.peak_bytes


def test_a_compiled_backward_recomputes_what_a_kernel_can_fuse() -> None:
    """GELU and the norm are recomputed from the first product, so only that is kept for the backward."""

    def kept(compiles: bool) -> int:
        rows = reading_of(mlp_train, compiles=compiles).alive_at_peak
        return sum(row.bytes for row in rows if "kept for backward" in row.what)

    assert kept(True) < kept(False) / 2


def test_allocations_are_attributed_to_the_line_that_calls_the_region() -> None:
    for row in reading_of(mlp_train, compiles=True).alive_at_peak:
        assert "compiled_steps.py" in row.place


def test_a_compiled_optimizer_writes_into_its_state() -> None:
    reading = memfix.peak(functools.partial(adamw_step, layers=1), warmup=WARMUP)
    assert reading.notes == (COUNTED,)
    assert reading.peak_bytes < 512 * 512 * FLOAT  # eager takes a temporary of each parameter's size
    parameters = (512 * 512 + 512) * FLOAT
    assert sum(row.bytes for row in reading.kept) == 2 * parameters + 2 * FLOAT  # moments, and a count for each of 2


def test_an_input_that_is_less_aligned_than_at_the_compilation_is_copied() -> None:
    run = torch.compile(lambda x: x + 1)

    def measured(offset: int) -> int:
        def build(device: str) -> Any:
            x = torch.randn(1000 + 8, device=device)
            offsets = iter([0, offset])
            return lambda: run(x[next(offsets) :][:1000])

        return memfix.peak(build).peak_bytes

    assert (measured(4), measured(1)) == (4000, 8000)


def test_real_weights_from_outside_are_as_they_were() -> None:
    layer = nn.Linear(8, 8)
    run = torch.compile(layer)
    before = layer.weight

    def build(device: str) -> Any:
        layer.to(device)
        x = torch.randn(4, 8, device=device)
        return lambda: run(x)

    assert memfix.peak(build).notes == (COUNTED,)
    assert layer.weight is before


def test_compiled_attention_with_a_score_function_is_measured() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    attend = torch.compile(flex_attention)
    reading = memfix.peak(step_of(lambda x: attend(x, x, x), 1, 2, 1024, 64))
    assert COUNTED in reading.notes
    assert reading.peak_bytes < 2 * 1024 * 1024 * FLOAT  # the scores are not materialised


def test_a_graph_break_gives_two_regions_and_their_edge_is_held() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = (x + 1).exp()
        torch._dynamo.graph_break()
        return (y + 1).exp()

    whole = memfix.peak(step_of(torch.compile(lambda x: ((x + 1).exp() + 1).exp()), 1000))
    reading = memfix.peak(step_of(torch.compile(broken), 1000))
    assert (whole.peak_bytes, reading.peak_bytes) == (4000, 8000)
    line = broken.__code__.co_firstlineno + 2
    said = f"torch.compile breaks the graph of broken in line {line}: its parts are compiled apart"
    assert (whole.notes, reading.notes) == ((COUNTED,), (COUNTED, said))


def test_a_constant_of_the_region_is_part_of_its_kernel() -> None:
    run = torch.compile(lambda x: x * torch.tensor([1.0, 2.0], device=x.device))
    reading = memfix.peak(step_of(run, 1000, 2))
    assert (reading.peak_bytes, reading.notes) == (2000 * FLOAT, (COUNTED,))


def test_a_checkpoint_in_a_compiled_region_keeps_less() -> None:
    def train(checkpoints: bool) -> int:
        def build(device: str) -> Any:
            with torch.device(device):
                block, x = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)), torch.randn(512, 256)
            around = functools.partial(checkpoint, use_reentrant=False) if checkpoints else lambda run, x: run(x)
            run = torch.compile(lambda x: around(block, around(block, x)))
            return lambda: run(x).sum().backward()

        reading = memfix.peak(build)
        assert reading.notes == (COUNTED,)
        return sum(row.bytes for row in reading.alive_at_peak if "kept for backward" in row.what)

    assert train(True) < train(False) / 2


def test_a_triton_kernel_in_a_compiled_region_is_not_launched() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def double(source, target, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * block + tl.arange(0, block)
        tl.store(target + at, 2 * tl.load(source + at, at < count), at < count)

    def doubled(x: torch.Tensor) -> torch.Tensor:
        target = torch.empty_like(x)
        double[(triton.cdiv(x.numel(), 128),)](x, target, x.numel(), block=128)
        return target

    reading = memfix.peak(step_of(torch.compile(lambda x: doubled(x.sin()).cos()), 1000))
    assert (reading.peak_bytes, reading.notes) == (2 * 1000 * FLOAT, (COUNTED,))


@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_that_change_are_measured_at_the_last_one(dynamic: bool | None) -> None:
    layer = torch.compile(lambda x: (x + 1).exp(), dynamic=dynamic)
    sizes = iter([300, 200, 100])

    def build(device: str) -> Any:
        return lambda: layer(torch.empty(next(sizes), device=device))

    reading = memfix.peak(build, warmup=2)
    assert reading.peak_bytes == 2 * 100 * FLOAT
    assert reading.notes == (COUNTED, inductor.DYNAMIC)


def test_sizes_of_an_earlier_simulation_do_not_make_a_size_dynamic() -> None:
    run = torch.compile(lambda x: (x + 1).exp())
    assert [memfix.peak(step_of(run, size)).notes for size in (100, 200)] == [(COUNTED,)] * 2


def test_a_backward_with_dynamic_sizes_is_compiled_when_it_first_runs() -> None:
    reading = memfix.peak(functools.partial(mlp_train, dynamic=True))
    assert reading.notes == (COUNTED, inductor.DYNAMIC)
    assert reading.peak_bytes < 0.85 * reading_of(mlp_train, compiles=False).peak_bytes


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_other_backends_run_as_they_are(backend: str) -> None:
    reading = memfix.peak(step_of(torch.compile(lambda x: (x + 1).exp(), backend=backend), 1000))
    assert (reading.peak_bytes, reading.exact) == (8000, True)


def test_operands_that_inductor_may_pad_give_bounds() -> None:
    def build(device: str) -> Any:
        a, b = (torch.randn(4095, 4095, device=device, dtype=torch.bfloat16) for _ in range(2))
        run = torch.compile(torch.mm)
        return lambda: run(a, b)

    reading = memfix.peak(build)
    assert inductor.PADDED in reading.notes
    assert reading.at_least == 4095 * 4095 * 2
    assert reading.at_most == reading.peak_bytes > 2 * reading.at_least


# ---------------------------------------------------------------- what is said
def test_cuda_graphs_and_tuning_are_noted() -> None:
    def notes(**options: Any) -> tuple[str, ...]:
        return memfix.peak(step_of(torch.compile(lambda x: x + 1, **options), 1000)).notes

    graphs, tuned = (inductor._DOUBTFUL[name] for name in ("triton.cudagraphs", "max_autotune"))
    assert notes(mode="reduce-overhead") == (COUNTED, graphs)
    assert notes(mode="max-autotune") == (COUNTED, graphs, tuned)
    assert notes(mode="max-autotune-no-cudagraphs") == (COUNTED, tuned)
    with torch._inductor.config.patch("triton.cudagraphs", True):
        assert notes() == (COUNTED, graphs)


def test_a_region_on_the_cpu_keeps_its_values() -> None:
    run = torch.compile(lambda lengths: lengths + 1)

    def build(device: str) -> Any:
        return lambda: torch.empty(int(run(torch.tensor([1, 2])).sum()), device=device)

    reading = memfix.peak(build)
    assert reading.peak_bytes == 5 * FLOAT
    assert reading.notes == (f"{RAN_EAGER} (NotImplementedError: aten.add.Tensor computes on the CPU)",)


def test_a_compiler_that_fails_leaves_the_region_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(inductor, "_pads", lambda compiler: fail)

    def build(device: str) -> Any:
        a, b = (torch.randn(4095, 4095, device=device, dtype=torch.bfloat16) for _ in range(2))
        run = torch.compile(lambda a, b: (a @ b).relu())
        return lambda: run(a, b)

    reading = memfix.peak(build)
    assert reading.notes == (f"{RAN_EAGER} (ValueError: planted)",)
    assert reading.peak_bytes == 2 * 4095 * 4095 * 2


def test_compiled_code_that_fails_leaves_the_step_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(inductor.generated_code, "empty_strided", fail)
    reading = memfix.peak(step_of(torch.compile(lambda x: (x + 1).exp()), 1000))
    assert reading.notes == (f"{RAN_EAGER} (ValueError: planted)",)
    assert reading.peak_bytes == 8000


def test_errors_of_the_users_code_are_the_users() -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones(3, device=x.device)

    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(Exception, match="size mismatch"):
        memfix.peak(step_of(torch.compile(wrong), 4, 4))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        memfix.peak(step_of(torch.compile(broken, fullgraph=True), 4))


def test_a_second_gpu_is_refused_in_a_compiled_region() -> None:
    with pytest.raises(MeasurementError, match="one GPU is simulated"):
        memfix.peak(lambda d: functools.partial(torch.compile(lambda: torch.ones(4, device="cuda:1") + 1)))


def test_launches_are_those_of_the_users_kernels() -> None:
    assert SimulatedMeter().launches(step_of(torch.compile(lambda x: x + 1), 1000)) == []


# ---------------------------------------------------------------- what is left behind
def small_train(device: str) -> Any:
    with torch.device(device):
        layer, x = nn.Linear(64, 64), torch.randn(8, 64)
    run = torch.compile(nn.Sequential(layer, nn.GELU()))
    return lambda: run(x).sum().backward()


def state_of_torch() -> dict[str, Any]:
    from torch._dynamo import device_interface, eval_frame, pgo, trace_rules
    from torch._inductor import async_compile, compile_fx, output_code, utils
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.fx_passes import pad_mm
    from torch.utils._triton import has_triton

    trace_rules.get_torch_obj_rule_map()
    modules = (torch.cuda, torch._C._dynamo.guards, eval_frame, compile_fx, utils, pad_mm, torch._subclasses)
    classes = (
        torch.Tensor, torch._subclasses.FakeTensor, torch._subclasses.FakeTensorMode, output_code.CompiledFxGraph,
        async_compile.AsyncCompile, device_interface.CudaInterface,
    )  # fmt: skip
    found = {
        f"{owner.__name__}.{name}": thing
        for owner in (*modules, *classes)
        for name, thing in vars(owner).items()
        if callable(thing) or isinstance(thing, (property, staticmethod))
    }
    return found | {"modules": [*PyCodeCache.modules], "sizes": pgo._CODE_STATE, "has_triton": has_triton()}


def test_nothing_stays_patched_and_nothing_stays_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    memfix.peak(small_train)
    before = state_of_torch()
    memfix.peak(small_train)
    memfix.peak(functools.partial(adamw_step, layers=1))
    after = state_of_torch()
    assert {name for name in before | after if before.get(name) is not after.get(name)} <= {"modules"}
    assert before["modules"] == after["modules"]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [
        name for name, module in sys.modules.items() if "memfix-inductor" in str(getattr(module, "__file__", ""))
    ]


def test_compilations_of_the_user_survive_and_ours_do_not() -> None:
    num_compiled = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal num_compiled
        num_compiled += 1
        return graph.forward

    function = torch.compile(lambda x: x + 1, backend=backend)
    assert function(torch.ones(3)).tolist() == [2.0] * 3
    memfix.peak(step_of(function, 1000))
    assert num_compiled == 2
    assert function(torch.ones(3)).tolist() == [2.0] * 3
    assert num_compiled == 2


def test_a_function_that_was_simulated_first_compiles_for_real() -> None:
    function = torch.compile(lambda x: F.relu(x) + 1, backend="aot_eager")
    memfix.peak(step_of(function, 3))
    assert function(torch.tensor([-1.0, 2.0])).tolist() == [1.0, 3.0]


def test_no_tensor_of_a_simulation_stays_alive() -> None:
    from torch._subclasses.fake_tensor import FakeTensor

    def alive() -> list[FakeTensor]:
        gc.collect()
        fakes = [thing for thing in gc.get_objects() if issubclass(type(thing), FakeTensor)]
        return [fake for fake in fakes if isinstance(fake.fake_mode, _NoDeviceFakeMode)]

    before = alive()  # of other tests, in what failed as it should
    memfix.peak(small_train)
    assert len(alive()) == len(before)


def test_compilers_that_are_first_imported_in_a_simulation_are_as_elsewhere() -> None:
    """They were imported among the simulation's patches, and the backward then wrote a second tensor of logits."""
    code = "import compiled_steps; print(compiled_steps.peak_after_a_step_that_imports_compilers())"
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(memfix.__file__).parents[1])])
    fresh = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    reading = reading_of(classifier_train, compiles=True)
    assert int(fresh.stdout) == reading.peak_bytes
    assert reading.peak_bytes < 2 * 2048 * 8192 * FLOAT


# ---------------------------------------------------------------- against a GPU
@pytest.mark.gpu(use="meters")
@pytest.mark.parametrize("name", STEPS)
def test_a_compiled_step_is_predicted(name: str) -> None:
    predicted = memfix.peak(STEPS[name], warmup=WARMUP)
    measured = memfix.peak(STEPS[name], meter="cuda", warmup=WARMUP)
    if predicted.exact:
        assert predicted.peak_bytes == measured.peak_bytes
    elif predicted.at_least is not None and predicted.at_most is not None:
        assert predicted.at_least <= measured.peak_bytes <= predicted.at_most
    else:
        assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.05, abs=64 * 1024)


def test_afterwards_torch_chooses_the_kernels_of_attention_anew() -> None:
    """With the simulated one remembered, a real compiled step had no gradient of attention."""

    @torch.compile
    def attended(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q).sum()

    def build(device: str) -> Any:
        q = torch.randn(1, 2, 64, 16, device=device, requires_grad=True)
        return lambda: attended(q).backward()

    memfix.peak(build)
    assert not torch.ops.aten.scaled_dot_product_attention.default._dispatch_cache
