"""Finding cuDNN and asking it: where it is missing, broken or old, and real answers where it is installed."""

from __future__ import annotations

import ctypes
import importlib.metadata
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memfix.meters.simulated.gpus import H200
from memfix.meters.simulated.workspace.cudnn import library, plans
from memfix.meters.simulated.workspace.cudnn.backend import CudnnError, Descriptor, Kind
from memfix.meters.simulated.workspace.cudnn.convolution import Convolution
from memfix.meters.simulated.workspace.cudnn.plans import Plan, Settings

bf16 = torch.bfloat16
IMAGE, WEIGHT = (32, 64, 128, 128), (64, 64, 3, 3)


def convolution(part: Any = "forward", *, dtype: torch.dtype = bf16, channels_last: bool = False) -> Convolution:
    return Convolution(part, dtype, IMAGE, WEIGHT, IMAGE, channels_last, (1, 1), (1, 1), (1, 1))


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Each test looks for the library anew."""
    yield
    library.library.cache_clear()
    plans.first_plan.cache_clear()


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of NVIDIA's packages for CUDA 13, with empty files in place of libraries."""
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    for name in ("libcublasLt.so.13", "libcudnn.so.9"):
        (folder / name).touch()
    monkeypatch.setattr(library, "_folders", lambda: [folder])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    library.library.cache_clear()
    return folder


class FakeLibrary:
    def __init__(self, version: int) -> None:
        self.cudnnGetVersion = type("Call", (), {"__call__": lambda _: version})()
        self.cudnnGetErrorString = type("Call", (), {"__call__": lambda _, status: b"STATUS %d" % status})()


# ---------------------------------------------------------------- finding it
def test_a_broken_library_is_none(packages: Path) -> None:
    assert library.library() is None
    assert library.version() is None


@pytest.mark.parametrize("missing", ["libcublasLt.so.13", "libcudnn.so.9"])
def test_nothing_is_loaded_if_one_is_missing(packages: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    (packages / missing).unlink()
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: pytest.fail("loaded a library"))
    assert library.library() is None


@pytest.mark.parametrize(("version", "is_used"), [(90800, True), (90701, False)])
def test_an_old_library_cannot_be_asked(
    packages: Path, monkeypatch: pytest.MonkeyPatch, version: int, is_used: bool
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: FakeLibrary(version))
    assert library.version() == (version if is_used else None)


def test_cuda_is_that_of_the_package_beside_torch_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = [types.SimpleNamespace(metadata={"Name": name}) for name in ("torch", "nvidia-cudnn-cu12")]
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: installed)
    assert library._cuda_of_cudnn() == "12"
    del installed[1]
    assert library._cuda_of_cudnn() is None


# ---------------------------------------------------------------- asking it
def test_without_a_library_there_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "library", lambda: None)
    plans.first_plan.cache_clear()
    assert plans.first_plan(H200, convolution()) is None


def test_an_error_of_the_library_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = FakeLibrary(91900)
    fake.cudnnBackendCreateDescriptor = lambda *_: 3000
    monkeypatch.setattr(plans, "library", lambda: fake)
    plans.first_plan.cache_clear()
    assert plans.first_plan(H200, convolution()) is None
    with pytest.raises(CudnnError, match=r"^TENSOR create: STATUS 3000$"):
        Descriptor(fake, Kind.TENSOR)


def test_a_dtype_that_cudnn_lacks_has_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "library", lambda: FakeLibrary(91900))
    plans.first_plan.cache_clear()
    assert plans.first_plan(H200, convolution(dtype=torch.complex64)) is None


@pytest.mark.skipif(
    library.version() != 91900, reason="needs the packages nvidia-cudnn-cu13==9.19.0.56 and nvidia-cublas"
)
@pytest.mark.parametrize(("asked", "workspace"), [(convolution(), 134_291_603), (convolution(channels_last=True), 131)])
def test_the_real_library_answers_as_on_the_h200(asked: Convolution, workspace: int) -> None:
    plan = plans.first_plan(H200, asked)
    assert plan == Plan(engine=62, workspace=workspace)


@pytest.mark.skipif(library.version() is None, reason="cuDNN is not installed")
def test_the_real_library_obeys_torchs_settings() -> None:
    asked = convolution("weight", dtype=torch.float32)
    exact = plans.first_plan(H200, asked, Settings(deterministic=True, allow_tf32=False))
    assert exact is not None
    assert exact != plans.first_plan(H200, asked)
