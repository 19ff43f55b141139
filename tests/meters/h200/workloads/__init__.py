"""91 steps at the sizes of real training, each as a builder for a meter: ``build(device) -> step``.

Their peaks on an H200 are in ``peaks.json``. How long a local variable lives is part of the workload: where a
name is bound to a temporary, it is alive until the step ends.
"""

from __future__ import annotations

from . import (
    attention,
    convolutions,
    elementwise,
    indexing,
    kda,
    layers,
    losses,
    optimizers,
    products,
    reductions,
    sdpa,
    sorting,
    transformer,
)
from .registry import Workloads

WORKLOADS = Workloads(
    **losses.WORKLOADS,
    **products.WORKLOADS,
    **attention.WORKLOADS,
    **sdpa.WORKLOADS,
    **kda.WORKLOADS,
    **layers.WORKLOADS,
    **elementwise.WORKLOADS,
    **convolutions.WORKLOADS,
    **indexing.WORKLOADS,
    **sorting.WORKLOADS,
    **reductions.WORKLOADS,
    **optimizers.WORKLOADS,
    **transformer.WORKLOADS,
)
