"""The memory of a train step by arithmetic: parameters, gradients, Adam's states, activations and logits.

Tests compare it to the byte with the simulated meter, and the profile prints it beside the report's breakdown.
"""

# N tokens of a batch, T tokens of a sequence, D width, H heads, V vocabulary

from __future__ import annotations

from dataclasses import dataclass

from ...ops.rope.tables import BLOCK
from ..step import Precision
from .model import GATHER, STANDARD, PythiaConfig

LOSS_ITEM_SIZE = 4  # losses are computed in float32
ID_ITEM_SIZE = 8


@dataclass(frozen=True)
class Breakdown:
    """The bytes of a train step. ``logits`` are three tensors alive at once: log-probabilities and two gradients."""

    parameters: int
    matrices: int
    """The part of the parameters that is neither biases nor norms."""
    gradients: int
    adam_states: int
    batch_and_tables: int
    """Token ids and targets, and the table of rotary positions."""
    activations: int
    """What the forward keeps for backward, without logits."""
    logits: int

    @property
    def at_the_loss(self) -> int:
        """The bytes when the backward pass begins; no gradient of a parameter exists yet."""
        return self.parameters + self.adam_states + self.batch_and_tables + self.activations + self.logits

    @property
    def at_the_optimizer(self) -> int:
        """The bytes when the optimizer steps, which makes one more tensor for each matrix."""
        return self.parameters + self.matrices + self.gradients + self.adam_states + self.batch_and_tables

    @property
    def peak(self) -> int:
        """The peak of every step but the first. With fewer than ``D`` tokens it may be higher, between the two."""
        return max(self.at_the_loss, self.at_the_optimizer)


def breakdown(model: PythiaConfig, *, batch_size: int, context_length: int, precision: str = "float32") -> Breakdown:
    """Count the bytes of a train step of ``model`` without checkpointing.

    Refuses precisions with several dtypes, and forms other than ``gather`` and ``standard``.
    """
    of = Precision.named(precision)
    if of.parameters != of.compute:
        raise ValueError(
            f"the calculator counts one dtype: float32 or pure_bfloat16, got {precision}; memfix profile has others"
        )
    if (model.embedding_form, model.loss_form) != (GATHER, STANDARD):
        raise ValueError(
            f"the calculator counts embedding_form {GATHER} and loss_form {STANDARD}, got {model.embedding_form} and "
            f"{model.loss_form}; memfix profile measures others"
        )
    num_tokens, item_size = batch_size * context_length, of.compute.itemsize
    parameters = model.get_total_params() * of.parameters.itemsize
    vectors = (model.layers * 13 + 2) * model.width * of.parameters.itemsize
    hidden = num_tokens * model.width * item_size
    norm = hidden + 2 * num_tokens * LOSS_ITEM_SIZE  # the mean and the deviation of each row are kept too
    masks = 2 * num_tokens * model.width if model.dropout else 0
    attention = _attention(model, batch_size, context_length, item_size)
    # a layer keeps its input, both norms, attention, and the feed-forward before and after its activation
    layer = hidden + 2 * norm + attention + 2 * 4 * hidden + masks
    return Breakdown(
        parameters=parameters,
        matrices=parameters - vectors,
        gradients=parameters,
        adam_states=2 * parameters,
        batch_and_tables=2 * num_tokens * ID_ITEM_SIZE + _rotary_table(model),
        activations=model.layers * layer + hidden + norm,
        logits=3 * num_tokens * model.vocab_size * LOSS_ITEM_SIZE,
    )


def _rotary_table(model: PythiaConfig) -> int:
    if not model.has_rotary:
        return 0
    rows = BLOCK
    while rows < model.max_positions:
        rows *= 2
    return rows * model.head_width * LOSS_ITEM_SIZE


def _attention(model: PythiaConfig, batch_size: int, context_length: int, item_size: int) -> int:
    """The bytes of queries, keys and values as the products take them, the weights, the mask, and the output."""
    queries, keys, seen, hidden_scores = context_length, context_length, context_length, context_length**2
    # with batch size 1 keys and values are views of the joint projection, and so keep its queries as well
    unscaled = context_length if batch_size == 1 else 0
    if model.use_sparse_attention and model.window < context_length:
        blocks = -(-context_length // model.window)
        queries, seen, unscaled = blocks * model.window, 2 * model.window, 0
        keys, hidden_scores = blocks * seen, queries * seen
    weights = batch_size * model.heads * queries * seen
    dropped = weights * (item_size + 1) if model.dropout else 0  # the weights after dropout, and its mask
    of_rows = batch_size * model.width * item_size * (queries + unscaled + 2 * keys + context_length)
    return of_rows + weights * item_size + dropped + hidden_scores
