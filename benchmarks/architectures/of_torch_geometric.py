"""The architectures of ``torch_geometric``: every convolution in a net of two layers, poolings, and whole models."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..third_party.graphs import edges
from ..third_party.training import Batch
from .package import Attempt, Package
from .steps import trained

_NODES, _NEIGHBOURS, _WIDTH, _EDGE_WIDTH, _KINDS = 200, 8, 32, 8, 3


def _mlp(width_in: int = _WIDTH, width_out: int = _WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(width_in, 64), nn.ReLU(), nn.Linear(64, width_out))


_METADATA = (["node"], [("node", "to", "node")])

_SETTINGS: dict[str, Callable[[], Any]] = {
    "in_channels": lambda: _WIDTH, "out_channels": lambda: _WIDTH, "channels": lambda: _WIDTH,
    "hidden_channels": lambda: _WIDTH, "in_edge_channels": lambda: _EDGE_WIDTH, "edge_dim": lambda: _EDGE_WIDTH,
    "num_layers": lambda: 2, "num_timesteps": lambda: 2, "K": lambda: 3, "alpha": lambda: 0.1,
    "num_relations": lambda: _KINDS, "num_node_types": lambda: _KINDS, "num_edge_types": lambda: _KINDS,
    "edge_type_emb_dim": lambda: 4, "edge_attr_emb_dim": lambda: 4, "first_aggr": lambda: True, "heads": lambda: 2,
    "filter_size": lambda: 2, "nn": _mlp, "local_nn": lambda: None, "dim": lambda: 3, "kernel_size": lambda: 4,
    "metadata": lambda: _METADATA, "aggregators": lambda: ["mean", "max", "std"], "k": lambda: 4,
    "scalers": lambda: ["identity", "amplification"], "deg": lambda: torch.full((9,), 10), "phi": lambda: None,
    "space_dimensions": lambda: 3, "propagate_dimensions": lambda: 16, "num_clusters": lambda: 10,
    "num_nodes": lambda: _NODES, "embedding_dim": lambda: _WIDTH, "depth": lambda: 2, "num_classes": lambda: _KINDS,
    "edge_index": lambda: edges(_NODES, _NEIGHBOURS), "walk_length": lambda: 6, "context_size": lambda: 3,
}  # fmt: skip
"""Settings by their names. Each is given to the classes that need it."""

_SPECIAL: dict[str, Callable[[], dict[str, Any]]] = {
    "GINEConv": lambda: {"edge_dim": _EDGE_WIDTH},
    "GATConv": lambda: {"heads": 2, "concat": False, "edge_dim": _EDGE_WIDTH},
    "GATv2Conv": lambda: {"heads": 2, "concat": False, "edge_dim": _EDGE_WIDTH},
    "TransformerConv": lambda: {"heads": 2, "concat": False, "edge_dim": _EDGE_WIDTH},
    "RGATConv": lambda: {"heads": 1, "edge_dim": _EDGE_WIDTH},
    "GENConv": lambda: {"edge_dim": _EDGE_WIDTH},
    "ResGatedGraphConv": lambda: {"edge_dim": _EDGE_WIDTH},
    "GeneralConv": lambda: {"in_edge_channels": _EDGE_WIDTH},
    "GMMConv": lambda: {"dim": _EDGE_WIDTH},
    "SplineConv": lambda: {"dim": _EDGE_WIDTH},
    "CGConv": lambda: {"dim": _EDGE_WIDTH},
    "NNConv": lambda: {"nn": _mlp(_EDGE_WIDTH, _WIDTH * _WIDTH)},
    "EdgeConv": lambda: {"nn": _mlp(2 * _WIDTH)},
    "DynamicEdgeConv": lambda: {"nn": _mlp(2 * _WIDTH)},
    "PointNetConv": lambda: {"local_nn": _mlp(_WIDTH + 3), "global_nn": _mlp()},
    "PPFConv": lambda: {"local_nn": _mlp(_WIDTH + 4), "global_nn": _mlp()},
    "PointGNNConv": lambda: {"mlp_h": _mlp(_WIDTH, 3), "mlp_f": _mlp(_WIDTH + 3), "mlp_g": _mlp()},
    "HEATConv": lambda: {"heads": 2, "concat": False},
    "PNAConv": lambda: {"edge_dim": _EDGE_WIDTH},
    "PNA": lambda: {name: _SETTINGS[name]() for name in ("aggregators", "scalers", "deg")},
    "MLP": lambda: {"channel_list": [_WIDTH, 64, _WIDTH]},
    "GPSConv": lambda: {"conv": _of("GCNConv"), "heads": 2},
    "DirGNNConv": lambda: {"conv": _of("GCNConv")},
    "HeteroConv": lambda: {"convs": {("node", "to", "node"): _of("SAGEConv")}},
    "WLConvContinuous": dict,
    "JumpingKnowledge": lambda: {"mode": "lstm", "channels": _WIDTH, "num_layers": 2},
    "SchNet": lambda: {"hidden_channels": 32, "num_filters": 32, "num_interactions": 2},
    "DimeNet": lambda: {"out_channels": 1, "num_blocks": 2, "num_bilinear": 4, "num_spherical": 3, "num_radial": 4},
    "DimeNetPlusPlus": lambda: {
        "out_channels": 1, "num_blocks": 2, "int_emb_size": 8, "basis_emb_size": 8, "out_emb_channels": 16,
        "num_spherical": 3, "num_radial": 4,
    },
    "GNNFF": lambda: {"hidden_node_channels": 16, "hidden_edge_channels": 16},
    "ViSNet": lambda: {"hidden_channels": 32, "num_layers": 2},
    "GAE": lambda: {"encoder": _of("GCNConv")},
    "DeepGCNLayer": lambda: {"conv": _of("GCNConv"), "norm": nn.LayerNorm(_WIDTH), "act": nn.ReLU()},
    "GroupAddRev": lambda: {"conv": _of("GCNConv", in_channels=_WIDTH // 2, out_channels=_WIDTH // 2), "num_groups": 2},
}  # fmt: skip
"""Settings of classes that need more than ``_SETTINGS``."""

_TASKS = {"convolution": "conv", "pooling": "pool", "model": "models"}
"""The module of each task's classes."""


