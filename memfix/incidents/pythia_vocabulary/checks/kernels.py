"""Checks of claims about the matmul kernels: the shipped source, emulated on the host, and times of an H200."""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
from collections.abc import Callable

import torch

from ....cuda_kernels.emulated import Traffic, cannot_emulate, emulated
from ....ops.matmul import row_max
from ....ops.matmul.launching import SOURCE
from ....ops.matmul.one_thread import one_thread_matmul
from ....ops.matmul.tiled import tiled_matmul
from ...judging import ON_H200, CheckResult, NotMeasured, check, holds_if
from . import Evidence

EMULATED = "the kernel's source, emulated"
M, N, K = 48, 32, 64
TILE_LOOP = re.compile(r"#pragma unroll\s*\n\s*for \(int step = 0; step < TILE; \+\+step\)")


def _traffic(form: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Traffic:
    _require_emulation()
    with emulated() as traffic:
        form(torch.ones(M, K), torch.ones(K, N))
    return traffic


def _require_emulation() -> None:
    if reason := cannot_emulate():
        raise NotMeasured(f"needs a C++ compiler: {reason}")


@check("PYT-13")
def loads_without_tiles(evidence: Evidence) -> CheckResult:
    loads = _traffic(one_thread_matmul).loads
    return holds_if(loads == 2 * M * N * K, EMULATED, loads=loads, m=M, n=N, k=K)


@check("PYT-14")
def tiles(evidence: Evidence) -> CheckResult:
    """Count the loads of both kernels, and read the tiles that the source declares."""
    times = _traffic(one_thread_matmul).loads / _traffic(tiled_matmul).loads
    source = SOURCE.read_text(encoding="utf-8")
    tile = int(re.findall(r"#define TILE (\d+)", source)[0])
    shared_bytes = 4 * tile * tile * len(re.findall(r"__shared__ float \w+\[TILE\]\[TILE\];", source))
    return holds_if(times == tile == 16, EMULATED, times=f"{times:.0f}", shared_bytes=shared_bytes, threads=tile * tile)


@check("PYT-16")
def source_is_shipped(evidence: Evidence) -> CheckResult:
    kernels = re.findall(r"__global__ void (\w+)", SOURCE.read_text(encoding="utf-8"))
    return holds_if(bool(kernels), "the package's files", file=f"memfix/ops/matmul/{SOURCE.name}", kernels=len(kernels))


@check("PYT-17")
def make_rebuilds(evidence: Evidence) -> CheckResult:
    """See what make would run; where there is nvcc, the tests run it."""
    if shutil.which("make") is None:
        raise NotMeasured("needs make")
    command = ["make", "-n", "--always-make", "clean", "matmul.cubin"]
    ended = subprocess.run(command, cwd=SOURCE.parent, capture_output=True, text=True, check=False)
    return holds_if(ended.returncode == 0, "make -n", commands=len(ended.stdout.splitlines()))


@check("PYT-39")
def coalesced(evidence: Evidence) -> CheckResult:
    """Count the sectors of 32 bytes that a load by 32 threads touches; 4 are the fewest."""
    traffic = _traffic(tiled_matmul)
    return holds_if(
        traffic.sectors == 4 * traffic.requests, EMULATED, sectors=f"{traffic.sectors / traffic.requests:.0f}"
    )


@check("PYT-40")
def unrolled(evidence: Evidence) -> CheckResult:
    found = len(TILE_LOOP.findall(SOURCE.read_text(encoding="utf-8")))
    return holds_if(found == 1, f"memfix/ops/matmul/{SOURCE.name}", loops=found)


@check("PYT-41")
def maximum_drops_nan(evidence: Evidence) -> CheckResult:
    """Compare the kernel with torch's amax on a row with a NaN and on a row of NaNs."""
    _require_emulation()
    nan = float("nan")
    x_RC = torch.tensor([[1.0, nan, 3.0], [nan, nan, nan]])
    with emulated():
        of_kernel = row_max(x_RC).tolist()
    amax = x_RC.amax(1).tolist()
    return holds_if(of_kernel == [3.0, float("-inf")], EMULATED, kernel=str(of_kernel), amax=str(amax))


@check("PYT-42")
def two_to_three_times_as_fast(evidence: Evidence) -> CheckResult:
    """Compare the times of the one-thread and the tiled kernel, at each size from 512 to 8192."""
    seconds = {
        entry["dims"]["M"]: {name: row["seconds"] for name, row in entry["phases"]["forward"]["rows"].items()}
        for entry in evidence.comparison("matmul", "sizes")
    }
    times = {size: of["one_thread"] / of["tiled"] for size, of in sorted(seconds.items())}
    of_cublas = {size: of["tiled"] / of["naive"] for size, of in seconds.items()}
    return holds_if(
        2 <= statistics.median(times.values()) <= 3,
        ON_H200,
        by_size=", ".join(f"{value:.2f} at {size}" for size, value in times.items()),
        over_cublas=f"{min(of_cublas.values()):.0f} to {max(of_cublas.values()):.0f}",
    )
