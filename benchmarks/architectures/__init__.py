"""Predicts the peak of a step of every architecture of a package, and measures it on a GPU.

    python -m benchmarks.architectures [--package timm] [--json PATH] [--only GLOB] [--workers 2]

Each architecture gets a small configuration, random weights, and a batch that fits its task: forward, backward,
clipping, AdamW. An architecture that runs in no small configuration is left out with the reason. Modules:

- ``of_transformers``, ``of_timm`` and so on: the architectures of a package
- ``package``: what such a module provides; ``packages`` lists all of them
- ``steps``: a train step of a model whose result is not known
- ``one_row``: finds a configuration that runs, and predicts and measures its step
- ``workers``: processes that make rows, each within a time limit
"""
