"""Random draws and decoding: distributions, token sampling, beam search and key-value caches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributions as D
import torch.nn.functional as F

from .registry import Step, bf16, f32, leaf, probe, train_on

_BATCH, _VOCABULARY = 65, 20_011

_TOKENS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "greedy": lambda x: x.argmax(-1),
    "multinomial": lambda x: torch.multinomial(x.softmax(-1), 1),
    "several": lambda x: torch.multinomial(x.softmax(-1), 5, replacement=True),
    "without_replacement": lambda x: torch.multinomial(x.softmax(-1), 5),
    "temperature": lambda x: torch.multinomial((x / 0.7).softmax(-1), 1).squeeze(1),
    "top_k": lambda x: torch.multinomial(
        x.masked_fill(x < x.topk(50, -1).values[:, -1:], float("-inf")).softmax(-1), 1
    ),
    "top_k_gathered": lambda x: x.topk(50, -1).indices.gather(1, torch.multinomial(x.topk(50, -1)[0].softmax(-1), 1)),
    "top_p": lambda x: _top_p(x),
    "min_p": lambda x: torch.multinomial(
        x.softmax(-1).masked_fill_(x.softmax(-1) < 0.1 * x.softmax(-1).amax(-1, keepdim=True), 0.0), 1
    ),
    "gumbel": lambda x: (x - torch.empty_like(x).exponential_().log()).argmax(-1),
    "exponential": lambda x: (x.softmax(-1) / torch.empty_like(x).exponential_(1)).argmax(-1),
    "penalized": lambda x: _penalized(x),
    "categorical": lambda x: D.Categorical(logits=x, validate_args=False).sample(),
}


def _top_p(x: torch.Tensor) -> torch.Tensor:
    ordered, order = x.sort(-1, descending=True)
    beyond = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1) > 0.9
    ordered = ordered.masked_fill(beyond, float("-inf"))
    return order.gather(1, torch.multinomial(ordered.softmax(-1), 1))


def _penalized(x: torch.Tensor) -> torch.Tensor:
    past = torch.zeros(_BATCH, 101, dtype=torch.long, device=x.device)
    scores = x.gather(1, past)
    scores = torch.where(scores < 0, scores * 1.2, scores / 1.2)
    return x.scatter(1, past, scores).argmax(-1)


probe("next_token", of=tuple(_TOKENS), dtype=(f32, bf16))(
    lambda device, of, dtype: partial(
        torch.no_grad()(_TOKENS[of]), torch.randn(_BATCH, _VOCABULARY, dtype=dtype, device=device)
    )
)


@probe(beams=(3, 8))
def _beam_search(device: str, beams: int) -> Step:
    embedding = torch.randn(9001, 96, device=device)

    def step() -> torch.Tensor:
        ids = torch.zeros(9, beams, 1, dtype=torch.long, device=device)
        scores = torch.zeros(9, beams, device=device)
        for _ in range(6):
            logits = embedding[ids].mean(2) @ embedding.t()
            total = (scores[..., None] + logits.log_softmax(-1)).flatten(1)
            scores, best = total.topk(beams, -1)
            kept = ids.gather(1, (best // 9001)[..., None].expand(-1, -1, ids.shape[-1]))
            ids = torch.cat([kept, (best % 9001)[..., None]], -1)
        return ids

    return step


@probe(cache=("catted", "written", "copied_in", "rolling"), dtype=(bf16, f32))
def _decoding(device: str, cache: str, dtype: torch.dtype) -> Step:
    weight = torch.randn(3 * 384, 384, dtype=dtype, device=device)
    first = torch.randn(9, 1, 384, dtype=dtype, device=device)

    def step() -> torch.Tensor:
        x = first
        keys = torch.zeros(9, 6, 0 if cache == "catted" else 257, 64, dtype=dtype, device=device)
        values = torch.zeros_like(keys)
        with torch.inference_mode():
            for t in range(17):
                q, k, v = (part.view(9, 1, 6, 64).transpose(1, 2) for part in (x @ weight.t()).chunk(3, -1))
                if cache == "catted":
                    keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
                elif cache == "written":
                    keys[:, :, t : t + 1], values[:, :, t : t + 1] = k, v
                elif cache == "copied_in":
                    place = torch.full((1,), t, device=device)
                    keys, values = keys.index_copy_(2, place, k), values.index_copy_(2, place, v)
                else:
                    keys, values = (torch.cat([c[:, :, 1:], n], 2) for c, n in ((keys, k), (values, v)))
                scores = (q @ keys.transpose(-1, -2) / 8).float().softmax(-1).to(dtype)
                x = (scores @ values).transpose(1, 2).reshape(9, 1, 384)
        return x

    return step


# ---------------------------------------------------------------- distributions
_DRAWS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "normal": lambda m, s: _scored(D.Normal(m, s)),
    "normal_kl": lambda m, s: D.kl_divergence(D.Normal(m, s), D.Normal(m.flip(0), s.flip(0))).mean(),
    "independent": lambda m, s: _scored(D.Independent(D.Normal(m, s), 1)),
    "log_normal": lambda m, s: _scored(D.LogNormal(m, s)),
    "laplace": lambda m, s: _scored(D.Laplace(m, s)),
    "gamma": lambda m, s: _scored(D.Gamma(s, s)),
    "beta": lambda m, s: _scored(D.Beta(s, s)),
    "dirichlet": lambda m, s: _scored(D.Dirichlet(s)),
    "student": lambda m, s: _scored(D.StudentT(s, m, s)),
    "uniform": lambda m, s: D.Uniform(m, m + s).rsample().mean(),
    "exponential": lambda m, s: _scored(D.Exponential(s)),
    "gumbel": lambda m, s: _scored(D.Gumbel(m, s)),
    "cauchy": lambda m, s: _scored(D.Cauchy(m, s)),
    "bernoulli": lambda m, s: _drawn(D.Bernoulli(logits=m)),
    "poisson": lambda m, s: _drawn(D.Poisson(s)),
    "categorical": lambda m, s: _drawn(D.Categorical(logits=m)) + D.Categorical(logits=m).entropy().mean(),
    "one_hot": lambda m, s: _drawn(D.OneHotCategorical(logits=m)),
    "relaxed": lambda m, s: D.RelaxedOneHotCategorical(s.new_tensor(0.5), logits=m).rsample().square().mean(),
    "squashed": lambda m, s: _scored(D.TransformedDistribution(D.Normal(m, s), [D.transforms.SigmoidTransform()])),
    "mixture": lambda m, s: _drawn(D.MixtureSameFamily(D.Categorical(logits=m), D.Normal(m, s))),
    "diagonal": lambda m, s: _scored(D.LowRankMultivariateNormal(m, s[..., None], s)),
    "gumbel_softmax": lambda m, s: F.gumbel_softmax(m, tau=0.5).square().mean(),
    "gumbel_softmax_hard": lambda m, s: (F.gumbel_softmax(m, hard=True) * s).mean(),
    "noise": lambda m, s: (m + s * torch.randn_like(m)).square().mean(),
    "permuted": lambda m, s: (m[torch.randperm(len(m), device=m.device)] * s).mean(),
    "mixed_up": lambda m, s: (0.3 * m + 0.7 * m[torch.randperm(len(m), device=m.device)]).square().mean(),
}


def _scored(distribution: Any) -> torch.Tensor:
    return distribution.log_prob(distribution.rsample()).mean()


def _drawn(distribution: Any) -> torch.Tensor:
    return -distribution.log_prob(distribution.sample()).mean()


@probe(of=tuple(_DRAWS))
def _drawn_from(device: str, of: str) -> Step:
    D.Distribution.set_default_validate_args(False)  # the argument checks read values on the host
    return train_on(
        lambda mean, log_scale: _DRAWS[of](mean, log_scale.exp()) + 0 * (mean + log_scale).sum(),
        *(leaf(device, 3001, 130) for _ in range(2)),
    )
