"""Measures regions under ``torch.compile`` as Inductor allocates them on the simulated GPU.

Dynamo, AOTAutograd and Inductor really compile the region for the simulated GPU. Only their code that queries a device,
times kernels or compiles Triton code is patched. The Python wrapper that Inductor generates then runs on fake tensors,
so the tracker sees the buffers that it allocates, reuses and deletes. Modules:

- ``compiler``: runs the compilers outside the simulation, and falls back to eager where they fail
- ``compilation``: what the two share, and how compiled code is run
- ``inductor``: the patches of Dynamo and Inductor
- ``generated_code``: stubs of the functions that generated wrappers call
- ``process_state``: undoes what a compilation leaves behind in the process
"""

from .compilation import CompiledCodeError
from .compiler import Compiler

__all__ = ["CompiledCodeError", "Compiler"]
