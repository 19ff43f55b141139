"""Saves and loads a training run, on any number of processes: all that its next step depends on, in one file."""

from __future__ import annotations

import pickle
import zipfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from ..atomic_write import write_whole
from ..errors import UsageError
from .distributed import World

FORMAT = "memfix training checkpoint"
VERSION = 3
WHAT = "the checkpoint file"


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run. ``model`` and ``optimizer`` are unsharded states on the CPU, keyed by parameter names."""

    incident: str
    config: dict[str, dict[str, Any]]
    step: int  # steps done
    examples: int  # examples of the data that were used
    num_targets: int  # targets that were trained on
    random: list[dict[str, torch.Tensor]]  # the states of each process's generators, by rank
    model: dict[str, Any]
    optimizer: dict[str, Any]
    loss_scale: dict[str, Any]  # empty if the loss is not scaled


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Replace ``path`` atomically: a run that is killed while it writes leaves the old file."""
    content = {field.name: getattr(checkpoint, field.name) for field in fields(Checkpoint)}
    try:
        write_whole(path, lambda file: torch.save({"format": FORMAT, "version": VERSION, **content}, file), WHAT)
    except RuntimeError as error:  # torch's writer raises this on a full disk
        raise UsageError(f"cannot write {WHAT} {path}: {_first_line(error)}") from None


def read_checkpoint(path: Path, *, map_only: bool = False) -> Checkpoint:
    """Load a file of :func:`write_checkpoint`. With ``map_only`` tensors are memory-mapped and read when used.

    No code in the file is run: anything but plain data is refused.
    """
    if not path.is_file():
        raise UsageError(f"no checkpoint file {path}")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch itself does not verify checksums
        if damaged is not None:
            raise UsageError(f"{path}: {WHAT} is damaged: {damaged} does not match its checksum")
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=map_only)
    except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError, KeyError) as error:
        raise UsageError(
            f"{path}: cannot be read as {WHAT}: it was cut short, or another program wrote it ({_first_line(error)})"
        ) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UsageError(f"{path}: a file of torch, but not a {FORMAT}")
    if content["version"] != VERSION:
        raise UsageError(f"{path}: version {content['version']} of {WHAT}; this memfix reads version {VERSION}")
    wanted = [field.name for field in fields(Checkpoint)]
    missing = [name for name in wanted if name not in content]
    if missing:
        raise UsageError(f"{path}: {WHAT} lacks {', '.join(missing)}")
    return Checkpoint(**{name: content[name] for name in wanted})


def whole_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The unsharded state dicts of both. Every process must call this; all but the first get empty dicts."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    return model_state, dict(optimizer_state or {})


def put_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint) -> None:
    """Load a checkpoint into the model and the optimizer; each process takes its shard."""
    set_state_dict(
        model,
        optimizer,
        model_state_dict=checkpoint.model,
        optim_state_dict=checkpoint.optimizer,
        options=StateDictOptions(full_state_dict=True),
    )


def random_states(world: World) -> list[dict[str, torch.Tensor]]:
    """The generator states of all processes. Every process must call this."""
    states = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(world.device)
    gathered = {name: world.gathered(state) for name, state in states.items()}
    return [{name: gathered[name][rank] for name in states} for rank in range(world.size)]


def put_random_state(world: World, checkpoint: Checkpoint) -> None:
    """Restore this process's generators; a rank that the checkpoint lacks derives a seed from the state of rank 0."""
    known = world.rank < len(checkpoint.random)
    states = checkpoint.random[world.rank if known else 0]
    torch.set_rng_state(states["cpu"])
    if world.device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], world.device)
    if not known:
        torch.manual_seed(int(torch.randint(2**62, ())) + world.rank)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
