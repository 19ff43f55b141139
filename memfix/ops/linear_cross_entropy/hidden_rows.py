"""The hidden rows of a chunk, and the memory for their gradient."""

# N tokens, K tokens that count, D width, C tokens of a chunk

from __future__ import annotations

import torch


class HiddenRows:
    """The hidden rows of a chunk: a slice if every token counts, else gathered into a buffer that all chunks share.

    Once the last product has read gathered rows, their gradient overwrites them and is scattered to its tokens.
    """

    def __init__(
        self, hidden_ND: torch.Tensor, rows_K: torch.Tensor | None, rows_per_chunk: int, dtype: torch.dtype
    ) -> None:
        self.hidden_ND, self.rows_K, self.dtype = hidden_ND, rows_K, dtype
        size_CD = (rows_per_chunk, hidden_ND.shape[1])
        self.buffer_CD = None if rows_K is None else hidden_ND.new_empty(size_CD)

    def gather(self, chunk: slice) -> torch.Tensor:
        if self.rows_K is None or self.buffer_CD is None:
            return self.hidden_ND[chunk].to(self.dtype)
        rows_C = self.rows_K[chunk]
        hidden_CD = torch.index_select(self.hidden_ND, 0, rows_C, out=self.buffer_CD[: rows_C.shape[0]])
        return hidden_CD.to(self.dtype)

    def gradient_buffer(self, grad_hidden_ND: torch.Tensor, chunk: slice) -> torch.Tensor:
        if self.buffer_CD is None:
            return grad_hidden_ND[chunk]
        return self.buffer_CD[: chunk.stop - chunk.start]

    def put_back(self, rows_CD: torch.Tensor, grad_hidden_ND: torch.Tensor, chunk: slice) -> None:
        if self.rows_K is not None:
            grad_hidden_ND.index_copy_(0, self.rows_K[chunk], rows_CD)
