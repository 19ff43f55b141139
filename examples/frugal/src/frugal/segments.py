"""The mean of the rows of each segment, as in a graph network or a pooling over sentences."""

import torch
import torch.nn.functional as F


def masked_segment_mean(features, segment, *, segments):
    """Copies all rows for each segment, with the rows of other segments set to zero, and takes their mean."""
    member = F.one_hot(segment, segments).T.bool()
    rows = torch.where(member[:, :, None], features, 0)
    return rows.sum(1) / member.sum(1).clamp(min=1)[:, None]


def summed_segment_mean(features, segment, *, segments):
    """The same, by adding each row to its segment's sum."""
    wide = torch.promote_types(features.dtype, torch.float32)
    sums = features.new_zeros(segments, features.shape[1], dtype=wide).index_add(0, segment, features.to(wide))
    counts = sums.new_zeros(segments).index_add(0, segment, sums.new_ones(len(segment))).clamp(min=1)
    return (sums / counts[:, None]).to(features.dtype)
