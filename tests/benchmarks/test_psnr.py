"""The PSNR of the decoders: every decoder trains, from each seed anew."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.psnr import main
from memfix.errors import MemfixError

TINY = (
    "model.hidden_dim=8", "model.latent_dim=8", "model.latent_tokens=4", "data.resolution=4", "training.steps=5",
    "training.batch_size=2", "training.log_every=2",
)  # fmt: skip


def test_every_decoder_is_trained_from_every_seed(tmp_path: Path) -> None:
    path = tmp_path / "psnr.json"
    ended = CliRunner().invoke(main, [*TINY, "--seeds", "2", "--json", str(path)], standalone_mode=False)
    assert ended.exception is None
    found = json.loads(path.read_text())
    assert list(found["decoders"]) == ["self", "cross", "ff", "residual"]
    assert (found["config"], found["settings"]["training"]["steps"]) == ("small", 5)
    for row in found["decoders"].values():
        one, other = row["psnr_db"]
        assert list(one) == list(other) == ["1", "2", "4", "5"]
        assert one != other
        assert all(map(math.isfinite, one.values()))
    assert len({row["parameters"] for row in found["decoders"].values()}) == 4
    assert f"{found['decoders']['self']['psnr_db'][1]['5']:.2f} dB" in ended.output.splitlines()[0]


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_trained() -> None:
    with pytest.raises(MemfixError, match=r"cannot write the report missing/psnr\.json"):
        CliRunner().invoke(main, [*TINY, "--json", "missing/psnr.json"], standalone_mode=False, catch_exceptions=False)
