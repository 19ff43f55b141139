"""The versions that memfix was tested with. ``ci/versions`` makes the results behind them. Imports no torch."""

from __future__ import annotations

import re

OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)
"""The tests of the simulated meter pass under these and under all minor versions between them."""
INTERPRETERS = "triton 3.5 to 3.9 with numpy 1.26 to 2.5"
INSTALL_INTERPRETER = "pip install 'triton==3.9.0' 'numpy==2.4.6'"
"""One pair of versions that work."""


def major_and_minor(version: str) -> tuple[int, int]:
    """``2.15.0+cu132`` is ``(2, 15)``."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ValueError(f"not a version: {version!r}")
    return int(found[1]), int(found[2])


def torch_range() -> str:
    """``2.11 to 2.15``"""
    return f"{OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} to {NEWEST_TORCH[0]}.{NEWEST_TORCH[1]}"


def untested_torch(version: str, measured: str | None) -> str | None:
    """Why bytes under this torch are an estimate, or None.

    ``measured`` is the torch under which the rules were compared with the GPU. A user's own table may be newer than the
    versions that memfix was tested with.
    """
    here = major_and_minor(version)
    if OLDEST_TORCH <= here <= NEWEST_TORCH or (measured and major_and_minor(measured) == here):
        return None
    on_gpu = f"; on a GPU they were measured with torch {measured}" if measured else ""
    return f"torch {version} was not tested: the rules follow the kernels of torch {torch_range()}{on_gpu}"
