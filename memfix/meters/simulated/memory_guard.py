"""A guard by which no kernel reaches the memory of simulated tensors, which have none.

A composite kernel in C++ may launch a CUDA kernel without the dispatcher. Beside a real GPU that kernel would write to
address zero, which makes the process's CUDA context unusable. The storages are therefore marked so that libtorch raises
when C++ code asks for the address of memory to write to, before any launch.
"""

from __future__ import annotations

import re

from torch._subclasses.fake_tensor import FakeTensorMode

_REFUSED = re.compile("access data pointer of Tensor")


def guard(mode: FakeTensorMode) -> None:
    """Make libtorch raise when C++ code asks where to write into a fake tensor of this mode."""
    mode._allow_unsafe_data_ptr_access = False


def is_refused_access(error: Exception) -> bool:
    """Whether libtorch raised the error because a kernel was about to write into a simulated tensor."""
    return isinstance(error, RuntimeError) and _REFUSED.search(str(error)) is not None
