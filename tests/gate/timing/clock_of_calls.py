"""A clock that counts function calls instead of seconds: the same on every machine, however busy.

Put beside a program as ``sitecustomize.py``, so that its processes read this clock. It begins at the first reading.
"""

import sys
import time

_SECONDS_A_CALL = 1e-4
_num_calls = 0


def _count(frame: object, event: str, argument: object) -> None:
    global _num_calls
    _num_calls += event in ("call", "c_call")


def _perf_counter() -> float:
    if sys.getprofile() is None:
        sys.setprofile(_count)
    return _num_calls * _SECONDS_A_CALL


time.perf_counter = _perf_counter
