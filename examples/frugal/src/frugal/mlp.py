"""A feed-forward block whose wide activations are recomputed in backward."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def plain_mlp(x, up, down):
    """``gelu(x @ up) @ down``. Autograd keeps two tensors of the wide size for every row."""
    return F.gelu(x @ up) @ down


def checkpointed_mlp(x, up, down, *, rows):
    """The same, a few rows at a time; each chunk is recomputed in backward."""
    return torch.cat([checkpoint(_block, part, up, down, use_reentrant=False) for part in x.split(rows)])


def _block(part, up, down):
    wide = part @ up
    return F.gelu(wide) @ down
