"""Measures how far the resident memory of this process grows while a step runs.

The operating system counts whole pages of everything in the process, C libraries included. Allocators reuse freed
pages, so they are asked to return them first; the growth may still be less than what the step allocated.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = mmap.PAGESIZE
_PROC = Path("/proc/self")
_RESET_PEAK = "5"  # written to clear_refs: VmHWM restarts from VmRSS


@dataclass(frozen=True)
class Growth:
    """``bytes`` is None if the growth could not be read; ``note`` says why, or why it is only a lower bound."""

    bytes: int | None
    note: str | None = None


def resident_growth(step: Callable[[], object]) -> Growth:
    """Run ``step`` and read the resident peak above the memory that was resident before."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # only glibc has malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
    try:
        (_PROC / "clear_refs").write_text(_RESET_PEAK)
        floor = _from_status("VmRSS")
    except (OSError, ValueError) as error:
        return _by_rusage(step, f"/proc/self is not usable here ({type(error).__name__})")
    step()
    return Growth(max(0, _from_status("VmHWM") - floor))


def _from_status(field: str) -> int:
    found = re.search(rf"^{field}:\s*(\d+) kB$", (_PROC / "status").read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(f"/proc/self/status has no {field}")
    return 1024 * int(found[1])


def _by_rusage(step: Callable[[], object], why: str) -> Growth:
    """The fallback: read the peak since the process began, which shows growth only above every earlier peak."""
    try:
        before = process_peak_bytes()
    except ImportError:  # Windows
        return Growth(None, f"resident memory was not read: {why}, and this system has no getrusage")
    step()
    note = f"resident memory is a lower bound: {why}, so only growth above the process's highest peak shows"
    return Growth(process_peak_bytes() - before, note)


def process_peak_bytes() -> int:
    """The highest resident memory of this process since it began."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
