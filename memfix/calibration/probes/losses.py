"""Losses, forward and backward, at sizes that are no multiples of a tile."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .registry import Step, bf16, f16, leaf, probe, train_on, train_step

_ROWS, _CLASSES = 2333, 517

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_OF_VALUES: dict[str, Loss] = {
    **{name: getattr(F, f"{name}_loss") for name in ("l1", "poisson_nll", "soft_margin", "multilabel_soft_margin")},
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
    "poisson_nll_full": lambda x, y: F.poisson_nll_loss(x, y, full=True),
    "poisson_nll_plain": lambda x, y: F.poisson_nll_loss(x.exp(), y, log_input=False),
    "hinge": lambda x, y: F.hinge_embedding_loss(x, y.sign()),
    "soft_targets": F.cross_entropy,
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


def _of_values(device: str, of: str, dtype: torch.dtype | None = None) -> Step:
    x = leaf(device, _ROWS, _CLASSES, dtype=dtype, draw=torch.rand)
    y = torch.rand(_ROWS, _CLASSES, device=device, dtype=dtype)
    return train_on(lambda x: _OF_VALUES[of](x, y), x)


probe("loss_of_values", of=tuple(_OF_VALUES))(_of_values)
_IN_HALF_PRECISION = ("l1", "kl", "logits_pos_weight", "cosine", "info_nce", "focal_sigmoid")
probe("loss_of_small_values", of=_IN_HALF_PRECISION, dtype=(bf16, f16))(_of_values)

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
    "multi_margin": F.multi_margin_loss,
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


def _of_classes(device: str, loss: Loss, *shape: int, dtype: torch.dtype | None = None) -> Step:
    """Train on a loss of logits of ``shape``, whose axis 1 is the classes."""
    rows, classes, *pixels = shape
    x = leaf(device, *shape, dtype=dtype)
    y = torch.randint(0, classes, (rows, *pixels), device=device)
    return train_on(lambda x: loss(x, y), x)


probe("loss_of_classes", of=tuple(_OF_CLASSES))(
    lambda device, of: _of_classes(device, _OF_CLASSES[of], _ROWS, _CLASSES)
)
probe("loss_of_small_logits", dtype=(bf16, f16), cast=(False, True))(
    lambda device, dtype, cast: _of_classes(
        device, lambda x, y: F.cross_entropy(x.float() if cast else x, y), _ROWS, 3001, dtype=dtype
    )
)
probe("loss_of_pixels", of=("cross_entropy", "smoothed", "weighted", "ignored", "nll", "kept"))(
    lambda device, of: _of_classes(device, _OF_CLASSES[of], 9, 21, 77, 83)
)


@probe(shifted=(True, False))
def _loss_of_a_language_model(device: str, shifted: bool) -> Step:
    hidden, head = leaf(device, 3, 517, 384), leaf(device, 5003, 384)
    ids = torch.randint(0, 5003, (3, 517), device=device)

    def loss() -> torch.Tensor:
        logits = hidden @ head.t()
        if shifted:
            return F.cross_entropy(logits[:, :-1].reshape(-1, 5003), ids[:, 1:].reshape(-1))
        return F.cross_entropy(logits.transpose(1, 2), ids)

    return train_step([hidden, head], loss)


@probe()
def _multilabel_margin(device: str) -> Step:
    x, y = leaf(device, _ROWS, 51, draw=torch.rand), torch.randint(0, 51, (_ROWS, 51), device=device)
    return train_on(lambda x: F.multilabel_margin_loss(x, y), x)


# ---------------------------------------------------------------- losses of policies
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
    new = leaf(device, 514, 1733)
    old, advantage = (torch.randn(514, 1733, device=device) for _ in range(2))
    return train_on(lambda new: _OF_POLICIES[of](new, old, advantage), new)


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
