"""Steps of graph networks of ``torch_geometric``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from memfix.meters.base import Step, StepBuilder

from .training import train

_NUM_NODES, _WIDTH = 2000, 64


def edges(num_nodes: int, num_neighbours: int) -> torch.Tensor:
    """Connect each node with its successors on a ring. No random edges: shapes must not depend on drawn numbers."""
    start = torch.arange(num_nodes).repeat_interleave(num_neighbours)
    return torch.stack([start, (start + 1 + torch.arange(num_neighbours).repeat(num_nodes)) % num_nodes])


def nodes(name: str, device: str, **settings: Any) -> Step:
    """Build a step that trains a classifier of nodes on one graph."""
    import torch_geometric.nn

    model = getattr(torch_geometric.nn, name)(_WIDTH, 128, num_layers=2, out_channels=7, dropout=0.5, **settings)
    batch = {
        "x": torch.randn(_NUM_NODES, _WIDTH), "edge_index": edges(_NUM_NODES, 8),
        "y": torch.randint(0, 7, (_NUM_NODES,)), "train_mask": torch.arange(_NUM_NODES) < 600,
    }  # fmt: skip

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        scores = model(batch["x"], batch["edge_index"])
        return F.cross_entropy(scores[batch["train_mask"]], batch["y"][batch["train_mask"]])

    return train(model, batch, device, loss_of=loss_of)


def whole_graphs(device: str) -> Step:
    """Build a step that trains a classifier of whole graphs, of different sizes, that a loader batches."""
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import GIN, global_mean_pool

    data = [
        Data(x=torch.randn(size, 16), edge_index=edges(size, 4), y=torch.tensor([size % 2])) for size in range(100, 132)
    ]
    model = GIN(16, 64, num_layers=3, out_channels=2)

    def loss_of(model: nn.Module, _: Any) -> torch.Tensor:
        losses = []
        for batch in DataLoader(data, batch_size=16):
            moved = batch.to(device)
            scores = global_mean_pool(model(moved.x, moved.edge_index), moved.batch)
            losses.append(F.cross_entropy(scores, moved.y))
        return torch.stack(losses).mean()

    return train(model, {}, device, loss_of=loss_of)


STEPS: dict[str, tuple[str, StepBuilder]] = {
    f"torch_geometric {name}": ("torch_geometric", build)
    for name, build in {
        "GCN": partial(nodes, "GCN"),
        "GAT": partial(nodes, "GAT", heads=4),
        "GraphSAGE": partial(nodes, "GraphSAGE"),
        "GIN, loader of graphs": whole_graphs,
    }.items()
}
