"""A module of torch that a simulated step is the first to import is as if it had been imported before."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memfix

NAME = "torch.imported_by_a_step"


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where the source of the module goes."""
    monkeypatch.setattr(torch, "__path__", [*torch.__path__, str(tmp_path)])
    yield tmp_path / "imported_by_a_step.py"
    sys.modules.pop(NAME, None)
    vars(torch).pop("imported_by_a_step", None)


def imported() -> Any:
    return importlib.import_module(NAME)


def test_it_keeps_neither_a_patch_nor_a_fake_tensor(place: Path) -> None:
    place.write_text(
        "import torch\nfrom torch.cuda import is_available, current_device\n"
        "made, seen = torch.ones(2), (is_available(), torch._C._len_torch_dispatch_stack())\n"
    )

    def build(device: str) -> Any:
        def step() -> torch.Tensor:
            assert imported().seen == (is_there_a_gpu, 0)
            assert torch.cuda.is_available()  # the patches are back
            return torch.empty(7, device=device)

        return step

    is_there_a_gpu, finders = torch.cuda.is_available(), [*sys.meta_path]
    assert memfix.peak(build).peak_bytes == 7 * 4
    module = imported()
    assert (module.is_available, module.current_device) == (torch.cuda.is_available, torch.cuda.current_device)
    assert (type(module.made), module.made.tolist()) == (torch.Tensor, [1, 1])
    assert "exec_module" not in vars(module.__loader__)
    assert sys.meta_path == finders


def test_one_that_raises_leaves_the_step_patched_and_may_be_mended(place: Path) -> None:
    place.write_text("raise ValueError('planted')\n")

    def build(device: str) -> Any:
        def step() -> torch.Tensor:
            with pytest.raises(ValueError, match="planted"):
                imported()
            return torch.empty(7, device=device)

        return step

    assert memfix.peak(build).peak_bytes == 7 * 4
    place.write_text("is_mended = True\n")
    importlib.invalidate_caches()
    assert imported().is_mended


def test_one_that_is_not_there_is_not_found() -> None:
    def build(device: str) -> Any:
        with pytest.raises(ModuleNotFoundError, match=NAME):
            imported()
        return lambda: torch.empty(7, device=device)

    assert memfix.peak(build).peak_bytes == 7 * 4
