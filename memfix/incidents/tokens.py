"""Token data: a learnable synthetic stream, or a memory-mapped file of ids."""

# B sequences, T tokens per sequence

from __future__ import annotations

import ast
import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from ..errors import UsageError
from .config import DataConfig
from .examples import Examples, seeded
from .schema import setting

IGNORED = -100  # the target of a token that is not trained on

DTYPES = {"uint16": torch.uint16, "int32": torch.int32, "int64": torch.int64}
_NPY_DTYPES = {"<u2": torch.uint16, "<i4": torch.int32, "<i8": torch.int64}
TokenBatch = tuple[torch.Tensor, torch.Tensor]

_NPY_MAGIC = b"\x93NUMPY"


@dataclass(frozen=True)
class TokenData(DataConfig):
    """The ``data`` section. A sequence is ``context_length`` inputs, each with the token after it as its target."""

    context_length: int = setting(low=1, about="tokens of a sequence")
    source: str = setting(
        "markov", choices=("markov", "file"), about="a synthetic stream that can be learnt, or a file of token ids"
    )
    states: int = setting(64, low=2, about="markov: tokens of the vocabulary that occur")
    branching: int = setting(4, low=1, about="markov: tokens that can follow a token; the loss can fall to its log")
    path: str | None = setting(None, about="file: ids as .npy, or raw as .bin")
    dtype: str = setting("uint16", choices=("uint16", "int32", "int64"), about="file: type of the ids in a .bin")
    prompt_fraction: float = setting(
        0.0, low=0, below=1, about="targets at the start of a sequence are ignored, up to this part of it"
    )

    def __post_init__(self) -> None:
        if (self.source == "file") != (self.path is not None):
            raise ValueError("path is the file to read: it goes with source: file, and only with it")
        if self.branching > self.states:
            raise ValueError(f"branching must be at most states, {self.states}, got {self.branching}")


class Sequences(Protocol):
    def sequence(self, number: int) -> torch.Tensor:
        """``context_length + 1`` ids, int64."""


def token_batches(config: TokenData, vocabulary_size: int) -> Callable[[Examples], TokenBatch]:
    """Open the tokens that ``config`` describes. Returns a function that makes ids and targets, ``[B, T]`` each."""
    labelled = labelled_batches(config, vocabulary_size)

    def batch(examples: Examples) -> TokenBatch:
        ids_BT1, labels_BT1 = labelled(examples)
        return ids_BT1[:, :-1], labels_BT1[:, 1:]

    return batch


def labelled_batches(config: TokenData, vocabulary_size: int) -> Callable[[Examples], TokenBatch]:
    """Like :func:`token_batches`, but with ids and labels of whole sequences, ``[B, T + 1]`` each.

    If no target is ignored, both are the same tensor, which halves the input of a model that makes its own targets.
    """
    tokens = open_tokens(config, vocabulary_size)

    def batch(examples: Examples) -> TokenBatch:
        ids_BT1 = torch.stack([tokens.sequence(number) for number in examples.numbers])
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


def open_tokens(config: TokenData, vocabulary_size: int) -> Sequences:
    """The sequences that ``config`` describes, with ids below ``vocabulary_size``."""
    if config.source == "file":
        return TokenFile(config, vocabulary_size)
    if config.states > vocabulary_size:
        raise UsageError(f"data.states must be at most the vocabulary, {vocabulary_size}, got {config.states}")
    return MarkovChain(config)


class MarkovChain:
    """A stream in which one of ``branching`` equally likely tokens follows each token: the lowest loss is its log."""

    def __init__(self, config: TokenData) -> None:
        self.config = config
        generator = seeded("chain", config.seed)
        self._followers = [
            torch.randperm(config.states, generator=generator)[: config.branching].tolist()
            for _ in range(config.states)
        ]

    def sequence(self, number: int) -> torch.Tensor:
        generator = seeded("sequence", self.config.seed, number)
        token = int(torch.randint(self.config.states, (), generator=generator))
        ids = [token]
        for choice in torch.randint(self.config.branching, (self.config.context_length,), generator=generator).tolist():
            token = self._followers[token][choice]
            ids.append(token)
        return torch.tensor(ids)


class TokenFile:
    """A memory-mapped file cut into sequences, which are read in a new order in each epoch."""

    def __init__(self, config: TokenData, vocabulary_size: int) -> None:
        assert config.path is not None
        self.config, self.vocabulary_size = config, vocabulary_size
        self._ids = _mapped(Path(config.path), DTYPES[config.dtype])
        # the last target of a sequence is the first id of the next
        self._count = (len(self._ids) - 1) // config.context_length
        if self._count < 1:
            raise UsageError(
                f"{config.path}: {len(self._ids)} ids, and one sequence needs {config.context_length + 1}; "
                "shorten data.context_length"
            )
        self._order = functools.lru_cache(maxsize=2)(self._order_of)

    def _order_of(self, epoch: int) -> torch.Tensor:
        return torch.randperm(self._count, generator=seeded("order", self.config.seed, epoch))

    def sequence(self, number: int) -> torch.Tensor:
        epoch, place = divmod(number, self._count)
        start = int(self._order(epoch)[place]) * self.config.context_length
        ids = self._ids[start : start + self.config.context_length + 1].to(torch.int64)
        outside = ((ids < 0) | (ids >= self.vocabulary_size)).nonzero()
        if len(outside):
            place = int(outside[0])
            raise UsageError(
                f"{self.config.path}: id {int(ids[place])} at place {start + place} "
                f"is not in the vocabulary of {self.vocabulary_size}"
            )
        return ids


def _mapped(path: Path, dtype: torch.dtype) -> torch.Tensor:
    if path.suffix not in (".bin", ".npy"):
        raise UsageError(f"data.path: ids are read from .bin or .npy, got {path}")
    if not path.is_file():
        raise UsageError(f"data.path: no file {path}")
    header_bytes = 0
    if path.suffix == ".npy":
        header_bytes, dtype = _npy_header(path)
    num_bytes = path.stat().st_size
    if num_bytes == header_bytes or num_bytes % dtype.itemsize or header_bytes % dtype.itemsize:
        raise UsageError(f"data.path: {path} has {num_bytes:,} bytes: no whole number of {str(dtype)[6:]} ids")
    everything = torch.from_file(str(path), shared=False, size=num_bytes // dtype.itemsize, dtype=dtype)
    return everything[header_bytes // dtype.itemsize :]


def _npy_header(path: Path) -> tuple[int, torch.dtype]:
    """The length of the header and the dtype of the ids, parsed from numpy's file format without numpy."""
    try:
        with path.open("rb") as file:
            if file.read(6) != _NPY_MAGIC:
                raise ValueError("it does not start as one")
            (major, _) = file.read(2)
            length_format = "<H" if major == 1 else "<I"
            (length,) = struct.unpack(length_format, file.read(struct.calcsize(length_format)))
            header = ast.literal_eval(file.read(length).decode("utf-8").strip())
            data_start = file.tell()
        kind, shape = header["descr"], header["shape"]
    except (ValueError, KeyError, TypeError, SyntaxError, struct.error, OSError) as error:
        raise UsageError(f"data.path: {path} is not a .npy file: {error}") from None
    if kind not in _NPY_DTYPES or len(shape) != 1:
        raise UsageError(
            f"data.path: {path} must hold one row of {', '.join(DTYPES)} ids, got dtype {kind!r} and shape {shape}"
        )
    return data_start, _NPY_DTYPES[kind]
