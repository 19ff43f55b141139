"""The contract of batches. The incident: the report's batches of 32 x 128 tokens, over half a million tokens."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from ...contract import Contract, Dim, ObjectSpec
from ...errors import CorpusError
from ...laws import Budget, Scaling, SpeedBudget
from ..bad_inputs import bad_chunk_sizes, refused
from .naive import naive_batches
from .streaming import streaming_batches
from .token_file import TokenFile, write_tokens
from .windows import Corpus
from .zipf import ZipfCorpus


def made_corpus(dims: Mapping[str, int], seed: int) -> Corpus:
    """Make a token file for an even seed, and a Zipf corpus for an odd one. The file is open but already unlinked."""
    zipf = ZipfCorpus(dims["N"], dims["V"], seed=seed)
    return zipf if seed % 2 else written(zipf)


def written(corpus: ZipfCorpus, *, tokens_per_piece: int = 65_536) -> TokenFile:
    """Write the tokens of ``corpus`` to a temporary file, which disappears with the returned object."""
    starts = range(0, len(corpus), tokens_per_piece)
    rows = (corpus.rows(torch.tensor([at]), min(tokens_per_piece, len(corpus) - at))[0] for at in starts)
    with tempfile.TemporaryDirectory() as folder:
        return write_tokens(Path(folder) / "tokens.npy", (row.tolist() for row in rows), corpus.vocabulary_size)


contract = Contract(
    "batches",
    naive=naive_batches,
    forms={"streaming": streaming_batches},
    dims={"N": Dim(42, 600), "V": Dim(1, 300), "batch_size": Dim(1, 9), "length": Dim(1, 40)},
    inputs=[ObjectSpec("corpus", "N V", make=made_corpus)],
    choices={
        "seed": (0, None, -1, 2**70),
        "epoch": (0, 1, 5),
        "start": (0, 1, 4),
        "shard": ((0, 1), (1, 2), (0, 3), (2, 3)),
        "drop_last": (False, True),
    },
    cases={
        "incident": {"N": 524_288, "V": 10_000, "batch_size": 32, "length": 128, "seed": None},
        "small": {"N": 65_536, "V": 1000, "batch_size": 64, "length": 64},
    },
    budgets=[
        Budget("streaming", case="incident", phase="forward", times_below_naive=10),
        # the read that the caller holds and the next one, the ids as in the file (or the random numbers of a Zipf
        # corpus), and the order of 1024 examples
        Budget("streaming", phase="forward", bytes="64*max(batch_size*(length+1), 32768) + 262144"),
    ],
    scaling=[
        Scaling("streaming", dim="N", at_most=0, case="small", phase="forward", doublings=4),
        Scaling("streaming", dim="batch_size", at_most=1, case="small", phase="forward", doublings=3),
    ],
    speed=[SpeedBudget("streaming", case="incident", phase="forward", times_naive=1.0)],
    bad_inputs=[
        *bad_chunk_sizes("batch_size"),
        refused("zero length", "length must be at least 1, got 0", length=0),
        refused(
            "length beyond the corpus", "the corpus has 42 tokens, and one example takes 43", CorpusError, length=42,
        ),
        refused("negative epoch", "epoch must be at least 0, got -1", epoch=-1),
        refused("negative start", "start must be at least 0, got -1", start=-1),
        refused("rank beyond the shards", "rank below world, got (2, 2)", shard=(2, 2)),
        refused("no shards", "the number of shards must be at least 1, got 0", shard=(0, 0)),
    ],
    memory="host",
)  # fmt: skip
