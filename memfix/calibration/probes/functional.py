"""Derivatives beyond a plain backward: ``torch.func``, gradients of gradients, custom autograd functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils.checkpoint import checkpoint

from .registry import Step, leaf, probe, train_on, train_step


def _net(device: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(130, 257), nn.Tanh(), nn.Linear(257, 65), nn.SiLU(), nn.Linear(65, 9)).to(device)


def _loss(net: nn.Module, state: Any, x: torch.Tensor) -> torch.Tensor:
    return functional_call(net, state, (x,)).square().mean()


# f(state, x) is the output of the net with the parameters ``state``; loss(state, x) is a loss of that output
_TRANSFORMED: dict[str, Callable[..., Any]] = {
    "grad": lambda f, loss, state, x: grad(loss)(state, x),
    "grad_and_value": lambda f, loss, state, x: grad_and_value(loss)(state, x),
    "grad_of_input": lambda f, loss, state, x: grad(partial(loss, state))(x),
    "grad_of_grad": lambda f, loss, state, x: grad(lambda y: grad(partial(loss, state))(y).square().sum())(x),
    "per_sample": lambda f, loss, state, x: vmap(grad(loss), (None, 0))(state, x[:257]),
    "per_sample_in_pieces": lambda f, loss, state, x: vmap(grad(loss), (None, 0), chunk_size=100)(state, x[:257]),
    "vmapped": lambda f, loss, state, x: vmap(partial(loss, state))(x),
    "vmapped_norm": lambda f, loss, state, x: vmap(lambda y: (y / y.norm()).outer(y[:9]).softmax(0))(x),
    "vmapped_index": lambda f, loss, state, x: vmap(lambda y, i: y.index_select(0, i))(x, (x[:, :9] > 0).long()),
    "vmapped_noise": lambda f, loss, state, x: vmap(lambda y: F.dropout(y, 0.1), randomness="different")(x),
    "vmapped_twice": lambda f, loss, state, x: vmap(vmap(torch.dot, (None, 0)), (0, None))(x, x[:333]),
    "ensemble": lambda f, loss, state, x: vmap(f, (0, None))({n: torch.stack([p] * 5) for n, p in state.items()}, x),
    "jvp": lambda f, loss, state, x: jvp(partial(f, state), (x,), (x,)),
    "vjp": lambda f, loss, state, x: vjp(partial(f, state), x)[1](x[:, :9]),
    "jacrev": lambda f, loss, state, x: vmap(jacrev(partial(f, state)))(x),
    "jacfwd": lambda f, loss, state, x: vmap(jacfwd(partial(f, state)))(x[:333]),
    "jacobian_of_state": lambda f, loss, state, x: jacrev(lambda s: f(s, x[:9]))(state),
    "hessian": lambda f, loss, state, x: vmap(hessian(partial(loss, state)))(x[:33]),
    "hessian_vector": lambda f, loss, state, x: jvp(grad(partial(loss, state)), (x,), (x,))[1],
    "hessian_vector_back": lambda f, loss, state, x: vjp(grad(partial(loss, state)), x)[1](x),
    "linearized": lambda f, loss, state, x: linearize(partial(f, state), x[:333])[1](x[:333]),
    "laplacian": lambda f, loss, state, x: vmap(lambda y: jacfwd(jacrev(partial(loss, state)))(y).trace())(x[:33]),
}


@probe(of=tuple(_TRANSFORMED))
def _transformed(device: str, of: str) -> Step:
    net = _net(device)
    state = {name: p.detach() for name, p in net.named_parameters()}
    x = torch.randn(2049, 130, device=device)
    return lambda: _TRANSFORMED[of](lambda s, y: functional_call(net, s, (y,)), partial(_loss, net), state, x)


@probe(of=("jacobian", "hessian", "hvp", "vhp", "vectorized", "dual", "batched"))
def _autograd_functional(device: str, of: str) -> Step:
    net, x = _net(device), torch.randn(33, 130, device=device)
    of_all = torch.autograd.functional

    def loss(y: torch.Tensor) -> torch.Tensor:
        return net(y).square().mean()

    def dual() -> Any:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(net(forward_ad.make_dual(x.repeat(99, 1), x.repeat(99, 1)))).tangent

    def batched() -> Any:
        y = x.clone().requires_grad_()
        out = net(y)
        units = torch.eye(9, device=device)[:, None].expand(9, 33, 9)
        return torch.autograd.grad(out, y, units, is_grads_batched=True)

    steps: dict[str, Callable[[], Any]] = {
        "jacobian": lambda: of_all.jacobian(net, x[:9]),
        "hessian": lambda: of_all.hessian(loss, x[:1]),
        "hvp": lambda: of_all.hvp(loss, x, x),
        "vhp": lambda: of_all.vhp(loss, x, x),
        "vectorized": lambda: of_all.jacobian(net, x, vectorize=True),
        "dual": dual,
        "batched": batched,
    }
    return steps[of]


# ---------------------------------------------------------------- gradients of gradients
@probe(of=("penalty", "interpolated", "r1", "second_of_weights", "inner_loop", "physics", "energy"))
def _gradients_of_gradients(device: str, of: str) -> Step:
    net, x = _net(device), torch.randn(2049, 130, device=device)
    other = torch.randn(2049, 130, device=device)

    def loss() -> torch.Tensor:
        if of in ("second_of_weights", "inner_loop"):
            weights = dict(net.named_parameters())
            first = torch.autograd.grad(_loss(net, weights, x), list(weights.values()), create_graph=True)
            if of == "second_of_weights":
                return torch.stack([g.square().sum() for g in first]).sum()
            moved = {name: p - 0.01 * g for (name, p), g in zip(weights.items(), first, strict=True)}
            return _loss(net, moved, other)
        mixing = torch.rand(2049, 1, device=device)
        y = (mixing * x + (1 - mixing) * other if of == "interpolated" else x.clone()).requires_grad_()
        out = net(y)
        (slope,) = torch.autograd.grad(out.sum(), y, create_graph=True)
        if of == "physics":
            (curve,) = torch.autograd.grad(slope[:, 0].sum(), y, create_graph=True)
            return (curve[:, 0] - out[:, 0]).square().mean()
        if of == "energy":
            return F.mse_loss(-slope, other) + out.mean()
        if of == "r1":
            return F.softplus(-out).mean() + 5 * slope.square().sum(1).mean()
        return out.mean() + 10 * ((slope.norm(2, dim=1) - 1) ** 2).mean()

    return train_step(net, loss)


@probe()
def _gradient_penalty_of_a_convolution(device: str) -> Step:
    net = nn.Sequential(nn.Conv2d(3, 48, 3), nn.LeakyReLU(0.2), nn.Conv2d(48, 1, 3)).to(device)
    images = torch.randn(17, 3, 61, 57, device=device)

    def loss() -> torch.Tensor:
        y = images.clone().requires_grad_()
        (slope,) = torch.autograd.grad(net(y).sum(), y, create_graph=True)
        return (slope.flatten(1).norm(dim=1) - 1).square().mean()

    return train_step(net, loss)


# ---------------------------------------------------------------- custom autograd functions
def _function(run: Callable[..., Any], differentiate: Callable[..., Any]) -> Any:
    """An autograd function. ``run`` returns the output and the tensors to save; backward is ``differentiate``."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
            output, *saved = run(*inputs)
            ctx.save_for_backward(*saved)
            return output

        @staticmethod
        def backward(ctx: Any, upstream: torch.Tensor) -> Any:
            return differentiate(upstream, *ctx.saved_tensors)

    return Own.apply


