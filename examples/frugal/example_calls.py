"""One call of each op, from which memfix init reads inputs and dims: different dims have different sizes."""

import torch


def entropy():
    return {"logits": torch.randn(1024, 8000, requires_grad=True), "rows": 64}


def segment_mean():
    features = torch.randn(600, 24, requires_grad=True)
    return {"features": features, "segment": torch.randint(0, 40, (600,)), "segments": 40}


def mlp():
    x, up, down = torch.randn(2048, 64), torch.randn(64, 256), torch.randn(256, 80)
    return {"x": x.requires_grad_(), "up": up.requires_grad_(), "down": down.requires_grad_(), "rows": 128}
