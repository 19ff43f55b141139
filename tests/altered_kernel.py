"""CUDA kernels whose source is changed, for cheats."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from memfix.cuda_kernels import CudaKernel
from memfix.ops.kda import cuda
from memfix.ops.matmul import launching
from memfix.ops.matmul.differentiable import differentiable_product
from memfix.ops.matmul.tiled import tiled_matmul


@dataclass(frozen=True, kw_only=True)
class AlteredKernel(CudaKernel):
    honest: str
    altered: str

    @functools.cached_property
    def source(self) -> str:
        source = super().source
        assert self.honest in source, "the cheat changes what is no longer there"
        return source.replace(self.honest, self.altered)


def altered_matmul(honest: str, altered: str) -> Callable[..., Any]:
    """The form ``tiled`` of matmul with another kernel, forward and backward."""
    kernel = AlteredKernel(launching.SOURCE, "matmul_tiled", honest=honest, altered=altered)

    @functools.wraps(tiled_matmul)
    def form(left: Any, right: Any) -> Any:
        return differentiable_product(functools.partial(launching.product_by, kernel), left, right)

    return form


def altered_kda(honest: str, altered: str, *passes: str) -> Callable[..., Any]:
    """The form ``cuda`` of KDA with other kernels in some of its passes, forward and backward."""

    honest_kernel = cuda._kernel

    def other(*which: Any) -> CudaKernel:
        it = honest_kernel(*which)
        return AlteredKernel(it.path, it.name, it.constants, honest=honest, altered=altered)

    def altered_pass(name: str) -> Callable[..., None]:
        run = getattr(cuda._PASSES, name)

        def cheating(*given: Any) -> Any:
            with patch.object(cuda, "_kernel", other):
                return run(*given)

        return cheating

    cheating = replace(cuda._PASSES, **{name: altered_pass(name) for name in passes})

    def form(*arguments: Any, **options: Any) -> Any:
        with patch.object(cuda, "_PASSES", cheating):
            return cuda.cuda_kda(*arguments, **options)

    return form
