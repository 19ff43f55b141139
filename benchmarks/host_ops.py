"""Measures time and resident memory of the host ops and of common alternatives.

    python -m benchmarks.host_ops vocabulary --json benchmarks/results/cpu/vocabulary.json
    python -m benchmarks.host_ops batches --json benchmarks/results/cpu/batches.json

Every contender runs in its own process, in turns with the others, over the same generated files. Its memory is the
growth of the resident set after imports. Times and ratios of times are medians over the rounds.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import torch

from memfix.atomic_write import write_whole
from memfix.cli.ending import run
from memfix.meters.resident import resident_growth
from memfix.ops.batches import TokenFile, ZipfCorpus, batches
from memfix.ops.batches.naive import naive_batches
from memfix.ops.batches.shuffle import shuffled
from memfix.ops.vocabulary import vocabulary
from memfix.provenance import describe, installed_version
from memfix.units import MiB, format_bytes, format_seconds

CAP, BATCH = 10_000, {"batch_size": 32, "length": 128}
BLOCK = 250_000  # words or tokens that are generated at once


# ---------------------------------------------------------------- contenders: each returns how many words or tokens
def _counter_by_line(path: Path) -> int:
    counts: Counter[str] = Counter()
    with path.open(encoding="utf-8") as file:
        for line in file:
            counts.update(line.split())
    return counts.total()


def _form(form: str) -> Callable[[Path], int]:
    return lambda path: sum(count for _, count in vocabulary(path, cap=CAP, form=form).entries)


def _tokenizers(path: Path) -> int:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordLevelTrainer(vocab_size=CAP, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train([str(path)], trainer)
    assert tokenizer.get_vocab_size() == CAP
    return 0  # tokenizers does not report the number of words


def _tokens(made: Callable[..., object], seed: int | None) -> Callable[[Path], int]:
    def read(path: Path) -> int:
        return sum(inputs.numel() for inputs, _ in made(TokenFile(path, 2**16), **BATCH, seed=seed))  # type: ignore

    return read


Contenders = dict[str, Callable[[Path], int]]
WORDS: Contenders = {
    "Counter(text.split())": lambda path: Counter(path.read_text(encoding="utf-8").split()).total(),
    "Counter by line": _counter_by_line,
    "vocabulary/streaming": _form("streaming"),
    "vocabulary/bounded": _form("bounded"),
    "tokenizers WordLevel": _tokenizers,
}
IN_ORDER: Contenders = {
    "batches/naive": _tokens(naive_batches, None),
    "batches/streaming": _tokens(batches, None),
}
SHUFFLED: Contenders = {
    "batches/naive shuffled": _tokens(naive_batches, 0),
    "batches/streaming shuffled": _tokens(batches, 0),
}
CONTENDERS = WORDS | IN_ORDER | SHUFFLED


# ---------------------------------------------------------------- generated files
def _zipf_words(num_types: int, num_bytes: int) -> Iterator[str]:
    corpus, start = ZipfCorpus(num_bytes, num_types), 0
    while num_bytes > 0:
        text = " ".join([f"w{number}" for number in corpus.rows(torch.tensor([start]), BLOCK)[0].tolist()])
        yield text.replace(" w1 ", " w1\n") + "\n"  # lines of about 25 words
        num_bytes, start = num_bytes - len(text), start + BLOCK


def _all_words(num_types: int) -> Iterator[str]:
    """Yield each of ``num_types`` words once in random order, mixed with as many words drawn by Zipf's law."""
    corpus = ZipfCorpus(num_types, num_types)
    for start in range(0, num_types, BLOCK):
        places = torch.arange(start, min(start + BLOCK, num_types))
        both = torch.stack([shuffled(places, num_types, seed=0), corpus.rows(places[:1], len(places))[0]], 1)
        yield " ".join([f"w{number}" for number in both.flatten().tolist()]).replace(" w1 ", " w1\n") + "\n"


def _write(path: Path, pieces: Iterator[str]) -> Path:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(pieces)
    return path


def _zeros(path: Path, num_bytes: int) -> Path:
    with path.open("wb") as file:
        file.truncate(num_bytes & ~1)  # a sparse file: reads are as fast as from the page cache
    return path


