"""The matrix products compared with cuBLAS, which is ``naive``, for M = N = K from 512 to 8192.

A public report promised that tiles of 16 x 16 would be 2 to 3 times as fast as one thread per element.
"""

from __future__ import annotations

from . import Comparison, Entry, Table

SIZES = (512, 1024, 2048, 4096, 8192)

COMPARISON = Comparison(
    tables={
        "sizes": Table(
            [Entry(str(size), f"M={size} N={size} K={size}") for size in SIZES], phases=("forward",), rounds=11
        ),
    },
    error_at={"M": 256, "N": 256, "K": 512},
)
