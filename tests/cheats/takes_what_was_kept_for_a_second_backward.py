"""The first backward overwrites the kept products by gradients; the second one uses these as products."""

from __future__ import annotations

import functools
from unittest import mock

from memfix.ops.geglu_feed_forward import chunks
from memfix.ops.geglu_feed_forward.token_chunks import token_chunks_geglu_feed_forward

OP, LIKE, CAUGHT_BY = "geglu_feed_forward", "token_chunks", "equality"


class _Again(chunks._Chunked):
    @staticmethod
    def backward(ctx, upstream):
        ctx.kept_is_valid = ctx.plan.tokens_kept > 0
        return chunks._Chunked.backward(ctx, upstream)


@functools.wraps(token_chunks_geglu_feed_forward)
def form(*tensors, **options):
    with mock.patch.object(chunks, "_Chunked", _Again):
        return token_chunks_geglu_feed_forward(*tensors, **options)
