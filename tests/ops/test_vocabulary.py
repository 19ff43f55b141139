"""The vocabulary of a text: ranks, pieces, files, and what is refused."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memfix.errors import CorpusError
from memfix.ops.batches import write_tokens
from memfix.ops.vocabulary import Vocabulary, text, vocabulary
from memfix.ops.vocabulary.naive import naive_vocabulary

TEXT = "b a b c\u2003b\u00a0a\nd <unk> <pad>"
FORMS = ["streaming", "bounded"]
letters = st.text(alphabet="ab \n\x1c\u00a0é語\ud800", max_size=12)


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"form": request.param} | ({"max_types": 4} if request.param == "bounded" else {})


# ---------------------------------------------------------------- ranks
def test_specials_are_inside_the_cap_and_ties_are_alphabetical(form: dict[str, Any]) -> None:
    assert vocabulary(TEXT, **form).entries == (("<unk>", 1), ("b", 3), ("a", 2), ("<pad>", 1), ("c", 1), ("d", 1))
    assert vocabulary(TEXT, cap=4, **form).words == ("<unk>", "b", "a", "<pad>")
    two = vocabulary(TEXT, cap=4, specials=("<pad>", "<unk>"), **form)
    assert two.entries == (("<pad>", 3), ("<unk>", 1), ("b", 3), ("a", 2))  # the first special is the unknown word


@pytest.mark.parametrize(("cap", "size"), [(1, 1), (6, 6), (7, 6), (10**9, 6), (None, 6)])
def test_caps_from_one_to_beyond_the_number_of_types(form: dict[str, Any], cap: int | None, size: int) -> None:
    made = vocabulary(TEXT, cap=cap, **form)
    assert len(made) == size
    assert sum(count for _, count in made.entries) == 9
    assert made.unknown_rate() == (1.0 if cap == 1 else 1 / 9) == made.unknown_rate(TEXT)


@pytest.mark.parametrize("nothing", ["", " \n\u3000", [], ["", ""]])
def test_an_empty_text_has_only_specials(form: dict[str, Any], nothing: Any) -> None:
    made = vocabulary(nothing, cap=10, **form)
    assert made.entries == (("<unk>", 0),)
    assert made.unknown_rate() == made.unknown_rate(nothing) == 0
    assert made.encode("one two") == [0, 0]


def test_ranks_do_not_depend_on_the_order_of_the_text(form: dict[str, Any]) -> None:
    words = [f"word{number}" for number in range(60)] * 2  # all ties
    first = vocabulary(" ".join(words), cap=20, **form)
    assert first.words[1:] == tuple(sorted(words)[:38:2])
    for seed in range(3):
        random.Random(seed).shuffle(words)
        assert vocabulary(" ".join(words), cap=20, **form) == first


@given(pieces=st.lists(letters, max_size=12), cap=st.none() | st.integers(1, 9), max_types=st.integers(1, 4))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_pieces_may_be_cut_anywhere(pieces: list[str], cap: int | None, max_types: int) -> None:
    expected = tuple(naive_vocabulary(pieces, cap=cap))
    assert vocabulary(pieces, cap=cap).entries == expected
    assert vocabulary(pieces, cap=cap, form="bounded", max_types=max_types).entries == expected
    assert vocabulary("".join(pieces), cap=cap).entries == expected


def test_a_long_word_of_many_pieces_is_one_word(form: dict[str, Any]) -> None:
    entries = vocabulary(iter(["x", *["ab"] * 1000, " ", "x"]), **form).entries
    assert entries == (("<unk>", 0), ("x", 1), ("x" + "ab" * 1000, 1))


def test_bounded_is_exact_far_beyond_its_bound(tmp_path: Path) -> None:
    draw = random.Random(0)
    words = [str(int(draw.paretovariate(0.25))) for _ in range(20_000)]
    expected = naive_vocabulary([" ".join(words)], cap=500)
    assert len(Counter(words)) > 3000
    assert vocabulary(" ".join(words), cap=500, form="bounded", max_types=100, folder=tmp_path).entries == tuple(
        expected
    )
    assert list(tmp_path.iterdir()) == []


def test_bounded_leaves_no_files_where_the_text_is_refused(tmp_path: Path) -> None:
    def pieces() -> Iterator[Any]:
        yield "a b c d e f"
        yield 3

    with pytest.raises(TypeError, match="text must be a string, a path, or an iterable of them, got int"):
        vocabulary(pieces(), form="bounded", max_types=2, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- ids
def test_encode_and_decode_are_inverse_for_known_words() -> None:
    made = vocabulary(TEXT)
    assert made.encode(TEXT) == [1, 2, 1, 4, 1, 2, 5, 0, 3]
    assert made.decode(made.encode(TEXT)) == " ".join(TEXT.split())
    assert made.decode(torch.tensor([1, 0])) == "b <unk>"
    assert vocabulary(TEXT, cap=2).decode(vocabulary(TEXT, cap=2).encode("a b")) == "<unk> b"
    assert made.unknown_rate("a new word") == pytest.approx(2 / 3)


@pytest.mark.parametrize("number", [-1, 6])
def test_an_id_out_of_range_is_refused(number: int) -> None:
    with pytest.raises(CorpusError, match=f"token id {number} is not in the vocabulary of 6"):
        vocabulary(TEXT).decode([0, number])


def test_a_vocabulary_is_saved_and_loaded(tmp_path: Path) -> None:
    made = vocabulary(TEXT + " 語 \ud800", specials=("<unk>", "<pad>"))
    made.save(tmp_path / "words.json")
    assert Vocabulary.load(tmp_path / "words.json") == made


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the vocabulary .*words.json: No such file"),
        ("{", "is not a vocabulary: "),
        ('{"entries": []}', "is not a vocabulary: "),
        ('{"format": "other", "entries": [["a", 1]]}', "it must have the format 'memfix vocabulary 1'"),
        ('{"format": "memfix vocabulary 1", "entries": [["a", 1], ["a", 2]]}', "and different words"),
        ('{"format": "memfix vocabulary 1", "entries": [[1, "a"]]}', "an entry is a word and a count"),
    ],
)
def test_what_is_no_vocabulary_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "words.json").write_text(content)
    with pytest.raises(CorpusError, match=message):
        Vocabulary.load(tmp_path / "words.json")


# ---------------------------------------------------------------- files
def test_files_are_read_in_pieces_and_end_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: dict[str, Any]
) -> None:
    monkeypatch.setattr(text, "PIECE_CHARACTERS", 2)
    monkeypatch.setattr(text, "READ_BYTES", 3)  # shorter than a word, and than some characters need with the one before
    (tmp_path / "one").write_text("語彙 語彙\u3000abc de", encoding="utf-8")
    (tmp_path / "two").write_text("de 𝒳𝒴", encoding="utf-8")
    made = vocabulary([tmp_path / "one", tmp_path / "two"], **form)
    assert made.entries == (("<unk>", 0), ("de", 2), ("語彙", 2), ("abc", 1), ("𝒳𝒴", 1))
    assert made.encode(tmp_path / "two") == [1, 4]


def test_a_text_file_becomes_a_token_file(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT, encoding="utf-8")
    made = vocabulary(tmp_path / "text", cap=3)
    tokens = write_tokens(tmp_path / "ids.npy", made.encode_pieces(tmp_path / "text"), len(made))
    assert tokens.rows(torch.tensor([0]), 9).tolist() == [made.encode(TEXT)]
    (tmp_path / "empty").touch()
    with pytest.raises(CorpusError, match="the corpus is empty, there are no token ids to write"):
        write_tokens(tmp_path / "none.npy", made.encode_pieces(tmp_path / "empty"), len(made))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the text .*text: No such file or directory"),
        (b"abc de\0f", "text is a binary file: byte 6 is zero"),
        (b"abc \xff de", "text is not UTF-8: invalid start byte at byte 4"),
        ("語語語".encode()[:-1], "text is not UTF-8: unexpected end of data at byte 6"),
        ("語語".encode() + b"\xe8a", "text is not UTF-8: invalid continuation byte at byte 6"),
    ],
)
@pytest.mark.parametrize("read_bytes", [1, 2, 5, 100])
def test_a_file_that_is_no_text_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, message: str, read_bytes: int
) -> None:
    monkeypatch.setattr(text, "READ_BYTES", read_bytes)
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        vocabulary(tmp_path / "text")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"cannot read the text .*: Is a directory"):
        vocabulary(tmp_path)


@pytest.mark.parametrize("by", ["size", "time"])
def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr(text, "READ_BYTES", 4)
    path = tmp_path / "text"
    path.write_text("some words")
    words = text.words_in(path)
    next(words)
    if by == "size":
        path.write_text("some words and more")
    else:
        os.utime(path, ns=(0, 0))
    with pytest.raises(CorpusError, match="text changed while it was read; read it again"):
        list(words)


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match="form must be one of auto, streaming, bounded, got 'exact'"):
        vocabulary(TEXT, form="exact")
