"""The cache of cosines and sines: one table per device, base, width and dtype, shared by all layers.

A table is a pure function of its key, so no result depends on who filled it, or when. That is why a process may share
one (``default_tables``), and why modules hold none. In an incident report, the tables of thirty-six layers were 1.41
GiB of what it counted as parameters; one float32 table of 131,072 positions and width 80 is 40 MiB.

Precision: angles are float64 products of integer positions with float64 frequencies, off by about ``p * 2**-52``
radians at position ``p``; cosine and sine are then rounded once, to float32. Up to about 2**24 positions this rounding,
2**-25, is the larger error. Angles in float32 would be off by about ``p * 2**-24``: by 0.009 radians below 131,072.
"""

# P pairs (half of the width D of a head)

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

# rows are computed in blocks of this many, and a table's length is a power of two times it: so every block is the same
# computation, with the same bits, whatever lengths came before
BLOCK = 2048
_CACHE_ATTRIBUTE = "memfix_rope_tables"

_Key = tuple[torch.device, float, int, torch.dtype]


class RopeTables:
    """Tables of cosines and sines, made at first use and grown by doubling.

    A table is float32, and float64 only for a float64 ``x``. It lives on the device of ``x``, and no module moves or
    casts it. Growth copies the old rows, so they keep their bits; a shorter call reuses the longer table. Copying or
    pickling a module copies no table: a deep copy shares this object.

    Tables of fake tensors are stored in their ``FakeTensorMode`` and freed with it, so that simulations share none.
    CUDA graphs record addresses: ``reserve`` the longest length before a capture.
    """

    def __init__(self) -> None:
        self._tables: dict[_Key, torch.Tensor] = {}
        self._growing = threading.RLock()

    def rows(self, x: torch.Tensor, *, base: float, num_positions: int) -> torch.Tensor:
        """Return a table ``[n, D]`` for ``x`` of width D, n >= ``num_positions``: a row is P cosines, then P sines."""
        key = (x.device, float(base), x.shape[-1], torch.promote_types(x.dtype, torch.float32))
        cache = self._cache_for(x)
        table = cache.get(key)
        if table is None or table.shape[0] < num_positions:
            with self._growing:
                table = cache.get(key)  # another thread may have grown it meanwhile
                if table is None or table.shape[0] < num_positions:
                    table = _grown(table, x, key, num_positions)
                    if _fake_mode_of(table) is _fake_mode_of(x):  # else a fake mode was active around a real x
                        cache[key] = table
        return table

    def reserve(self, x: torch.Tensor, *, base: float, num_positions: int) -> None:
        """Grow the table for calls with tensors like ``x`` to ``num_positions`` now."""
        self.rows(x, base=base, num_positions=num_positions)

    def clear(self) -> None:
        """Drop every table; the next call makes a new one."""
        with self._growing:
            self._tables.clear()

    @property
    def bytes(self) -> int:
        """The size of all tables, on all devices together."""
        return sum(table.nbytes for table in list(self._tables.values()) if table.device.type != "meta")

    def __deepcopy__(self, memo: dict[int, Any]) -> RopeTables:
        return self

    def __reduce__(self) -> tuple[Callable[[], RopeTables], tuple[()]]:
        return (default_tables if self is default_tables() else RopeTables), ()

    def _cache_for(self, x: torch.Tensor) -> dict[_Key, torch.Tensor]:
        mode = _fake_mode_of(x)
        if mode is None:
            return self._tables
        # a fake tensor references its mode: stored here, it would keep the mode, and what the mode references, alive
        caches = vars(mode).setdefault(_CACHE_ATTRIBUTE, weakref.WeakKeyDictionary())
        return caches.setdefault(self, {})


_DEFAULT_TABLES = RopeTables()  # not made by a cached function: torch.compile would call it again


def default_tables() -> RopeTables:
    """Return the tables that are used where none are given, shared by the whole process."""
    return _DEFAULT_TABLES


def _fake_mode_of(tensor: torch.Tensor) -> Any:
    from torch._subclasses.fake_tensor import FakeTensor

    return tensor.fake_mode if isinstance(tensor, FakeTensor) else None


def _grown(old: torch.Tensor | None, x: torch.Tensor, key: _Key, num_positions: int) -> torch.Tensor:
    """Return a longer table that begins with the rows of ``old``."""
    device, base, width, dtype = key
    mode = _fake_mode_of(x)
    length = BLOCK
    while length < num_positions:
        length *= 2
    # an inference tensor could not be saved for a later backward
    with torch.inference_mode(False), mode if mode is not None else contextlib.nullcontext():
        table = torch.empty(length, width, dtype=dtype, device=device)
        start = 0 if old is None else old.shape[0]
        if old is not None:
            table[:start] = old
        # computed on the CPU, where float64 always exists; the copy has ended before another stream can use the table
        table[start:] = _new_rows(start, length, base, width, dtype, "meta" if device.type == "meta" else "cpu")
    if old is not None and device.type == "cuda" and mode is None:
        torch.cuda.synchronize(device)  # kernels of other streams may still read the old table, which is freed now
    return table


def _new_rows(start: int, stop: int, base: float, width: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Compute rows ``start`` to ``stop``, both multiples of ``BLOCK``."""
    pairs_P = torch.arange(0, width, 2, dtype=torch.float64, device=device)
    frequencies_P = torch.pow(base, -pairs_P / width)
    rows = torch.empty(stop - start, width, dtype=dtype, device=device)
    for first in range(start, stop, BLOCK):
        positions = torch.arange(first, first + BLOCK, dtype=torch.float64, device=device)
        angles = positions[:, None] * frequencies_P
        block = rows[first - start : first - start + BLOCK]
        block[:, : width // 2] = angles.cos()
        block[:, width // 2 :] = angles.sin()
    return rows