# ---------------------------------------------------------------- one contender in its own process
def measured(name: str, path: Path) -> dict[str, float]:
    """Run a contender in a new process."""
    command = [sys.executable, "-m", "benchmarks.host_ops", "batches", "--contender", name, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed on {path.name}: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout)


def _measure_here(name: str, path: Path) -> None:
    found: list[float | int] = []

    def step() -> None:
        started, cpu = time.perf_counter(), time.process_time()
        found.extend([CONTENDERS[name](path), time.perf_counter() - started, time.process_time() - cpu])

    if name == "tokenizers WordLevel":
        import tokenizers  # noqa: F401  imported before the floor is read
    growth = resident_growth(step)
    figures = dict(zip(("items", "seconds", "cpu_seconds"), found, strict=True))
    print(json.dumps({**figures, "resident_bytes": growth.bytes}))


def compared(title: str, path: Path, names: list[str], rounds: int) -> dict[str, object]:
    """Run the contenders in turns over one file; return the medians of their figures."""
    runs = [{name: measured(name, path) for name in names} for _ in range(rounds)]
    rows = {}
    for name in names:
        rows[name] = {key: statistics.median(one[name][key] for one in runs) for key in runs[0][name]}
        for key in ("seconds", "cpu_seconds"):  # time of the first contender over that of this one: above 1 is faster
            rows[name][f"ratio_{key}"] = statistics.median(one[names[0]][key] / one[name][key] for one in runs)
        row = rows[name]
        times = f"{format_seconds(row['seconds']):>9} (CPU {format_seconds(row['cpu_seconds'])})"
        print(f"{title:17} {name:27} {times:26} {format_bytes(int(row['resident_bytes'])):>11}", flush=True)
    return {"title": title, "file_bytes": path.stat().st_size, "rounds": rounds, "rows": rows}


def vocabularies(folder: Path, rounds: int, scale: float) -> list[dict[str, object]]:
    """Compare vocabularies of 100 MB of text, and of 5 million different words."""
    has_tokenizers = installed_version("tokenizers") != "not installed"
    names = [name for name in WORDS if has_tokenizers or name != "tokenizers WordLevel"]
    text = _write(folder / "text.txt", _zipf_words(1_000_000, int(1e8 * scale)))
    first = compared("100 MB of text", text, names, rounds)
    return [first, compared("5 million types", _write(text, _all_words(int(5_000_000 * scale))), names, 1)]


def streams(folder: Path, rounds: int, scale: float) -> list[dict[str, object]]:
    """Compare batches of 64 MiB of tokens with the naive list, in order and shuffled; and of 1 GiB, for the memory."""
    small, large = (_zeros(folder / f"{size}.bin", int(size * MiB * scale)) for size in (64, 1024))
    return [
        compared("64 MiB, in order", small, list(IN_ORDER), rounds),
        compared("64 MiB, shuffled", small, list(SHUFFLED), rounds),
        compared("1 GiB, shuffled", large, ["batches/streaming shuffled"], 1),
    ]


@click.command()
@click.argument("op", type=click.Choice(["vocabulary", "batches"]))
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="where the figures are written")
@click.option("--rounds", default=3, show_default=True, help="turns of every contender")
@click.option("--scale", default=1.0, show_default=True, help="of all file sizes, for a quick try")
@click.option("--contender", type=(str, click.Path(path_type=Path)), hidden=True)
def main(op: str, json_path: Path | None, rounds: int, scale: float, contender: tuple[str, Path] | None) -> None:
    """Compare time and memory of a host op with naive and peers."""
    if contender is not None:
        _measure_here(*contender)
        return
    with tempfile.TemporaryDirectory(prefix="memfix-") as folder:
        results = (vocabularies if op == "vocabulary" else streams)(Path(folder), rounds, scale)
    if json_path is not None:
        where = {**describe(), "tokenizers": installed_version("tokenizers"), "threads": str(torch.get_num_threads())}
        write_whole(json_path, json.dumps({"surroundings": where, "results": results}, indent=1) + "\n", "the figures")


if __name__ == "__main__":
    run(main, "python -m benchmarks.host_ops")
