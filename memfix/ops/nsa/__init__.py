"""Native sparse attention without its scores: compressed blocks, selected blocks and a sliding window, gated.

After Yuan et al. 2025, "Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention" (arXiv
2502.11089). The paper's sizes l, d, l', n and w are ``compress_block``, ``compress_stride``, ``select_block``,
``num_selected`` and ``window``. Its equations, and our choices where they are open:

- 5, the sum of three gated attentions. The gates are inputs, already between 0 and 1, one for each query head. All
  three branches read the same keys and values; for separate keys in each branch, as in the paper, call once per branch
  with the other gates at zero.
- 7, compression. Block ``i`` is ``[i*d, i*d + l)``, seen by a query from the block's last token on. The paper's map is
  an MLP with an encoding of the place in the block and no stated size. Here it is a pooling by place and channel,
  ``mean((1 + position_embedding) * tokens)``, the plain mean without an embedding; keys and values share one table.
  Added instead of multiplied, an embedding would move all compressed keys alike, which softmax ignores. For a query
  that sees no complete block, this branch is zero.
- 8 and 10, scores for selection. They are the probabilities of the compressed attention, with the scale of equation 2,
  which 8 leaves out, summed over the query heads of a key-value head. No gradient flows through them.
- 9, from compressed blocks to selection blocks. Probabilities are weighted by the number of tokens that two blocks
  share: this is the paper's sum where both sizes are multiples of the stride, and defined where they are not.
- 11 and 12, the best ``n`` blocks, cut off at the query. They always include, and ``n`` counts as in the paper, the
  first block and the two that end at the query; with ``n`` below three the query's own goes first, then the first. Of
  equal scores the first block is taken; ``selection.py`` says which scores are equal.
- The window is the last ``w`` tokens, the query's own included.
"""

from __future__ import annotations

import torch

from ..arguments import require_shape
from ..dispatch import Dispatcher
from .arguments import Blocks, takes_kernels

DISPATCHER = Dispatcher("nsa", __name__, forms=("chunked", "triton"), otherwise="chunked", kernels="triton")
FORMS = DISPATCHER.names

# bytes of the largest tensor of a chunk where queries_per_chunk is not given
CHUNK_BYTES = 2**30
KERNELS_CHUNK_BYTES = 2**27


def nsa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: torch.Tensor,
    *,
    compress_block: int,
    compress_stride: int,
    select_block: int,
    num_selected: int,
    window: int,
    position_embedding: torch.Tensor | None = None,
    scale: float | None = None,
    queries_per_chunk: int | None = None,
    form: str = "auto",
) -> torch.Tensor:
    """Attend causally from ``q`` (``[B, T, H, D]``) to ``k`` and ``v`` (``[B, T, G, D]``, H a multiple of G) in three
    branches, and return their sum weighted by ``gates`` (``[B, T, H, 3]``: compressed, selected, window).

    ``position_embedding`` is ``[compress_block, D]``. ``scale`` is ``D**-0.5`` unless given. Memory grows like T in
    forward and in backward: nothing of size T x T is made or held. Without ``queries_per_chunk``, chunks
    are as large as ``CHUNK_BYTES`` allows, or ``KERNELS_CHUNK_BYTES`` where kernels run.

    ``form="auto"`` is ``triton`` on a GPU where Triton is installed, and ``chunked`` elsewhere.
    """
    name = DISPATCHER.chosen(form, q)
    require_shape("q", q, "B T H D")
    require_shape("k", k, "B T G D")
    require_shape("gates", gates, "B T H 3")
    num_heads, groups = q.shape[2], k.shape[2]
    if groups == 0 or num_heads % groups:
        raise ValueError(f"the number of heads of q must be a multiple of k's, got {num_heads} and {groups}")
    if gates.shape[2] != num_heads:
        raise ValueError(f"gates must have a row for each of {num_heads} heads of q, got {gates.shape[2]}")
    blocks = Blocks(
        compress_block=compress_block, compress_stride=compress_stride, select_block=select_block,
        num_selected=num_selected, window=window,
    )  # fmt: skip
    q_BTGRD = q.unflatten(2, (groups, -1))
    if queries_per_chunk is None:
        has_kernels = name == "triton" and takes_kernels(q_BTGRD, blocks)
        queries_per_chunk = (_scored_chunk if has_kernels else _fitting_chunk)(q, groups, blocks)
    tensors = (q_BTGRD, k, v, gates.unflatten(2, (groups, -1)), position_embedding)
    options = {**vars(blocks), "scale": scale, "queries_per_chunk": queries_per_chunk}
    out_BTGRD: torch.Tensor = DISPATCHER.function(name)(*tensors, **options)
    return out_BTGRD.flatten(2, 3)


def _fitting_chunk(q_BTHD: torch.Tensor, groups: int, blocks: Blocks) -> int:
    """Return how many queries a chunk may have for its largest tensors to stay within ``CHUNK_BYTES``."""
    batch, num_tokens, num_heads, width = q_BTHD.shape
    num_gathered = min(blocks.num_selected * blocks.select_block, num_tokens)
    gathered_bytes = batch * groups * num_gathered * width * 4  # the gradients of the keys that a query reads
    compressed_bytes = batch * num_heads * blocks.num_compressed(num_tokens) * 8  # a query's float64 scores
    return max(1, min(num_tokens, CHUNK_BYTES // max(gathered_bytes, compressed_bytes, 1)))


def _scored_chunk(q_BTHD: torch.Tensor, groups: int, blocks: Blocks) -> int:
    """Return how many queries a chunk may have, a multiple of 64, for its scores to fit ``KERNELS_CHUNK_BYTES``."""
    batch, num_tokens, _, _ = q_BTHD.shape
    score_bytes = batch * groups * blocks.num_selectable(num_tokens) * 4
    return min(num_tokens, max(64, KERNELS_CHUNK_BYTES // score_bytes // 64 * 64))
