"""Losses, each forward and backward, at sizes that no tile divides."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ...meters.base import Step
from .registry import probe
from .training import train_step

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
_ROWS, _CLASSES = 2333, 517

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_OF_VALUES: dict[str, Loss] = {
    "l1": F.l1_loss,
    "mse_kept": lambda x, y: F.mse_loss(x, y, reduction="none").mean(1).sum(),
    "mse_summed": lambda x, y: F.mse_loss(x, y, reduction="sum"),
    "mse_by_hand": lambda x, y: ((x - y) ** 2).mean(),
    "smooth_l1_beta": lambda x, y: F.smooth_l1_loss(x, y, beta=0.3),
    "huber_delta": lambda x, y: F.huber_loss(x, y, delta=0.3, reduction="sum"),
    "bce_weighted": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y, weight=y + 1),
    "logits_pos_weight": lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=y[0] + 1),
    "logits_weight": lambda x, y: F.binary_cross_entropy_with_logits(x, y, weight=y[:, :1]),
    "kl": lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
    "kl_of_logs": lambda x, y: F.kl_div(x.log_softmax(-1), y.log_softmax(-1), log_target=True, reduction="sum"),
    "distillation": lambda x, y: F.kl_div((x / 2).log_softmax(-1), (y / 2).softmax(-1), reduction="batchmean") * 4,
    "jensen_shannon": lambda x, y: _jensen_shannon(x.softmax(-1), y.softmax(-1)),
    "gaussian_nll_by_hand": lambda x, y: 0.5 * (x.exp().clamp(min=1e-6).log() + (x - y) ** 2 / x.exp()).mean(),
    "poisson_nll": lambda x, y: F.poisson_nll_loss(x, y),
    "poisson_nll_full": lambda x, y: F.poisson_nll_loss(x, y, full=True),
    "poisson_nll_plain": lambda x, y: F.poisson_nll_loss(x.exp(), y, log_input=False),
    "soft_margin": lambda x, y: F.soft_margin_loss(x, y),
    "hinge": lambda x, y: F.hinge_embedding_loss(x, y.sign()),
    "multilabel_soft_margin": lambda x, y: F.multilabel_soft_margin_loss(x, y),
    "soft_targets": lambda x, y: F.cross_entropy(x, y),
    "cosine": lambda x, y: (1 - F.cosine_similarity(x, y)).mean(),
    "cosine_embedding": lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(len(x), device=x.device)),
    "margin_ranking": lambda x, y: F.margin_ranking_loss(x, y, torch.ones_like(y), margin=0.1),
    "triplet": lambda x, y: F.triplet_margin_loss(x, y, y.roll(1, 0)),
    "triplet_swapped": lambda x, y: F.triplet_margin_loss(x, y, y.roll(1, 0), swap=True),
    "triplet_by_cosine": lambda x, y: F.triplet_margin_with_distance_loss(
        x, y, y.flip(0), distance_function=lambda a, b: 1 - F.cosine_similarity(a, b)
    ),
    "pairwise": lambda x, y: F.pairwise_distance(x, y).mean(),
    "log_cosh": lambda x, y: torch.log(torch.cosh(x - y)).mean(),
    "charbonnier": lambda x, y: torch.sqrt((x - y) ** 2 + 1e-6).mean(),
    "quantile": lambda x, y: torch.maximum(0.9 * (y - x), -0.1 * (y - x)).mean(),
    "dice": lambda x, y: 1 - 2 * (x.sigmoid() * y).sum() / (x.sigmoid().sum() + y.sum() + 1),
    "focal_sigmoid": lambda x, y: (
        F.binary_cross_entropy_with_logits(x, y, reduction="none") * (1 - x.sigmoid()) ** 2
    ).mean(),
    "info_nce": lambda x, y: F.cross_entropy(
        F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).t() / 0.07, torch.arange(len(x), device=x.device)
    ),
    "clip": lambda x, y: _clip(F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).t() * 10),
    "nt_xent": lambda x, y: _nt_xent(torch.cat([x, y])),
    "siglip": lambda x, y: (
        -F.logsigmoid((x @ y.t()) * (2 * torch.eye(len(x), device=x.device, dtype=x.dtype) - 1)).mean()
    ),
    "barlow": lambda x, y: _barlow(x, y),
    "vicreg": lambda x, y: _vicreg(x) + F.mse_loss(x, y),
    "mmd": lambda x, y: _kernel(x, x) + _kernel(y, y) - 2 * _kernel(x, y),
    "total_variation": lambda x, y: (x[1:] - x[:-1]).abs().mean() + (x[:, 1:] - x[:, :-1]).abs().mean(),
}


def _jensen_shannon(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    middle = (0.5 * (p + q)).log()
    return (F.kl_div(middle, p, reduction="sum") + F.kl_div(middle, q, reduction="sum")) / 2


def _clip(logits: torch.Tensor) -> torch.Tensor:
    own = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.t(), own)) / 2


def _nt_xent(z: torch.Tensor) -> torch.Tensor:
    z = F.normalize(z, dim=1)
    similar = z @ z.t() / 0.5
    similar = similar.masked_fill(torch.eye(len(z), dtype=torch.bool, device=z.device), float("-inf"))
    return F.cross_entropy(similar, torch.arange(len(z), device=z.device).roll(len(z) // 2))


def _barlow(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    c = ((x - x.mean(0)) / x.std(0)).t() @ ((y - y.mean(0)) / y.std(0)) / len(x)
    return (c.diagonal() - 1).square().sum() + 0.005 * (c - torch.diag(c.diagonal())).square().sum()


def _vicreg(x: torch.Tensor) -> torch.Tensor:
    return (
        F.relu(1 - (x.var(0) + 1e-4).sqrt()).mean()
        + ((x - x.mean(0)).t() @ (x - x.mean(0)) / (len(x) - 1)).triu(1).square().sum()
    )


def _kernel(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.exp(-(torch.cdist(x, y) ** 2) / 2).mean()


@probe(of=tuple(_OF_VALUES))
def _loss_of_values(device: str, of: str) -> Step:
    x = torch.rand(_ROWS, _CLASSES, device=device).requires_grad_()
    y = torch.rand(_ROWS, _CLASSES, device=device)
    return train_step([x], lambda: _OF_VALUES[of](x, y))


@probe(of=("l1", "kl", "logits_pos_weight", "cosine", "info_nce", "focal_sigmoid"), dtype=(bf16, f16))
def _loss_of_small_values(device: str, of: str, dtype: torch.dtype) -> Step:
    x = torch.rand(_ROWS, _CLASSES, device=device, dtype=dtype).requires_grad_()
    y = torch.rand(_ROWS, _CLASSES, device=device, dtype=dtype)
    return train_step([x], lambda: _OF_VALUES[of](x, y))


_OF_CLASSES: dict[str, Loss] = {
    "cross_entropy": F.cross_entropy,
    "smoothed": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
    "weighted": lambda x, y: F.cross_entropy(x, y, weight=torch.ones(x.shape[1], device=x.device, dtype=x.dtype)),
    "ignored": lambda x, y: F.cross_entropy(x, y, ignore_index=3),
    "kept": lambda x, y: (F.cross_entropy(x, y, reduction="none") * y).sum(),
    "summed": lambda x, y: F.cross_entropy(x, y, reduction="sum"),
    "nll": lambda x, y: F.nll_loss(x.log_softmax(1), y),
    "nll_weighted": lambda x, y: F.nll_loss(
        x.log_softmax(1), y, weight=torch.ones(x.shape[1], device=x.device, dtype=x.dtype)
    ),
    "multi_margin": lambda x, y: F.multi_margin_loss(x, y),
    "multi_margin_squared": lambda x, y: F.multi_margin_loss(x, y, p=2, margin=0.5),
    "gathered": lambda x, y: -x.log_softmax(1).gather(1, y[:, None]).mean(),
    "one_hot": lambda x, y: -(F.one_hot(y, _CLASSES) * x.log_softmax(1)).sum(1).mean(),
    "focal": lambda x, y: _focal(x, y),
    "z_loss": lambda x, y: F.cross_entropy(x, y) + 1e-4 * x.logsumexp(1).square().mean(),
    "entropy": lambda x, y: (x.softmax(1) * x.log_softmax(1)).sum(1).mean(),
    "arc_face": lambda x, y: F.cross_entropy(64 * (x.tanh() - 0.3 * F.one_hot(y, _CLASSES)), y),
}


def _focal(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    each = F.cross_entropy(x, y, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


@probe(of=tuple(_OF_CLASSES))
def _loss_of_classes(device: str, of: str) -> Step:
    x = torch.randn(_ROWS, _CLASSES, device=device).requires_grad_()
    y = torch.randint(0, _CLASSES, (_ROWS,), device=device)
    return train_step([x], lambda: _OF_CLASSES[of](x, y))


@probe(dtype=(bf16, f16), cast=(False, True))
def _loss_of_small_logits(device: str, dtype: torch.dtype, cast: bool) -> Step:
    x = torch.randn(_ROWS, 3001, dtype=dtype, device=device).requires_grad_()
    y = torch.randint(0, 3001, (_ROWS,), device=device)
    return train_step([x], lambda: F.cross_entropy(x.float() if cast else x, y))


@probe(of=("cross_entropy", "smoothed", "weighted", "ignored", "nll", "kept"))
def _loss_of_pixels(device: str, of: str) -> Step:
    x = torch.randn(9, 21, 77, 83, device=device).requires_grad_()
    y = torch.randint(0, 21, (9, 77, 83), device=device)
    loss = _OF_CLASSES[of]
    return train_step([x], lambda: loss(x, y))


@probe(shifted=(True, False))
def _loss_of_a_language_model(device: str, shifted: bool) -> Step:
    hidden = torch.randn(3, 517, 384, device=device).requires_grad_()
    head = torch.randn(5003, 384, device=device).requires_grad_()
    ids = torch.randint(0, 5003, (3, 517), device=device)

    def loss() -> torch.Tensor:
        logits = hidden @ head.t()
        if shifted:
            return F.cross_entropy(logits[:, :-1].reshape(-1, 5003), ids[:, 1:].reshape(-1))
        return F.cross_entropy(logits.transpose(1, 2), ids)

    return train_step([hidden, head], loss)


@probe()
def _multilabel_margin(device: str) -> Step:
    x = torch.rand(_ROWS, 51, device=device).requires_grad_()
    y = torch.randint(0, 51, (_ROWS, 51), device=device)
    return train_step([x], lambda: F.multilabel_margin_loss(x, y))


# ---------------------------------------------------------------- of policies
_OF_POLICIES: dict[str, Callable[..., torch.Tensor]] = {
    "ppo": lambda new, old, advantage: (
        -torch.minimum((new - old).exp() * advantage, (new - old).exp().clamp(0.8, 1.2) * advantage).mean()
    ),
    "grpo": lambda new, old, advantage: (
        -(
            (new - new.detach()).exp()
            * (advantage - advantage.mean(1, keepdim=True))
            / (advantage.std(1, keepdim=True) + 1e-6)
        )
        + 0.04 * ((old - new).exp() - (old - new) - 1)
    ).mean(),
    "reinforce": lambda new, old, advantage: -(new * (advantage - advantage.mean()) / (advantage.std() + 1e-8)).mean(),
    "dpo": lambda new, old, advantage: -F.logsigmoid(0.1 * (new - old).sum(1).chunk(2)[0]).mean(),
    "td": lambda new, old, advantage: F.smooth_l1_loss(new[:, :-1], (advantage[:, 1:] + 0.99 * new[:, 1:]).detach()),
    "sac": lambda new, old, advantage: (0.2 * new - torch.min(old * new, advantage * new)).mean(),
    "discounted": lambda new, old, advantage: (new * advantage.flip(1).cumsum(1).flip(1)).mean(),
}


@probe(of=tuple(_OF_POLICIES))
def _loss_of_a_policy(device: str, of: str) -> Step:
    new = torch.randn(514, 1733, device=device).requires_grad_()
    old, advantage = (torch.randn(514, 1733, device=device) for _ in range(2))
    return train_step([new], lambda: _OF_POLICIES[of](new, old, advantage))


@probe()
def _generalized_advantages(device: str) -> Step:
    rewards, values = (torch.randn(64, 33_001, device=device) for _ in range(2))

    def step() -> torch.Tensor:
        out, last = torch.empty_like(rewards), torch.zeros_like(rewards[0])
        for t in reversed(range(63)):
            last = rewards[t] + 0.99 * values[t + 1] - values[t] + 0.95 * 0.99 * last
            out[t] = last
        return out

    return step
