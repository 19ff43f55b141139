"""Errors for steps that cannot be simulated. Each names the user's line and what to do."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator

from torch._subclasses import fake_tensor

from ...errors import ON_A_GPU, MeasurementError
from .source_lines import line_of_error

_NO_MEMORY = re.compile("data is not allocated yet|access data pointer of Tensor")
_WITHOUT_FAKE = re.compile(r"no fake impl registered for (?:<CustomOpDef\()?([\w:]+)")
_OF_REDUCER = re.compile(r"INTERNAL ASSERT FAILED at .*c10d/(comm|reducer)\.cpp")
_HIGHER_ORDER = re.compile(r"no rule registered for HigherOrderOperator (\w+)")
_NOT_SIMULATED = {
    "all __torch_dispatch__ handlers returned NotImplemented": "a tensor subclass without a __torch_dispatch__",
    "(pickle|local object).*(WeakValueDictionary|weakref|FakeTensor)": "pickles, or torch.save, of tensors on the GPU",
    r"storage_device\.is_cpu\(\) \|\| storage_device\.is_cuda\(\)": "a nested tensor",
    "shape_env must not be None": "a nested tensor of layout torch.jagged",
    "is not registered with any CUDA device": "an address on the GPU, by __cuda_array_interface__ or the like",
    "Found no NVIDIA driver|Cannot initialize CUDA without ATen_cuda": "an address on the GPU, or a call of CUDA",
}
"""What torch's errors say of simulated tensors -> what the step uses."""


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn torch's errors about fake tensors into a ``MeasurementError`` of one sentence. Other errors pass through."""
    try:
        yield
    except (MeasurementError, KeyboardInterrupt):
        raise
    except Exception as error:
        sentence = _sentence(error)
        if sentence is None:
            raise
        raise MeasurementError(sentence) from error


def _sentence(error: Exception) -> str | None:
    line = line_of_error(error)
    at = f" at {line.file}:{line.number}" if line is not None else ""
    first_line = (str(error).splitlines() or [""])[0][:200]
    if isinstance(error, (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)):
        return f"the step needs the values of a tensor ({error.func}){at}, which are unknown; {ON_A_GPU}"
    if isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)):
        return f"the step reads the memory of a tensor{at} whose values are unknown; {ON_A_GPU}"
    if isinstance(error, RuntimeError) and _OF_REDUCER.search(str(error)):
        what = "DistributedDataParallel takes its reduced gradients from other ranks, which are fake here"
        return f"{what}{at}; measure the module inside it, or use fully_shard"
    used = next((what for said, what in _NOT_SIMULATED.items() if re.search(said, str(error))), None)
    if used is not None:
        return f"the step uses {used}{at}, which is not simulated; {ON_A_GPU}"
    unsupported = _unsupported(error)
    if unsupported is not None:
        return f"the step uses what cannot be simulated ({unsupported}){at}; register a fake for it, or {ON_A_GPU}"
    if isinstance(error, NotImplementedError) and (higher_order := _HIGHER_ORDER.search(str(error))):
        return f"the step uses what cannot be simulated ({higher_order[1]}){at}; {ON_A_GPU}"
    if isinstance(error, NotImplementedError) or _inside_fake_tensors(error):
        return f"the step uses what cannot be simulated{at}: {first_line}; {ON_A_GPU}"
    if isinstance(error, RuntimeError) and re.search("two (different )?devices", str(error)):
        return f"tensors of two devices meet in one operator{at}: {first_line}"
    return None


def _unsupported(error: Exception) -> str | None:
    """The operator that has no fake kernel; None for another error."""
    if isinstance(error, (fake_tensor.UnsupportedOperatorException, fake_tensor.UnsupportedFakeTensorException)):
        return str(error)
    without_fake = _WITHOUT_FAKE.search(str(error)) if isinstance(error, RuntimeError) else None
    return without_fake[1] if without_fake else None


def _inside_fake_tensors(error: Exception) -> bool:
    """Whether an assertion failed inside torch's own code for fake tensors."""
    frames = list(traceback.walk_tb(error.__traceback__))
    innermost = frames[-1][0].f_code.co_filename.replace("\\", "/") if frames else ""
    return isinstance(error, AssertionError) and "torch/_subclasses/" in innermost
