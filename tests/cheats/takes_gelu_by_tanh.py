"""Uses the tanh approximation of gelu, as some fused kernels do: errors up to 5e-4, which 16 bits hardly show."""

from __future__ import annotations

import functools
from unittest import mock

import torch.nn.functional as F

from memfix.ops.geglu_feed_forward import token_chunks
from memfix.ops.geglu_feed_forward.token_chunks import token_chunks_geglu_feed_forward

OP, LIKE, CAUGHT_BY = "geglu_feed_forward", "token_chunks", "equality"
_by_tanh = functools.partial(F.gelu, approximate="tanh")


@functools.wraps(token_chunks_geglu_feed_forward)
def form(*tensors, **options):
    with mock.patch.object(token_chunks.F, "gelu", _by_tanh):
        return token_chunks_geglu_feed_forward(*tensors, **options)
