"""Tokens to train on: each sequence from the seed and its number alone."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from memfix.errors import UsageError
from memfix.incidents.examples import Examples
from memfix.incidents.tokens import IGNORED, TokenData, labelled_batches, num_token_targets, open_tokens, token_batches


def data(**settings: Any) -> TokenData:
    return TokenData(**{"context_length": 6, **settings})


def file_of(path: Path, ids: list[int]) -> str:
    """Ids as .bin (uint16), or as .npy in the bytes that numpy writes."""
    raw = struct.pack(f"<{len(ids)}H", *ids)
    if path.suffix == ".npy":
        header = f"{{'descr': '<u2', 'fortran_order': False, 'shape': ({len(ids)},), }}".encode()
        header += b" " * (-(10 + len(header) + 1) % 64) + b"\n"
        raw = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + raw
    path.write_bytes(raw)
    return str(path)


# ---------------------------------------------------------------- the synthetic stream
def test_a_sequence_is_the_same_whenever_it_is_asked_for() -> None:
    one, other = (open_tokens(data(), 100) for _ in range(2))
    assert torch.equal(one(5), other(5))
    assert not torch.equal(one(5), one(6))
    assert not torch.equal(one(5), open_tokens(data(seed=1), 100)(5))


def test_a_token_is_followed_by_as_many_as_branch_from_it() -> None:
    config = data(context_length=4000, states=10, branching=3)
    ids = open_tokens(config, 100)(0).tolist()
    followers: dict[int, set[int]] = {}
    for token, following in itertools.pairwise(ids):
        followers.setdefault(token, set()).add(following)
    assert max(ids) < 10
    assert max(map(len, followers.values())) == 3


def test_targets_are_the_next_tokens_and_prompts_are_ignored() -> None:
    config = data(context_length=50, prompt_fraction=0.8)
    tokens = open_tokens(config, 100)
    ids, target = token_batches(config, 100)(Examples(range(3, 23), seed=0))
    ignored = (target == IGNORED).sum(1)
    for row in range(20):
        sequence, prompt = tokens(3 + row), int(ignored[row])
        assert torch.equal(ids[row], sequence[:-1])
        assert torch.equal(target[row, prompt:], sequence[1 + prompt :])
    assert len(set(ignored.tolist())) > 5
    assert ignored.max() <= 40
    assert num_token_targets((ids, target)) == 20 * 50 - int(ignored.sum())
    whole = token_batches(data(context_length=50), 100)(Examples(range(3, 23), seed=0))
    assert num_token_targets(whole) == 20 * 50


def test_whole_sequences_and_their_labels_are_one_tensor_where_nothing_is_ignored() -> None:
    examples = Examples(range(3, 9), seed=0)
    ids, labels = labelled_batches(data(), 100)(examples)
    assert ids is labels
    assert ids.shape == (6, 7)
    ids, labels = labelled_batches(data(prompt_fraction=0.9), 100)(examples)
    _, target = token_batches(data(prompt_fraction=0.9), 100)(examples)
    assert torch.equal(labels[:, 1:], target)
    assert (target == IGNORED).any()
    assert not (ids == IGNORED).any()


def test_more_states_than_the_vocabulary_has_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^data.states must be at most the vocabulary, 10, got 64$"):
        open_tokens(data(), 10)


# ---------------------------------------------------------------- files
@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_a_file_is_read_whole_in_another_order_each_time_round(tmp_path: Path, suffix: str) -> None:
    path = file_of(tmp_path / f"ids{suffix}", list(range(63)))  # ten sequences of 6, their last target, and two more
    tokens = open_tokens(data(source="file", path=path), 100)
    starts = [[int(tokens(10 * epoch + place)[0]) for place in range(10)] for epoch in range(2)]
    assert [sorted(epoch) for epoch in starts] == [list(range(0, 60, 6))] * 2
    assert starts[0] != starts[1]
    assert tokens(4).tolist() == list(range(starts[0][4], starts[0][4] + 7))
    assert tokens(4).dtype == torch.int64


def test_a_file_that_numpy_wrote_is_read(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    numpy.save(tmp_path / "ids.npy", numpy.arange(7, dtype=numpy.int32))
    tokens = open_tokens(data(source="file", path=str(tmp_path / "ids.npy")), 100)
    assert tokens(0).tolist() == [0, 1, 2, 3, 4, 5, 6]
    numpy.save(tmp_path / "ids.npy", numpy.zeros((2, 9)))
    with pytest.raises(
        UsageError, match=r"must hold one row of uint16, uint32, int32, int64 ids, got dtype '<f8' and shape"
    ):
        open_tokens(data(source="file", path=str(tmp_path / "ids.npy")), 100)


def test_an_id_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    path = file_of(tmp_path / "ids.bin", [1, 2, 3, 50, 4, 5, 6])
    with pytest.raises(UsageError, match=r"ids.bin: id 50 at place 3 is not in the vocabulary of 50$"):
        open_tokens(data(source="file", path=path), 50)(0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("ids.bin", b"\0" * 12, "the corpus has 6 tokens, and one example takes 7: shorten the examples"),
        ("ids.bin", b"\0" * 15, "has 15 bytes: no whole number of uint16 ids"),
        ("ids.bin", b"", "is empty: it has no token ids"),
        ("ids.npy", b"\0" * 80, "is not a .npy file: it does not start as one"),
        ("ids.npy", b"\x93NUMPY\x01\x00\x05", "is not a .npy file: "),
        ("ids.npy", b"\x93NUMPY\x01\x00\x05\x00{'a':", "is not a .npy file: "),
        ("ids.txt", b"1 2 3", "ids are read from .bin or .npy, got "),
        ("ids.bin", None, "no file "),
    ],
)
def test_what_is_no_file_of_ids_is_refused(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError) as refused:
        open_tokens(data(source="file", path=str(tmp_path / name)), 100)
    assert message in str(refused.value)
