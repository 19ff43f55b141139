"""Entropy of a policy over a large vocabulary."""

import torch
from torch.utils.checkpoint import checkpoint


def dense_entropy(logits):
    """Entropy of each row's softmax. Autograd keeps two tensors as large as the logits."""
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def chunked_entropy(logits, *, rows):
    """The same, a few rows at a time; each chunk is recomputed in backward."""
    return torch.cat([checkpoint(_entropy, part, use_reentrant=False) for part in logits.split(rows)])


def _entropy(part):
    log_p = part.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)
