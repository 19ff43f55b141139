"""Batches of a corpus: corpora by position, examples by number, workers, and files that are refused."""

from __future__ import annotations

import bisect
import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from memfix.errors import CorpusError, UsageError
from memfix.meters.resident import resident_growth
from memfix.ops.batches import Batch, BatchStream, TokenFile, Windows, ZipfCorpus, batches, write_tokens
from memfix.ops.batches.naive import GOLDEN, hash_int, naive_batches
from memfix.ops.batches.shuffle import shuffled
from memfix.units import MiB


def same(some: Any, others: Any) -> bool:
    some, others = list(some), list(others)
    return len(some) == len(others) and all(
        torch.equal(one, other) for pair in zip(some, others, strict=True) for one, other in zip(*pair, strict=True)
    )


def tokens_of(corpus: Any) -> list[int]:
    return corpus.rows(torch.tensor([0]), len(corpus))[0].tolist()


def counting_file(folder: Path, count: int = 100) -> TokenFile:
    return write_tokens(folder / "ids.npy", [range(count)], max(count, 1))


# ---------------------------------------------------------------- the order
@pytest.mark.parametrize("count", [1, 2, 3, 10, 1023, 1024, 1025, 10_007])
def test_a_shuffle_has_every_example_once(count: int) -> None:
    order = shuffled(torch.arange(count), count, seed=5, epoch=1)
    assert sorted(order.tolist()) == list(range(count))
    some = torch.arange(count)[count // 3 :: 7]  # computed place by place
    assert torch.equal(shuffled(some, count, seed=5, epoch=1), order[some])


def test_a_shuffle_depends_on_seed_and_epoch_and_looks_random() -> None:
    count = 10_000
    orders = [shuffled(torch.arange(count), count, seed=s, epoch=e) for s, e in ((0, 0), (1, 0), (0, 1), (-1, 0))]
    for number, one in enumerate(orders):
        assert abs(torch.corrcoef(torch.stack([one, torch.arange(count)]).double())[0, 1]) < 0.05
        steps = one.diff()
        assert abs(int((steps > 0).sum()) - count / 2) < 3 * count**0.5
        for other in orders[:number]:
            assert int((one == other).sum()) < 10  # a random one has 1 on average


def test_epochs_of_three_examples_have_all_six_orders() -> None:
    orders = [tuple(shuffled(torch.arange(3), 3, seed=0, epoch=epoch).tolist()) for epoch in range(120)]
    assert min(orders.count(order) for order in set(orders)) > 8
    assert len(set(orders)) == 6


# ---------------------------------------------------------------- corpora
def test_a_zipf_corpus_follows_from_seed_and_position() -> None:
    corpus = ZipfCorpus(1000, 50, seed=3)
    everything = tokens_of(corpus)
    assert corpus.rows(torch.tensor([990, 7]), 10).tolist() == [everything[990:], everything[7:17]]
    assert everything == tokens_of(ZipfCorpus(1000, 50, seed=3)) != tokens_of(ZipfCorpus(1000, 50, seed=4))
    shares = list(itertools.accumulate(1 / rank for rank in range(1, 51)))
    draws = [(hash_int(position * GOLDEN + hash_int(3)) >> 11) / 2**53 for position in range(1000)]
    assert everything == [bisect.bisect_right(shares, draw * shares[-1]) for draw in draws]
    assert tokens_of(ZipfCorpus(9, 1)) == [0] * 9


def test_a_zipf_corpus_has_zipfs_frequencies() -> None:
    counts = torch.bincount(torch.tensor(tokens_of(ZipfCorpus(200_000, 1000))), minlength=1000)
    expected = 200_000 / torch.arange(1, 1001) / sum(1 / rank for rank in range(1, 1001))
    assert ((counts - expected).abs() < 5 * expected.sqrt()).all()


def test_a_token_file_is_numpys_own_format(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    write_tokens(tmp_path / "small.npy", [[1, 2], [], [65_535]], 65_536)
    write_tokens(tmp_path / "large.npy", [[1, 2**31, 2**32 - 1]], 2**32)
    small, large = (numpy.load(tmp_path / name) for name in ("small.npy", "large.npy"))
    assert (small.dtype, small.tolist()) == (numpy.uint16, [1, 2, 65_535])
    assert (large.dtype, large.tolist()) == (numpy.uint32, [1, 2**31, 2**32 - 1])
    assert tokens_of(TokenFile(tmp_path / "large.npy", 2**32)) == large.tolist()
    large[:1].astype("<u4").tofile(tmp_path / "raw.bin")
    assert tokens_of(TokenFile(tmp_path / "raw.bin", 10, dtype="uint32")) == [1]


@pytest.mark.parametrize("seed", [None, 0])
def test_resident_memory_does_not_grow_with_the_file(tmp_path: Path, seed: int | None) -> None:
    path = tmp_path / "zeros.bin"
    with path.open("wb") as file:
        file.truncate(16 * MiB)

    def read() -> None:
        assert (
            sum(len(inputs) for inputs, _ in batches(TokenFile(path, 1), batch_size=8, length=2**13, seed=seed)) == 1023
        )

    read()
    assert (resident_growth(read).bytes or 0) < 8 * MiB


@pytest.mark.parametrize(
    "starts", [[3], [0, 5, 10], [0, 4, 8], [0, 6, 12], [9, 4, 0], [7, 7, 7], [0, 5, 10, 16], [0, 5, 11, 15], [94, 95]]
)
def test_rows_may_start_anywhere(tmp_path: Path, starts: list[int]) -> None:
    rows = counting_file(tmp_path).rows(torch.tensor(starts), 5)
    assert rows.tolist() == [list(range(start, start + 5)) for start in starts]


def test_rows_beyond_the_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(IndexError, match="a row ends after the last of 100 ids"):
        counting_file(tmp_path).rows(torch.tensor([95]), 6)


# ---------------------------------------------------------------- examples by number
def test_examples_are_numbered_through_all_epochs(tmp_path: Path) -> None:
    windows = Windows(counting_file(tmp_path), 10, seed=1)
    assert len(windows) == 9  # the last of 100 ids is the target of the 99th
    epochs = [[int(windows.window(9 * epoch + place)[0][0]) for place in range(9)] for epoch in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(0, 90, 10))] * 2
    assert epochs[0] != epochs[1]
    inputs, targets = windows.batch(range(5, 13))
    assert inputs[:, 0].tolist() == (epochs[0] + epochs[1])[5:13]
    assert torch.equal(targets, inputs + 1)
    assert windows.batch(range(1, 17, 3))[0][:, 0].tolist() == (epochs[0] + epochs[1])[1:17:3]
    assert windows.batch(range(0))[0].shape == (0, 10)


@pytest.mark.parametrize("numbers", [range(-1, 3), range(5, 1, -1)])
def test_examples_that_do_not_exist_are_refused(numbers: range, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        Windows(counting_file(tmp_path), 10).batch(numbers)


def test_a_block_of_the_order_ends_within_a_batch() -> None:
    corpus = ZipfCorpus(2100, 300)
    assert same(
        batches(corpus, batch_size=1000, length=1, seed=0), naive_batches(corpus, batch_size=1000, length=1, seed=0)
    )


# ---------------------------------------------------------------- workers, and going on
def test_shards_have_every_batch_once_in_order() -> None:
    corpus, options = ZipfCorpus(1000, 50), {"batch_size": 4, "length": 9, "seed": 2}
    whole = list(batches(corpus, **options))
    shards = [list(batches(corpus, **options, shard=(rank, 3))) for rank in range(3)]
    assert [len(shard) for shard in shards] == [10, 9, 9]
    assert same([shards[number % 3][number // 3] for number in range(28)], whole)


def test_a_run_goes_on_from_where_it_was() -> None:
    corpus, options = ZipfCorpus(1000, 50), {"batch_size": 4, "length": 9, "seed": 2}
    whole = list(batches(corpus, **options))
    assert same(batches(corpus, **options, start=11), whole[11:])
    assert list(batches(corpus, **options, start=28)) == []


@pytest.mark.parametrize("start", [0, 1])
def test_workers_of_a_loader_give_the_same_batches_in_the_same_order(tmp_path: Path, start: int) -> None:
    corpus, options = counting_file(tmp_path, 90), {"batch_size": 4, "length": 7, "seed": 2, "start": start}
    stream = BatchStream(corpus, **options)
    loaded: list[Batch] = list(DataLoader(stream, batch_size=None, num_workers=2))
    assert same(loaded, batches(corpus, **options))
    assert len(stream) == len(loaded) == 3 - start
    assert same(
        DataLoader(BatchStream(corpus, **options, shard=(1, 2)), batch_size=None),
        batches(corpus, **options, shard=(1, 2)),
    )


def test_a_stream_goes_to_another_process(tmp_path: Path) -> None:
    stream = BatchStream(counting_file(tmp_path), batch_size=4, length=7, seed=2)
    copied = pickle.dumps(stream)
    assert same(pickle.loads(copied), stream)
    write_tokens(tmp_path / "ids.npy", [range(90)], 100)
    with pytest.raises(CorpusError, match="changed while it was read"):
        pickle.loads(copied)


# ---------------------------------------------------------------- bad input
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    tokens = counting_file(tmp_path, 50_000)
    stream = batches(tokens, batch_size=4000, length=5)
    next(stream)
    with tokens.path.open("ab") as file:
        file.truncate(150)
    with pytest.raises(
        CorpusError,
        match=r"ids.npy changed while it was read: 100,128 bytes when it was opened, 150 now; open it again",
    ):
        next(stream)


def test_a_file_that_is_replaced_is_read_as_it_was(tmp_path: Path) -> None:
    tokens = counting_file(tmp_path)
    write_tokens(tokens.path, [[7] * 200], 100)
    assert tokens_of(tokens) == list(range(100))


@pytest.mark.parametrize(("name", "ids"), [("ids.npy", [3, 70_000]), ("ids.npy", [3, -1]), ("ids.npy", [3, 10])])
def test_an_id_out_of_range_is_not_written(tmp_path: Path, name: str, ids: list[int]) -> None:
    with pytest.raises(CorpusError, match=f"ids.npy: id {ids[1]} is not in the vocabulary of 10"):
        write_tokens(tmp_path / name, [ids], 10)
    assert list(tmp_path.iterdir()) == []


def test_an_id_out_of_range_is_named_where_it_is_read(tmp_path: Path) -> None:
    path = counting_file(tmp_path).path
    with pytest.raises(CorpusError, match=r"ids.npy: id 60 at place 60 is not in the vocabulary of 60"):
        list(batches(TokenFile(path, 60), batch_size=2, length=9))


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="the corpus is empty, there are no token ids to write"):
        write_tokens(tmp_path / "ids.npy", [[], []], 10)
    with pytest.raises(CorpusError, match="the corpus is empty: num_tokens is 0"):
        ZipfCorpus(0, 10)
    (tmp_path / "empty.bin").touch()
    with pytest.raises(CorpusError, match=r"empty.bin is empty: it has no token ids"):
        TokenFile(tmp_path / "empty.bin", 10)


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"no file none.npy"):
        TokenFile("none.npy", 10)
    with pytest.raises(CorpusError, match=r"token ids are written to .npy, got ids.bin"):
        write_tokens("ids.bin", [[1]], 10)
    with pytest.raises(UsageError, match="cannot write the token file"):
        write_tokens("/dev/null/ids.npy", [[1]], 10)
    with pytest.raises(ValueError, match="dtype must be one of uint16, uint32, int32, int64, got 'uint8'"):
        TokenFile("none.bin", 10, dtype="uint8")
    with pytest.raises(ValueError, match="vocabulary_size must be at least 1, got 0"):
        ZipfCorpus(10, 0)
    with pytest.raises(ValueError, match="exponent must be at least 0, got -1"):
        ZipfCorpus(10, 10, exponent=-1)
    with pytest.raises(CorpusError, match="the corpus has 10 tokens, and one example takes 11: shorten the examples"):
        batches(ZipfCorpus(10, 10), batch_size=1, length=10)
    with pytest.raises(
        ValueError, match=r"form must be one of auto, streaming, got 'stream'; did you mean 'streaming'\?"
    ):
        batches(ZipfCorpus(10, 10), batch_size=1, length=3, form="stream")