def _swish_gradient(upstream: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(x)
    return upstream * s * (1 + x * (1 - s))


def _recomputed_gradient(upstream: torch.Tensor, *saved: torch.Tensor) -> Any:
    x, w = (t.detach().requires_grad_() for t in saved)
    with torch.enable_grad():
        y = F.gelu(x @ w)
    return torch.autograd.grad(y, (x, w), upstream)


_saves_its_input = _function(lambda x: (x * torch.sigmoid(x), x), _swish_gradient)
_saves_its_output = _function(lambda x: (x.exp(),) * 2, once_differentiable(lambda upstream, y: upstream * y))
_reverses = _function(lambda x: (x.view_as(x),), lambda upstream: upstream.neg())
_recomputes = _function(lambda x, w: (F.gelu(x @ w), x, w), _recomputed_gradient)


class _Dirties(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        mask = x > 0
        x.mul_(mask)
        ctx.mark_dirty(x)
        ctx.save_for_backward(mask)
        return x

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> torch.Tensor:
        return upstream * ctx.saved_tensors[0]


class _KeepsOnItself(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.small, ctx.scale = x.to(torch.bfloat16), scale
        order = x.argsort(-1)
        ctx.mark_non_differentiable(order)
        ctx.set_materialize_grads(False)
        return x.square() * scale, order

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor, _: Any) -> Any:
        return 2 * ctx.scale * ctx.small.float() * upstream, None


class _WithItsOwnSetup(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return upstream @ w.t() if ctx.needs_input_grad[0] else None, x.t() @ upstream


_OWN: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "input": lambda x, w: _saves_its_input(x),
    "output": lambda x, w: _saves_its_output(x),
    "dirty": lambda x, w: _Dirties.apply(x * 2),
    "on_itself": lambda x, w: _KeepsOnItself.apply(x, 0.5)[0],
    "setup": _WithItsOwnSetup.apply,
    "reversed": lambda x, w: _reverses(x.tanh()) @ w,
    "recomputed": _recomputes,
    "twice": lambda x, w: _saves_its_input(_saves_its_input(x) @ w),
}  # fmt: skip


probe("own_function", of=tuple(_OWN))(
    lambda device, of: train_on(
        lambda x, w: _OWN[of](x, w).square().mean(), leaf(device, 2049, 390), leaf(device, 390, 515)
    )
)


@probe(coupled=("recomputed", "stored"))
def _reversible(device: str, coupled: str) -> Step:
    nets = nn.ModuleList(nn.Sequential(nn.Linear(96, 257), nn.GELU(), nn.Linear(257, 96)) for _ in range(4)).to(device)
    x = torch.randn(2049, 192, device=device)

    def loss() -> torch.Tensor:
        left, right = x.chunk(2, 1)
        for net in nets:
            moved = checkpoint(net, right, use_reentrant=False) if coupled == "recomputed" else net(right)
            left, right = right, left + moved
        return torch.cat([left, right], 1).square().mean()

    return train_step(nets, loss)
