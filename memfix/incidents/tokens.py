"""Token data: a learnable synthetic stream, or a file of ids."""

# B sequences, T tokens per sequence

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import UsageError
from ..ops.batches import TokenFile, Windows
from .config import DataConfig
from .examples import Examples, seeded
from .schema import setting

IGNORED = -100  # the target of a token that is not trained on

TokenBatch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class TokenData(DataConfig):
    """The ``data`` section. A sequence is ``context_length`` inputs; the target of each is the token after it."""

    context_length: int = setting(low=1, about="tokens per sequence")
    source: str = setting(
        "markov",
        choices=("markov", "file"),
        about="markov is a synthetic stream that can be learnt; file is a file of token ids",
    )
    states: int = setting(64, low=2, about="for markov: number of different tokens that occur")
    branching: int = setting(
        4,
        low=1,
        about="for markov: number of tokens that can follow a token; the lowest possible loss is its logarithm",
    )
    path: str | None = setting(None, about="for file: the ids, as .npy or as raw .bin")
    dtype: str = setting(
        "uint16", choices=("uint16", "uint32", "int32", "int64"), about="for file: dtype of the ids in a .bin"
    )
    prompt_fraction: float = setting(
        0.0,
        low=0,
        below=1,
        about="the first targets of a sequence are ignored: a random number, at most this fraction of them",
    )

    def __post_init__(self) -> None:
        if (self.source == "file") != (self.path is not None):
            raise ValueError("give path, the file to read, if source is file, and only then")
        if self.branching > self.states:
            raise ValueError(f"branching must be at most states, {self.states}, got {self.branching}")


def token_batches(config: TokenData, vocabulary_size: int) -> Callable[[Examples], TokenBatch]:
    """Open the tokens that ``config`` describes. Returns a function that makes ids and targets, ``[B, T]`` each."""
    labelled = labelled_batches(config, vocabulary_size)

    def batch(examples: Examples) -> TokenBatch:
        ids_BT1, labels_BT1 = labelled(examples)
        return ids_BT1[:, :-1], labels_BT1[:, 1:]

    return batch


def labelled_batches(config: TokenData, vocabulary_size: int) -> Callable[[Examples], TokenBatch]:
    """Like :func:`token_batches`, but the function makes ids and labels of whole sequences, ``[B, T + 1]`` each.

    If no target is ignored, both are the same tensor, which halves the input of a model that makes its own targets.
    """
    sequence = open_tokens(config, vocabulary_size)

    def batch(examples: Examples) -> TokenBatch:
        ids_BT1 = torch.stack([sequence(number) for number in examples.numbers])
        if config.prompt_fraction == 0:
            return ids_BT1, ids_BT1
        labels_BT1 = ids_BT1.clone()
        for row, number in enumerate(examples.numbers):
            draw = torch.rand((), generator=seeded("prompt", config.seed, number)).item()
            labels_BT1[row, : 1 + int(draw * config.prompt_fraction * config.context_length)] = IGNORED
        return ids_BT1, labels_BT1

    return batch


def num_token_targets(batch: TokenBatch) -> int:
    """The number of targets in a batch that are not ignored."""
    _, target_BT = batch
    return int((target_BT != IGNORED).sum())


def open_tokens(config: TokenData, vocabulary_size: int) -> Callable[[int], torch.Tensor]:
    """Open the tokens that ``config`` describes. Returns a function from the number of a sequence to its int64 ids.

    A sequence is ``context_length + 1`` ids below ``vocabulary_size``. A file is cut into sequences, which are read in
    a new order in each epoch.
    """
    if config.path is not None:
        tokens = TokenFile(config.path, vocabulary_size, dtype=config.dtype)
        windows = Windows(tokens, config.context_length, seed=config.seed)
        return lambda number: windows.rows(range(number, number + 1))[0]
    if config.states > vocabulary_size:
        raise UsageError(f"data.states must be at most the vocabulary, {vocabulary_size}, got {config.states}")
    return _markov_chain(config)


def _markov_chain(config: TokenData) -> Callable[[int], torch.Tensor]:
    """A stream in which one of ``branching`` equally likely tokens follows each token: no loss is below its log."""
    chain = seeded("chain", config.seed)
    followers = [torch.randperm(config.states, generator=chain)[: config.branching] for _ in range(config.states)]
    following = [tokens.tolist() for tokens in followers]

    def sequence(number: int) -> torch.Tensor:
        generator = seeded("sequence", config.seed, number)
        ids = [int(torch.randint(config.states, (), generator=generator))]
        for choice in torch.randint(config.branching, (config.context_length,), generator=generator).tolist():
            ids.append(following[ids[-1]][choice])
        return torch.tensor(ids)

    return sequence
