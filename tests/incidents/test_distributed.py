"""Two processes as one run: the loss curve of one process, and a file that either can take up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from forked_python import forked_python
from toy import ALONE

import memfix
from memfix.errors import UsageError
from memfix.incidents import get_incident
from memfix.incidents.distributed import VARIABLES, joined
from memfix.incidents.incident import load_config
from memfix.incidents.training import train

INCIDENT = "long_context_loss"
TINY = Path(memfix.__file__).parent / "incidents" / INCIDENT / "configs" / "tiny.yaml"


def curve_alone(*overrides: str, resume: Path | None = None) -> list[tuple[float, float]]:
    """Loss and norm of each step."""
    incident = get_incident(INCIDENT)
    config = load_config(incident, TINY, overrides)
    return [(step.loss, step.gradient_norm) for step in train(incident, config, ALONE, resume=resume)]


# two processes with the variables that torchrun gives them
AS_TORCHRUN = """
import os, socket, sys, torch.multiprocessing
from memfix.cli import main

with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]

def one_process(rank):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(port)
    )
    sys.argv = sys.argv[1:]
    main()

torch.multiprocessing.start_processes(one_process, nprocs=2, start_method="fork")
"""


def flat(curve: list[tuple[float, float]]) -> list[float]:
    return [figure for step in curve for figure in step]


def test_two_processes_give_the_loss_curve_of_one_and_a_file_that_one_can_resume(tmp_path: Path) -> None:
    """The same sequences a step: two processes with one each, or one with two. Float32 throughout."""
    command = [
        "memfix", "train", INCIDENT, "--config", str(TINY), "--json", "steps.jsonl", "training.batch_size=1",
        "training.device=cpu", "training.steps=6", "checkpoint.path=run.pt", "checkpoint.every=4",
    ]  # fmt: skip
    done = forked_python("-c", AS_TORCHRUN, *command, cwd=tmp_path, timeout_s=600)
    assert done.returncode == 0, done.stderr
    # one process speaks for both
    assert done.stdout.startswith(f"{INCIDENT}: 6 steps, processes: 2, cpu, float32, ")
    assert done.stdout.count("step 6/6") == 1
    records = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [record["event"] for record in records] == ["start", *["step"] * 6, "end"]
    together = [(record["loss"], record["gradient_norm"]) for record in records if record["event"] == "step"]

    settings = ("training.batch_size=2", "training.device=cpu")
    path = tmp_path / "alone.pt"
    alone = curve_alone(*settings, "training.steps=6", f"checkpoint.path={path}")
    # the norm too: Adam would forgive a gradient that was averaged where it should be summed
    assert flat(together) == pytest.approx(flat(alone), rel=1e-5)
    assert alone[-1][0] < alone[0][0] - 1

    # gathered from both, and taken up by one
    longer = (*settings, "training.steps=8")
    resumed, continued = (curve_alone(*longer, resume=file) for file in (tmp_path / "run.pt", path))
    assert len(resumed) == 2
    assert flat(resumed) == pytest.approx(flat(continued), rel=1e-5)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE set but RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT not: start several "),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK, WORLD_SIZE, LOCAL_RANK set but MASTER_ADDR, "),
        (dict.fromkeys(VARIABLES, "two"), "RANK=two, WORLD_SIZE=two, LOCAL_RANK=two: these must be ints; start "),
        (dict.fromkeys(VARIABLES, "2"), "RANK must be at least 0 and below WORLD_SIZE, got 2 and 2: start several "),
    ],
)
def test_a_wrong_launch_says_how_to_launch(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as refused, joined("cpu"):
        pass
    assert str(refused.value).startswith(message)
    assert "torchrun --nproc_per_node=2 -m memfix train" in str(refused.value)


def test_a_process_without_a_gpu_of_its_own_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(VARIABLES, ("1", "2", "1", "localhost", "1234"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match=r"^process 1 of this machine has no GPU: torch sees 1; start with --nproc"):
        joined("cuda").__enter__()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"^training.device is cuda, but torch sees no GPU; use training.device=cpu$"):
        joined("cuda").__enter__()


def test_alone_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with joined("cpu") as world:
        assert (world.rank, world.size, world.is_first) == (0, 1, True)
        assert world.sums(1, 2.5) == [1.0, 2.5]
        assert world.largest(2**52 + 1) == 2**52 + 1
