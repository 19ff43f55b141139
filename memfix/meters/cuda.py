"""The cuda meter: reads requested bytes from torch's caching allocator on a GPU, and can run a step under a cap."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import MeasurementError, MeterUnavailable
from ..orphans import ends_with_parent
from ..units import format_bytes
from .base import Reading, Step, StepBuilder
from .garbage import free_last_gradients, only_our_own_cycles
from .gpu_sharing import ALL_PARTS, free_cycles, gpu_capacity_bytes, gpu_for_bytes, in_parts_of_gpu, parts_for
from .stages import Stage, listening

_CHILD_TIMEOUT_S = 600
_BESIDE_A_STEP_BYTES = 1 << 30
"""The margin added to the bytes that a step is expected to take, for workspaces and fragmentation."""


def gpu_unavailable_reason() -> str | None:
    """Why no GPU can be measured here; None if one can."""
    import torch

    if not torch.cuda.is_available():
        return "torch sees no GPU"
    backend = torch.cuda.memory.get_allocator_backend()
    if backend == "simulated":
        return "the GPU is simulated"
    if backend != "native":
        return "the allocator is cudaMallocAsync, which keeps no peak of requested bytes; unset PYTORCH_CUDA_ALLOC_CONF"
    return None


@dataclass
class WatchedPeak:
    """The result of :func:`watched_peak`, set when its block ends."""

    bytes: int = 0


@contextlib.contextmanager
def watched_peak() -> Iterator[WatchedPeak]:
    """Measure the peak of requested bytes inside the block, above what was live before it."""
    import torch

    peak = WatchedPeak()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_stats().get("requested_bytes.all.current", 0)
    try:
        yield peak
    finally:
        torch.cuda.synchronize()
        peak.bytes = torch.cuda.memory_stats().get("requested_bytes.all.peak", 0) - base


@dataclass(frozen=True)
class CappedRun:
    """Whether a step ran under a cap of ``capacity_bytes``. ``peak_bytes`` is its reserved peak if it finished."""

    fits: bool
    capacity_bytes: int
    peak_bytes: int | None
    message: str


class CudaMeter:
    """Reads torch's allocator. ``expected_bytes`` is what a step and its inputs take, if known: if several processes
    measure, the others may use the rest of the memory meanwhile."""

    name = "cuda"
    simulation = None
    num_processes = 1
    """The number of processes that measure on one GPU. Each of several first tries a step in the memory that the step
    is expected to take, or in half of an equal share; if that is too little, it waits for all of the memory."""

    def __init__(self, expected_bytes: int | None = None) -> None:
        self._expected_bytes = expected_bytes

    def unavailable_reason(self) -> str | None:
        reason = gpu_unavailable_reason()
        return reason and f"{reason}; use the simulated meter"

    def capacity_bytes(self) -> int:
        return gpu_capacity_bytes()

    def expecting(self, total_bytes: int) -> CudaMeter:
        return CudaMeter(total_bytes)

    def measure(self, build: StepBuilder, *, warmup: int = 1) -> Reading:
        """Measure the step after a warm-up, so that cuBLAS workspaces, autotuning and caches are not counted."""
        import torch

        self._require()
        free_cycles()  # before the GPU is locked; later collections visit only the step's objects
        if self.num_processes > 1:
            with contextlib.suppress(torch.OutOfMemoryError), in_parts_of_gpu(self._parts_first()):
                return self._measured(build, warmup)
        with gpu_for_bytes():
            return self._measured(build, warmup)

    def _parts_first(self) -> int:
        if self._expected_bytes is not None:
            return parts_for(self._expected_bytes + self._expected_bytes // 4 + _BESIDE_A_STEP_BYTES)
        return max(1, ALL_PARTS // (2 * self.num_processes))

    def _measured(self, build: StepBuilder, warmup: int) -> Reading:
        import torch

        with only_our_own_cycles():
            step = _warmed_up(build, warmup)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats()
            peaks = StagePeaks()
            with listening(peaks.enter):
                result = step()
            torch.cuda.synchronize()
            after = peaks.finished()
            del result
            free_last_gradients("cuda")
            dropped = torch.cuda.memory_stats()
            gc.collect()
            leaked = torch.cuda.memory_stats()

        def above(key: str, stats: dict[str, int], point: str) -> int:
            return stats.get(f"{key}.all.{point}", 0) - before.get(f"{key}.all.current", 0)

        return Reading(
            meter=self.name,
            device=torch.cuda.get_device_name(),
            peak_bytes=above("requested_bytes", after, "peak"),
            base_bytes=before.get("requested_bytes.all.current", 0),
            held_bytes=above("requested_bytes", after, "current"),
            leaked_bytes=above("requested_bytes", leaked, "current"),
            allocated_bytes=above("allocated_bytes", after, "peak"),
            cyclic_bytes=above("requested_bytes", dropped, "current") - above("requested_bytes", leaked, "current"),
            reserved_bytes=above("reserved_bytes", after, "peak"),
            stages=tuple(peaks.stages),
        )

    def fits(self, build: StepBuilder, capacity_bytes: int, *, warmup: int = 1) -> CappedRun:
        """Run the step in a child process under a hard cap on GPU memory. Running out of memory raises no error.

        ``build`` is pickled for the child, so it must be importable: a function of a module, or a
        ``functools.partial`` of one. The cap counts what torch reserves, inputs included, but not the CUDA context.
        """
        self._require()
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_run_capped, args=(sender, build, capacity_bytes, warmup), daemon=True)
        with gpu_for_bytes(parts_for(capacity_bytes)):
            try:
                child.start()
            except (AttributeError, TypeError, ValueError, ImportError) as error:
                raise MeasurementError(
                    f"fits runs in a child process and cannot send it {build!r} ({error}); use a function of a module"
                ) from error
            sender.close()
            try:
                answer = receiver.recv() if receiver.poll(_CHILD_TIMEOUT_S) else None
            except EOFError:
                answer = None
            child.join(10)
            if child.is_alive():
                child.kill()
        if answer is None:
            raise MeasurementError(f"the capped run ended without an answer (exit code {child.exitcode})")
        outcome, peak_bytes, message = answer
        if outcome == "failed":
            raise MeasurementError(f"the capped run failed: {message}")
        return CappedRun(outcome == "fits", capacity_bytes, peak_bytes, message)

    def _require(self) -> None:
        reason = self.unavailable_reason()
        if reason is not None:
            raise MeterUnavailable(f"cuda meter unavailable: {reason}")


class StagePeaks:
    """The peaks of a step's stages. The allocator keeps one peak, which is read and reset when a stage begins."""

    _COUNTS = ("requested_bytes", "allocated_bytes", "reserved_bytes")

    def __init__(self, device: int | None = None) -> None:
        self.stages: list[Stage] = []
        self._device = device
        self._name: str | None = None
        self._start_bytes = 0
        self._highest: dict[str, int] = {}

    def enter(self, name: str | None) -> None:
        import torch

        if name != self._name:
            self._start_bytes = self._close()["requested_bytes.all.current"]
            self._name = name
            torch.cuda.reset_peak_memory_stats(self._device)

    def finished(self) -> dict[str, int]:
        """The allocator's statistics now, with the peaks of the whole step."""
        return {**self._close(), **self._highest}

    def _close(self) -> dict[str, int]:
        import torch

        stats = {f"{count}.all.{point}": 0 for count in self._COUNTS for point in ("current", "peak")}
        stats.update(torch.cuda.memory_stats(self._device))
        for key in (f"{count}.all.peak" for count in self._COUNTS):
            self._highest[key] = max(self._highest.get(key, 0), stats[key])
        if self._name is not None:
            current, peak = stats["requested_bytes.all.current"], stats["requested_bytes.all.peak"]
            self.stages.append(Stage(self._name, self._start_bytes, current, peak))
        return stats


def _warmed_up(build: StepBuilder, warmup: int) -> Step:
    import torch

    step = build("cuda")
    with warnings.catch_warnings():
        # torch warns when the first matrix product in backward creates the CUDA context
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
        for _ in range(warmup):
            step()
        torch.cuda.synchronize()
    free_last_gradients("cuda")
    gc.collect()
    return step


@ends_with_parent
def _run_capped(sender: Any, build: StepBuilder, capacity_bytes: int, warmup: int) -> None:
    """Run in the child process: send ``("fits" | "too large" | "failed", reserved peak, message)``."""
    import torch

    try:
        total = torch.cuda.get_device_properties(0).total_memory
        if capacity_bytes < total:
            torch.cuda.set_per_process_memory_fraction(capacity_bytes / total)
        step = build("cuda")
        for _ in range(warmup + 1):
            step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_reserved()
        sender.send(("fits", peak, f"peak {format_bytes(peak)} under a cap of {format_bytes(capacity_bytes)}"))
    except torch.cuda.OutOfMemoryError as error:
        sender.send(("too large", None, str(error).splitlines()[0]))
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        sender.send(("failed", None, f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"))
