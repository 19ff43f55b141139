"""What torch answers while a GPU is simulated, which paths Python code then takes, and that all is put back."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import memfix
from memfix.errors import MeasurementError
from memfix.meters.simulated.environment import simulated_gpu
from memfix.meters.simulated.gpus import H200, get_gpu
from memfix.meters.simulated.streams import GRADIENTS, RECORDED
from memfix.meters.simulated.tracking import StorageTracker

A100 = get_gpu("A100")
GiB = 1 << 30


@pytest.fixture
def on_a100() -> Iterator[StorageTracker]:
    with simulated_gpu(A100, hides_modes=True) as tracker:
        yield tracker


# ---------------------------------------------------------------- questions about the GPU
@pytest.mark.parametrize("name", ["A100", "H200", "L4", "RTX3090"])
def test_the_device_is_the_gpu_described(name: str) -> None:
    gpu = get_gpu(name)
    with simulated_gpu(gpu, hides_modes=True):
        properties = torch.cuda.get_device_properties(0)
        assert properties.name == torch.cuda.get_device_name() == f"NVIDIA {name} (simulated)"
        assert (properties.major, properties.minor) == torch.cuda.get_device_capability() == gpu.capability
        assert properties.multi_processor_count == gpu.multiprocessors
        assert properties.total_memory == gpu.memory_bytes
        assert torch.cuda.is_bf16_supported()


def test_there_is_one_gpu_and_it_is_current(on_a100: Any) -> None:
    cuda = torch.cuda
    assert (cuda.is_available(), cuda.is_initialized(), cuda.device_count(), cuda.current_device()) == (
        True,
        True,
        1,
        0,
    )
    with cuda.device(0):
        assert torch.empty(1, device="cuda").device == torch.device("cuda", 0)
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    assert accelerator.type == "cuda"


def test_free_memory_follows_the_ledger(on_a100: Any) -> None:
    total = A100.memory_bytes
    assert torch.cuda.mem_get_info() == (total, total)
    x = torch.empty(GiB, dtype=torch.uint8, device="cuda")
    small = torch.empty(1, device="cuda")
    assert torch.cuda.mem_get_info() == (total - GiB - 512, total)
    del x
    assert torch.cuda.mem_get_info() == (total - 512, total)
    del small
    assert torch.cuda.mem_get_info() == (total, total)


def test_memory_statistics_follow_the_ledger(on_a100: Any) -> None:
    x, y = torch.empty(1000, device="cuda"), torch.empty(1000, device="cuda")
    del x
    expected = {
        "requested_bytes.all.current": 4000,
        "requested_bytes.all.peak": 8000,
        "allocated_bytes.all.current": 4096,
        "allocated_bytes.all.peak": 8192,
    }
    for module in (torch.cuda, torch.cuda.memory):
        assert expected.items() <= module.memory_stats().items()
        assert (module.memory_allocated(), module.max_memory_allocated()) == (4096, 8192)
        module.reset_peak_memory_stats()
        assert module.max_memory_allocated() == 8192
    assert y.shape == (1000,)


def test_streams_and_events_do_nothing_in_order(on_a100: Any) -> None:
    stream, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event()
    assert isinstance(torch.cuda.current_stream(), torch.cuda.Stream)
    with torch.cuda.stream(stream), stream:
        start.record()
        stream.wait_stream(torch.cuda.default_stream())
        stream.wait_event(stream.record_event(end))
    stream.synchronize()
    torch.cuda.synchronize()
    assert (stream.query(), end.query(), start.elapsed_time(end)) == (True, True, 1.0)
    assert isinstance(stream.record_event(), torch.cuda.Event)


def test_ranges_for_a_profiler_do_nothing(on_a100: Any) -> None:
    with torch.cuda.nvtx.range("forward"):
        torch.cuda.nvtx.mark("here")


def _needs_no_argument(function: Any) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return all(
        each.default is not each.empty or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters
    )


@pytest.mark.parametrize("module", [torch.cuda, torch.cuda.memory, torch.cuda.profiler, torch.accelerator])
def test_every_public_function_answers_or_says_that_it_is_not_simulated(module: Any, on_a100: Any) -> None:
    called = []
    for name in module.__all__:
        function = getattr(module, name)
        if not inspect.isroutine(function) or not _needs_no_argument(function):
            continue
        called.append(name)
        with contextlib.suppress(MeasurementError):
            function()
    assert called


@pytest.mark.parametrize(
    "call",
    [
        "cuda.set_per_process_memory_fraction(0.5)", "cuda.memory._record_memory_history()", "cuda.memory._snapshot()",
        "cuda.set_sync_debug_mode('warn')", "cuda.can_device_access_peer(0, 0)", "cuda.ExternalStream(0)",
        "cuda.get_stream_from_external(0, 0)", "cuda.check_error(cuda.cudart().cudaProfilerStart())",
        "cuda.StreamContext(cuda.Stream()).__enter__()", "cuda.set_stream(cuda.current_stream())", "cuda._sleep(10)",
        "cuda.memory_stats()['num_alloc_retries']", "cuda.memory_stats()['reserved_bytes.all.peak']",
        "cuda.tunable.enable(True)", "torch.backends.cudnn.version() >= 8000", "cuda.nccl.version() >= (2, 10)",
        "torch.accelerator.set_stream(torch.accelerator.current_stream())", "torch.backends.cuda.is_built()",
        "cuda.get_device_properties(0).uuid", "cuda.Stream.priority_range()",
    ],
)  # fmt: skip
def test_what_a_training_loop_may_call_is_answered(call: str, on_a100: Any) -> None:
    eval(call, {"torch": torch, "cuda": torch.cuda})


@pytest.mark.parametrize(
    "call", ["CUDAGraph()", "graph_pool_handle()", "make_graphed_callables(abs, (torch.ones(1),))", "MemPool()"]
)
def test_what_is_not_simulated_is_refused_by_name(call: str) -> None:
    with pytest.raises(MeasurementError, match=r"the step uses .*, which are not simulated; measure it on a GPU"):
        memfix.peak(lambda device: eval(call, vars(torch.cuda)))


def test_a_library_that_keeps_a_private_function_of_cuda_can_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import torch\nif torch.cuda.is_available():\n    raw_stream = torch._C._cuda_getCurrentRawStream\n"
    (tmp_path / "keeps_raw_stream.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    had_it = hasattr(torch._C, "_cuda_getCurrentRawStream")

    def build(device: str) -> Any:
        library = importlib.import_module("keeps_raw_stream")
        assert had_it or library.raw_stream(0) == 0
        return lambda: torch.empty(256, device=device)

    assert memfix.peak(build).peak_bytes == 1024
    assert hasattr(torch._C, "_cuda_getCurrentRawStream") == had_it


def test_old_tensor_types_make_tensors_on_the_gpu(on_a100: Any) -> None:
    old: Any = torch.cuda.FloatTensor
    made = [old(2, 3), old([1.0, 2.0]), old(torch.Size((4,))), torch.cuda.HalfTensor(5)]
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in made[:3]] == [
        ((2, 3), torch.float32),
        ((2,), torch.float32),
        ((4,), torch.float32),
    ]
    assert made[3].dtype == torch.float16
    assert {tensor.device.type for tensor in made} == {"cuda"}
    assert isinstance(made[0], old)
    assert not isinstance(made[3], old)
    assert not isinstance(torch.empty(2), old)


def test_statistics_of_the_accelerator_are_those_of_the_gpu(on_a100: Any) -> None:
    x = torch.empty(GiB, dtype=torch.uint8, device="cuda")
    assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated() == GiB
    del x
    assert torch.accelerator.max_memory_allocated() == GiB
    assert torch.accelerator.memory_stats()["active_bytes.all.peak"] == GiB
    torch.accelerator.empty_cache()


def test_generators_are_on_their_device_and_draw(on_a100: Any) -> None:
    generator = torch.Generator(device="cuda").manual_seed(3)
    assert generator.device.type == "cuda"
    assert torch.Generator().device.type == "cpu"
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert not isinstance("cuda", torch.Generator)
    assert torch.randn(3, device="cuda", generator=generator).device.type == "cuda"


def test_the_state_of_random_numbers_can_be_kept(on_a100: Any) -> None:
    state = torch.cuda.get_rng_state()
    assert (state.dtype, state.device.type) == (torch.uint8, "cpu")
    torch.cuda.set_rng_state(state)
    torch.cuda.manual_seed_all(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)


def test_pinned_memory_is_the_hosts_and_not_counted() -> None:
    def build(device: str) -> Any:
        return lambda: torch.empty(1000).pin_memory().to(device, non_blocking=True)

    assert memfix.peak(build).peak_bytes == 4000


def test_fake_tensors_are_hidden_from_libraries_that_look_for_them(on_a100: Any) -> None:
    x = torch.empty(3, device="cuda")
    assert isinstance(x, FakeTensor)
    assert torch._subclasses.FakeTensor is not FakeTensor
    assert not isinstance(x, torch._subclasses.FakeTensor)


# ---------------------------------------------------------------- put back
PATCHED = [
    (torch, "Generator"),
    (torch, "einsum"),
    (torch.functional, "einsum"),
    (torch._subclasses, "FakeTensor"),
    (torch.nn.init, "_no_grad_trunc_normal_"),
    (torch.utils, "swap_tensors"),
    *((torch._VF, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")),
    *((torch.Tensor, name) for name in ("pin_memory", "record_stream", "numpy", "__format__")),
    (torch.UntypedStorage, "resize_"),
    *((torch.cuda, name) for name in "Stream Event current_stream is_available device_count synchronize".split()),
    *((torch.cuda, name) for name in "get_device_properties get_device_capability get_rng_state".split()),
    *(
        (module, name)
        for module in (torch.cuda, torch.cuda.memory)
        for name in "mem_get_info memory_stats memory_allocated max_memory_allocated".split()
    ),
    (torch.cuda.nvtx, "range_push"),
    *((torch.cuda, name) for name in "FloatTensor cudart utilization CUDAGraph".split()),
    *((torch.accelerator, name) for name in "memory_allocated empty_cache".split()),
    (torch.backends.cudnn, "version"),
]


def answers() -> list[Any]:
    return [getattr(owner, name) for owner, name in PATCHED]


def test_every_answer_is_another_inside_and_put_back_after_an_exception() -> None:
    before, inside = answers(), []

    def build(device: str) -> Any:
        inside.extend(answers())
        raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        memfix.peak(build)
    assert answers() == before
    unchanged = [PATCHED[i][1] for i, (was, then) in enumerate(zip(before, inside, strict=True)) if was == then]
    assert unchanged == []


def test_nested_worlds_are_left_one_by_one() -> None:
    before = answers()
    with simulated_gpu(H200, hides_modes=True):
        with simulated_gpu(A100, hides_modes=True):
            assert torch.cuda.get_device_capability() == (8, 0)
        assert torch.cuda.get_device_capability() == (9, 0)
    assert answers() == before


# ---------------------------------------------------------------- optimizers
def training(optimizer: Any, **options: Any) -> Any:
    def build(device: str) -> Any:
        model = nn.Sequential(*[nn.Linear(64, 64, device=device) for _ in range(4)])
        chosen = optimizer(model.parameters(), lr=0.1, **options)
        x = torch.empty(8, 64, device=device)

        def step() -> None:
            model(x).sum().backward()
            chosen.step()
            chosen.zero_grad()

        return step

    return build


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam, torch.optim.Adagrad])
def test_an_optimizer_takes_the_foreach_path_by_default(optimizer: Any) -> None:
    default, foreach, one_by_one = (
        memfix.peak(training(optimizer, **options)).peak_bytes
        for options in ({}, {"foreach": True}, {"foreach": False})
    )
    assert default == foreach != one_by_one


def test_a_fused_adamw_takes_no_more_than_backward() -> None:
    assert memfix.peak(training(torch.optim.AdamW, fused=True)).peak_bytes < 4 * (64 * 64 + 64) * 4 + 8 * 64 * 4 * 4


# ---------------------------------------------------------------- mixed precision, compilation, streams
def test_a_whole_step_with_a_grad_scaler_is_one_in_which_nothing_overflowed() -> None:
    stepped: list[int] = []

    def build(device: str) -> Any:
        model = nn.Linear(64, 64, device=device)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cuda")
        optimizer.register_step_post_hook(lambda *_: stepped.append(1))
        x = torch.empty(8, 64, device=device)

        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x).sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

        return step

    reading = memfix.peak(build)
    assert reading.exact
    assert stepped == [1, 1]
    assert reading.leaked_bytes == 0


def recorded(*, then_needs_more: bool) -> Any:
    def build(device: str) -> Any:
        other = torch.cuda.Stream()

        def step() -> None:
            x = torch.empty(1000, device=device)
            x.record_stream(other)
            del x
            torch.empty(1000 if then_needs_more else 0, device=device)

        return step

    return build


def test_memory_that_another_stream_uses_may_be_freed_late() -> None:
    reading = memfix.peak(recorded(then_needs_more=True))
    assert reading.notes == (RECORDED,)
    assert (reading.at_least, reading.peak_bytes, reading.at_most) == (4000, 4000, 8000)


def test_memory_that_another_stream_uses_does_not_matter_if_no_more_is_needed() -> None:
    assert memfix.peak(recorded(then_needs_more=False)).exact


def squared_on(*streams_of: Any) -> Any:
    """A chain of squares, each on a stream of its own, and a backward on the current stream."""

    def build(device: str) -> Any:
        x = torch.ones(1000, device=device, requires_grad=True)
        made = torch.cuda.Stream()

        def step() -> None:
            y = x
            for stream_of in streams_of:
                with torch.cuda.stream(stream_of(made)):
                    y = y.square()
            y.sum().backward()
            x.grad = None

        return step

    return build


def test_gradients_that_pass_between_streams_may_be_freed_late() -> None:
    """The engine records a gradient on the stream of the node that takes it."""
    one, two = (memfix.peak(squared_on(*each)) for each in ([default, default], [default, kept]))
    assert one.exact
    assert two.notes == (GRADIENTS,)
    assert two.at_least == two.peak_bytes == one.peak_bytes < two.at_most  # type: ignore[operator]


def default(_: Any) -> None:
    return None


def kept(stream: Any) -> Any:
    return stream


def test_a_whole_step_on_one_stream_frees_nothing_late() -> None:
    def build(device: str) -> Any:
        step, stream = squared_on(default, default)(device), torch.cuda.Stream()

        def on_stream() -> None:
            with torch.cuda.stream(stream):
                step()

        return on_stream

    assert memfix.peak(build).exact


@pytest.mark.parametrize(
    "move",
    [
        lambda module, device: module.to(device),
        lambda module, device: module.cuda(),
        lambda module, device: module.to(device).half().float(),
        lambda module, device: module.to(torch.bfloat16).to(device, torch.float32),
    ],
)
def test_a_module_is_moved_and_cast(move: Any) -> None:
    def build(device: str) -> Any:
        module = move(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)), device)
        assert {tensor.device.type for tensor in (*module.parameters(), *module.buffers())} == {"cuda"}
        assert all(isinstance(parameter, nn.Parameter) for parameter in module.parameters())
        x = torch.empty(8, 64, device=device)
        return lambda: module(x)

    # a weight, a bias, four vectors of the norm, its counter, and the input
    assert memfix.peak(build).base_bytes == (64 * 64 + 64 + 4 * 64) * 4 + 8 + 8 * 64 * 4


# ---------------------------------------------------------------- einsum
LEFT_TO_RIGHT = "einsum of three or more: contracted from left to right, as opt_einsum is not installed here"


@pytest.mark.parametrize(
    ("contract", "notes"),
    [
        (lambda a: torch.einsum("ij,jk,kl->il", a, a, a), (LEFT_TO_RIGHT,)),
        (lambda a: torch.einsum("ij,jk,kl->il", [a, a, a]), (LEFT_TO_RIGHT,)),
        (lambda a: torch.functional.einsum(a, [0, 1], a, [1, 2], a, [2, 3]), (LEFT_TO_RIGHT,)),
        (lambda a: torch.einsum("ij,jk->ik", a, a), ()),
        (lambda a: torch.einsum("ij->j", a), ()),
        (lambda a: torch.einsum("ij,jk->ik", [a, a]), ()),
        (lambda a: torch.einsum(a, [0, 1], a, [1, 2]), ()),
        (lambda a: torch.einsum(a, [0, 1], a, [1, 2], [2, 0]), ()),
    ],
)
def test_three_factors_without_opt_einsum_are_in_doubt(
    contract: Any, notes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.opt_einsum, "is_available", lambda: False)

    def build(device: str) -> Any:
        a = torch.empty(16, 16, device=device)
        return lambda: contract(a)

    assert memfix.peak(build).notes == notes


def test_three_factors_with_opt_einsum_are_in_no_doubt() -> None:
    pytest.importorskip("opt_einsum", reason="opt_einsum is what orders the factors")

    def build(device: str) -> Any:
        a = torch.empty(16, 16, device=device)
        return lambda: torch.einsum("ij,jk,kl->il", a, a, a)

    assert memfix.peak(build).notes == ()


@pytest.mark.parametrize(("gpu", "of_a_thread"), [("H200", 32 << 20), ("A100", 8_519_680)])
def test_workspaces_of_cublas_count_from_when_they_are_given_back(gpu: str, of_a_thread: int) -> None:
    def build(device: str, gives_back: bool):
        layer = torch.nn.Linear(8, 8, device=device)
        x = torch.ones(4, 8, device=device)

        def step() -> None:
            layer(x).sum().backward()
            layer.zero_grad()
            if gives_back:
                torch._C._cuda_clearCublasWorkspaces()

        return step

    kept, taken = (memfix.peak(functools.partial(build, gives_back=gives), gpu=gpu) for gives in (False, True))
    assert taken.peak_bytes - kept.peak_bytes == 2 * of_a_thread + (1 << 20)
    assert taken.held_bytes == kept.held_bytes
    assert hasattr(torch._C, "_cuda_clearCublasWorkspaces") == torch.backends.cuda.is_built()


# ---------------------------------------------------------------- streams and threads
MiB = 1 << 20


def product_on(stream_of: Any, *, grad: bool = False) -> Any:
    def build(device: str) -> Any:
        x = torch.empty(64, 64, device=device, requires_grad=grad)
        stream = torch.cuda.Stream()

        def step() -> None:
            with torch.cuda.stream(stream_of(stream)):
                x @ x

        return step

    return build


def test_a_product_on_a_new_stream_takes_a_workspace_of_cublas() -> None:
    reading = memfix.peak(product_on(lambda kept: torch.cuda.Stream()))
    assert (reading.peak_bytes, reading.exact) == (32 * MiB + 64 * 64 * 4, True)


@pytest.mark.parametrize("stream_of", [lambda kept: kept, lambda kept: None, lambda kept: torch.cuda.default_stream()])
def test_a_stream_that_was_used_before_keeps_its_workspace(stream_of: Any) -> None:
    reading = memfix.peak(product_on(stream_of))
    assert (reading.peak_bytes, reading.exact) == (64 * 64 * 4, True)


def test_the_backward_of_a_product_on_a_new_stream_is_noted() -> None:
    reading = memfix.peak(product_on(lambda kept: torch.cuda.Stream(), grad=True))
    assert not reading.exact
    assert "its backward runs on that stream too" in reading.notes[0]


def test_streams_are_current_inside_their_block(on_a100: Any) -> None:
    one, two = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    with torch.cuda.stream(one):
        assert torch.cuda.current_stream() == one != two
        with two:
            assert torch.cuda.current_stream() == two
        torch.cuda.set_stream(torch.cuda.default_stream())
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.mark.parametrize("in_pool", [False, True])
def test_threads_of_the_step_are_simulated(in_pool: bool) -> None:
    def build(device: str) -> Any:
        x, out = torch.empty(1000, device=device), []

        def run() -> None:
            out.append(x.exp())

        def step() -> None:
            if in_pool:
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(run).result()
            else:
                thread = threading.Thread(target=run)
                thread.start()
                thread.join()
            (out.pop() + x).sum()

        return step

    reading = memfix.peak(build)
    assert reading.peak_bytes == 2 * 4000
    assert not reading.exact
    assert "in threads of its own" in reading.notes[0]


@pytest.mark.parametrize("kind", ["torch.cuda.HalfTensor", None])
def test_a_tensor_is_cast_to_an_old_type(on_a100: Any, kind: Any) -> None:
    x = torch.empty(5, device="cuda").type(kind or torch.cuda.HalfTensor)
    assert (x.dtype, x.device.type) == (torch.float16, "cuda")
    assert x.type() == "torch.cuda.HalfTensor"
    assert x.type(torch.float32).dtype == torch.float32
