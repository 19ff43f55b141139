"""Imports for a process that will fork: its children start with them, which saves each of them seconds."""

from __future__ import annotations


def import_for_equality() -> None:
    """Import what a first comparison imports, but not Triton.

    Triton decides when it is imported whether kernels are interpreted, and one child differs from the others in that.
    """
    import torch.fx.experimental.symbolic_shapes  # noqa: F401

    from . import equality  # noqa: F401


def import_for_meters() -> None:
    """Import what a first simulated step imports, Triton too, and read what it reads."""
    import torch._dynamo  # noqa: F401

    from ..meters.simulated import composite, environment  # noqa: F401
    from . import drawn_budgets  # noqa: F401

    composite.native_on_cuda_only()  # reads torch's list of operators, once for all children