def _of(name: str, **settings: Any) -> Any:
    """Make a layer or a model with small settings."""
    import torch_geometric.nn

    kind = getattr(torch_geometric.nn, name, None) or getattr(torch_geometric.nn.models, name)
    special = _SPECIAL.get(name, dict)() | settings
    needed = [
        each.name for each in inspect.signature(kind.__init__).parameters.values() if each.default is inspect._empty
    ]
    given = {each: _SETTINGS[each]() for each in needed if each in _SETTINGS and each not in special}
    return kind(**given, **special)


def _batch() -> Batch:
    """Return a random graph with all that a layer may ask for, by its name."""
    torch.manual_seed(0)
    graph, again = edges(_NODES, _NEIGHBOURS), edges(_NODES, _NEIGHBOURS - 2)
    num_edges = graph.shape[1]
    hyperedges = torch.stack([torch.arange(_NODES), torch.arange(_NODES) // 10])
    return {
        "x": torch.randn(_NODES, _WIDTH), "x_0": torch.randn(_NODES, _WIDTH), "z": torch.randint(1, 10, (_NODES,)),
        "edge_index": graph, "edge_weight": torch.rand(num_edges), "edge_attr": torch.rand(num_edges, _EDGE_WIDTH),
        "edge_type": torch.arange(num_edges) % _KINDS, "node_type": torch.arange(_NODES) % _KINDS,
        "pos": 4 * torch.randn(_NODES, 3), "normal": torch.randn(_NODES, 3), "batch": torch.arange(_NODES) // 50,
        "pos_edge_index": graph, "neg_edge_index": again, "hyperedge_index": hyperedges,
        "y": torch.arange(_NODES) % _KINDS, "mask": torch.arange(_NODES) < 50, "xs": [torch.randn(_NODES, _WIDTH)] * 2,
        "x_dict": {"node": torch.randn(_NODES, _WIDTH)},
    }  # fmt: skip


_WITHOUT_WEIGHTS = ("edge_weight", "edge_attr", "batch", "neg_edge_index", "mask")
"""Inputs that a class need not be given."""


class _Net(nn.Module):
    """One layer or model after a linear layer, or two such layers. Called with a batch by the names of its inputs."""

    def __init__(self, name: str, num_layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(_WIDTH, _WIDTH)
        self.layers = nn.ModuleList(_of(name) for _ in range(num_layers))

    def forward(self, batch: Any, left_out: tuple[str, ...]) -> Any:
        x = self.first(batch["x"])
        given = batch | {"x": x, "x_dict": {"node": x}, "xs": [x, x.relu()]}
        given["edge_index_dict"] = {("node", "to", "node"): batch["edge_index"]}
        answer: Any = None
        for layer in self.layers:
            answer = layer(**_asked(layer, given, left_out))
            first = next(iter(answer.values())) if isinstance(answer, dict) else answer
            first = first[0] if isinstance(first, tuple) else first
            if isinstance(first, torch.Tensor) and first.shape == x.shape:
                given |= {"x": first.relu(), "x_dict": {"node": first.relu()}}
        return answer


def _asked(layer: nn.Module, given: Any, left_out: tuple[str, ...]) -> dict[str, Any]:
    """Return what a layer takes of what is given. Of the optional inputs, those in ``left_out`` are not given."""
    if type(layer).__name__ == "HeteroConv":
        return {"x_dict": given["x_dict"], "edge_index_dict": given["edge_index_dict"]}
    of_conv = getattr(layer, "conv", None)
    takes = [*inspect.signature(layer.forward).parameters.values()]
    if of_conv is not None and all(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in takes):
        takes = [*inspect.signature(of_conv.forward).parameters.values()]
    return {
        each.name: given[each.name]
        for each in takes
        if each.name in given and (each.default is inspect._empty or each.name not in left_out)
    }


def _architectures() -> dict[str, tuple[str, str]]:
    import torch_geometric.nn

    found = {}
    for task, module in _TASKS.items():
        of_module = getattr(torch_geometric.nn, module)
        for name in of_module.__all__:
            kind = getattr(of_module, name)
            if inspect.isclass(kind) and issubclass(kind, nn.Module) and name != "MessagePassing":
                found[f"{task}: {name}"] = task, name
    return found


def _attempts(task: str, name: str) -> Iterator[Attempt]:
    num_layers = 2 if task == "convolution" else 1
    for left_out in ((), *((each,) for each in _WITHOUT_WEIGHTS), _WITHOUT_WEIGHTS):
        yield functools.partial(
            trained, functools.partial(_Net, name, num_layers), _batch(), functools.partial(_called, left_out)
        )


def _called(left_out: tuple[str, ...], model: nn.Module, batch: Any) -> Any:
    return model(batch, left_out)


PACKAGE = Package("torch_geometric", _architectures, _attempts)
