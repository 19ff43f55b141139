"""Operators that rearrange, index, reduce, multiply and solve, in place and not, with backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .registry import Step, bf16, f16, f32, f64, leaf, probe, train_on

Change = Callable[[torch.Tensor], Any]

_REARRANGED: dict[str, Change] = {  # x [33, 517, 96]
    "permuted": lambda x: x.permute(2, 0, 1).contiguous(),
    "merged": lambda x: x.transpose(0, 1).reshape(517, -1),
    "heads": lambda x: x.view(33, 517, 6, 16).transpose(1, 2).contiguous().transpose(1, 2).flatten(2),
    "expanded": lambda x: x[:, None].expand(-1, 3, -1, -1).reshape(99, 517, 96),
    "repeated": lambda x: x.repeat(1, 1, 3) + x.tile(3),
    "interleaved": lambda x: x.repeat_interleave(3, 0),
    "interleaved_inside": lambda x: x.repeat_interleave(2, dim=2),
    "catted": lambda x: torch.cat([x, x * 2, x.sin()], -1),
    "stacked": lambda x: torch.stack([x, x.cos()], 2).flatten(2),
    "split": lambda x: sum(part.sin().sum() for part in x.split([100, 217, 200], 1)),
    "chunked": lambda x: torch.cat([part * i for i, part in enumerate(x.chunk(5, 1))], 1),
    "unbound": lambda x: torch.stack([row.tanh() for row in x.unbind(0)], 1),
    "rolled": lambda x: x.roll((3, 5), (0, 1)) + x.roll(7),
    "flipped": lambda x: x.flip(1) + x.fliplr(),
    "rotated": lambda x: torch.rot90(x, 1, (1, 2)),
    "lower": lambda x: x.tril(-1) + x.triu(2),
    "diagonal": lambda x: torch.diag_embed(x[:, :3]) + 1,
    "of_diagonal": lambda x: x.diagonal(dim1=1, dim2=2).sin(),
    "padded": lambda x: F.pad(x, (3, 5, 7, 0)),
    "constant": lambda x: F.pad(x, (-3, 5), value=2.0),
    "unfolded": lambda x: x.unfold(1, 7, 3).mean(-1),
    "strided": lambda x: x[:, ::3, 1::2] * 2,
    "as_strided": lambda x: x.as_strided((33, 511, 7, 96), (517 * 96, 96, 96, 1)).mean(2),
    "meshed": lambda x: torch.meshgrid(x[0, :, 0], x[0, :, 1], indexing="ij")[0] * 2,
    "shifted": lambda x: x[:, 1:] - x[:, :-1],
    "differences": lambda x: x.diff(dim=1, n=2),
    "outer": lambda x: torch.outer(x[0, :, 0], x[:, :, 0].flatten()),
    "kron": lambda x: torch.kron(x[0, :33, :33], x[1, :65, :31]),
    "block_diagonal": lambda x: torch.block_diag(*x[:9]),
    "combined": lambda x: torch.cartesian_prod(x[0, :, 0], x[1, :, 0]),
}


probe("rearranged", of=tuple(_REARRANGED))(
    lambda device, of: train_on(lambda x: _REARRANGED[of](x).square().mean(), leaf(device, 33, 517, 96))
)

_CHOSEN: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {  # x [2049, 517], i [333]
    "rows": lambda x, i: x[i],
    "columns": lambda x, i: x[:, i],
    "pairs": lambda x, i: x[i, i.flip(0)],
    "crossed": lambda x, i: x[i[:, None], i[None, :]],
    "ellipsis": lambda x, i: x.view(683, 3, 517)[..., i % 517],
    "middle": lambda x, i: x.view(683, 3, 517)[i, :, i % 517],
    "taken": lambda x, i: torch.take(x, i),
    "along": lambda x, i: torch.take_along_dim(x, i[None, :], 1),
    "gathered": lambda x, i: x.gather(1, i.expand(2049, -1)),
    "selected": lambda x, i: x.index_select(1, i),
    "masked": lambda x, i: torch.where(x > 0, x, x.detach().roll(1, 0)),
    "filled": lambda x, i: x.masked_fill(x.detach() < 0, -1e9),
    "index_filled": lambda x, i: x.index_fill(1, i, 0.5),
    "index_copied": lambda x, i: x.index_copy(0, torch.arange(333, device=x.device), x[:333] * 2),
    "scattered": lambda x, i: x.scatter(1, i.expand(2049, -1), x[:, :333] * 2),
    "scatter_added": lambda x, i: x.scatter_add(0, i[:, None].expand(-1, 517), x[:333]),
    "put": lambda x, i: x.index_put((i,), x[:333] * 2, accumulate=True),
    "assigned": lambda x, i: _assigned(x, i),
    "one_hot": lambda x, i: F.one_hot(i, 2049).to(x.dtype) @ x,
    "embedded": lambda x, i: F.embedding(i.repeat(33), x),
    "sliced_in": lambda x, i: x.slice_scatter(x[:333] * 2, 0, 5, 338),
    "selected_in": lambda x, i: x.select_scatter(x[0] * 2, 0, 5),
    "largest": lambda x, i: x.topk(17, 1).values,
    "sorted": lambda x, i: x.sort(1, descending=True).values,
    "ranked": lambda x, i: x.gather(1, x.detach().argsort(1)[:, :100]),
    "bucketed": lambda x, i: F.embedding(torch.bucketize(x[0].detach(), x[1].detach().sort().values), x),
    "searched": lambda x, i: x[0][torch.searchsorted(x[1].detach().sort().values, x.detach()).clamp(max=516)],
    "kth": lambda x, i: x.kthvalue(33, 1).values,
}


def _assigned(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[i] = y[i] * 2
    y[:, 3:7] = 0.0
    y[5:9, ::2] += 1
    y[:, -1] = x[:, 0]
    return y


@probe(of=tuple(_CHOSEN))
def _chosen(device: str, of: str) -> Step:
    x, i = leaf(device, 2049, 517), torch.randint(0, 517, (333,), device=device)
    return train_on(lambda x: _CHOSEN[of](x, i).square().mean(), x)


_REDUCED: dict[str, Callable[..., Any]] = {
    "sum": torch.sum, "mean": torch.mean, "var": torch.var, "std": torch.std, "amax": torch.amax, "amin": torch.amin,
    "norm": torch.linalg.vector_norm, "logsumexp": torch.logsumexp, "nansum": torch.nansum,
    "norm_of_one": lambda x, dim: torch.linalg.vector_norm(x, 1, dim=dim),
    "norm_of_three": lambda x, dim: torch.linalg.vector_norm(x, 3, dim=dim),
    "norm_inf": lambda x, dim: torch.linalg.vector_norm(x, float("inf"), dim=dim),
    "var_mean": lambda x, dim: torch.var_mean(x, dim, correction=0)[0],
    "mean_square": lambda x, dim: x.square().mean(dim).sqrt(),
}  # fmt: skip


@probe(of=tuple(_REDUCED), axes=((0,), (1,), (0, 2)))
def _reduced(device: str, of: str, axes: tuple[int, ...], dtype: torch.dtype | None = None) -> Step:
    x = leaf(device, 77, 1033, 45, dtype=dtype, draw=torch.rand)
    return train_on(lambda x: _REDUCED[of](x, dim=axes).square().sum(), x)


_REDUCED_ONCE: dict[str, Change] = {
    "max": lambda x: x.max(1).values, "min_of_all": lambda x: x.min(), "median": lambda x: x.median(1).values,
    "prod": lambda x: x.prod(1), "prod_of_all": lambda x: x[0].prod(), "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(1), "cummax": lambda x: x.cummax(1).values,
    "logcumsumexp": lambda x: x.logcumsumexp(1), "quantile": lambda x: x.quantile(0.3, 1),
    "quantiles": lambda x: x[:99].quantile(x.new_tensor([0.1, 0.9]), dim=0), "aminmax": lambda x: x.aminmax(dim=1)[0],
    "argmax": lambda x: x.sum() * x.argmax(1).sum(), "trapezoid": lambda x: torch.trapezoid(x, dim=1),
    "all": lambda x: x.sum() * ((x > 0).all(1).sum() + (x > 1).any()),
    "count": lambda x: x * x.count_nonzero(1)[:, None],
    "nanmean": lambda x: x.nanmean(1), "cosine": lambda x: F.cosine_similarity(x[:, None], x[None, :33], dim=-1),
    "pairwise": lambda x: F.pdist(x[:333]), "covariance": lambda x: (x - x.mean(0)).t() @ (x - x.mean(0)),
    "renorm": lambda x: x.renorm(2, 0, 1.0), "mode": lambda x: x[:333].mode(1).values,
}  # fmt: skip


probe("reduced_once", of=tuple(_REDUCED_ONCE))(
    lambda device, of: train_on(lambda x: _REDUCED_ONCE[of](x).square().sum(), leaf(device, 2049, 517, draw=torch.rand))
)
probe("reduced_in", of=("sum", "mean", "var", "amax", "norm", "logsumexp"), dtype=(bf16, f16, f64))(
    lambda device, of, dtype: _reduced(device, of, (1,), dtype)
)

_PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {  # a [33, 257, 130], b [33, 130, 65]
    "matmul": torch.matmul,
    "einsum": lambda a, b: torch.einsum("bij,bjk->bik", a, b),
    "einsum_transposed": lambda a, b: torch.einsum("bij,bjk->kib", a, b),
    "einsum_summed": lambda a, b: torch.einsum("bij,bjk->ik", a, b),
    "einsum_outer": lambda a, b: torch.einsum("bi,bj->bij", a[:, :, 0], b[:, :, 0]),
    "tensordot": lambda a, b: torch.tensordot(a, b, dims=([0, 2], [0, 1])),
    "baddbmm": lambda a, b: torch.baddbmm(a[:, :, :65], a, b, beta=0.5, alpha=2.0),
    "addmm": lambda a, b: torch.addmm(b[0, 0], a[0], b[0]),
    "broadcast": lambda a, b: a @ b[0],
    "broadcast_left": lambda a, b: a[0] @ b,
    "vectors": lambda a, b: (a @ b[:, :, :1]).squeeze(-1),
    "matrix_vector": lambda a, b: a.flatten(0, 1) @ b[0, :, 0],
    "inner": lambda a, b: torch.inner(a, b[0].t()),
    "chain": lambda a, b: torch.linalg.multi_dot([a[0], b[0], b[0].t(), a[0].t()]),
    "gram": lambda a, b: a @ a.mT,
    "mul_sum": lambda a, b: (a[:, :, :, None] * b[:, None, :, :9]).sum(2) if b.dim() == 3 else b,
    "cross": lambda a, b: torch.linalg.cross(a[..., :3], a[..., 3:6]),
    "distances": lambda a, b: torch.cdist(a, b.mT),
    "bilinear": lambda a, b: F.bilinear(a[:, 0], b[:, :, 0], b[:9, :, :1].expand(9, 130, 130).contiguous()),
    "lerped": lambda a, b: torch.lerp(a, a.flip(0), 0.3) + torch.addcmul(a, a, a, value=0.5),
    "addcdiv": lambda a, b: torch.addcdiv(a, a, a.abs() + 1) + torch.hypot(a, a.flip(0)),
    "clamped": lambda a, b: a.clamp(-1, 1) + a.clamp(min=a.mean(1, keepdim=True)) + torch.maximum(a, a.flip(0)),
    "remainders": lambda a, b: torch.fmod(a, 0.7) + torch.remainder(a, 0.3) + a.frac() + a.trunc(),
}


probe("product_of", of=tuple(_PRODUCTS))(
    lambda device, of: train_on(
        lambda a, b: _PRODUCTS[of](a, b).square().mean(), leaf(device, 33, 257, 130), leaf(device, 33, 130, 65)
    )
)


_SOLVED: dict[str, Change] = {  # a [9, 131, 131], symmetric and positive definite
    **{name: getattr(torch.linalg, name) for name in ("cholesky", "svdvals", "eigvalsh", "inv", "det", "pinv")},
    "solve": lambda a: torch.linalg.solve(a, a[..., :9]),
    "cholesky_solve": lambda a: torch.cholesky_solve(a[..., :9], torch.linalg.cholesky(a)),
    "triangular": lambda a: torch.linalg.solve_triangular(a.tril(), a[..., :9], upper=False),
    "qr": lambda a: torch.linalg.qr(a)[1],
    "svd": lambda a: torch.linalg.svd(a, full_matrices=False)[1],
    "eigh": lambda a: torch.linalg.eigh(a)[0],
    "slogdet": lambda a: torch.linalg.slogdet(a)[1],
    "norm_nuclear": lambda a: torch.linalg.matrix_norm(a, "nuc"),
    "norm_spectral": lambda a: torch.linalg.matrix_norm(a, 2),
    "lstsq": lambda a: torch.linalg.lstsq(a, a[..., :9])[0],
    "matrix_exp": lambda a: torch.matrix_exp(a / 100),
    "matrix_power": lambda a: torch.linalg.matrix_power(a / 100, 5),
    "lu": lambda a: torch.linalg.lu_factor(a)[0],
    "logdet": torch.logdet,
}


@probe(of=tuple(_SOLVED), dtype=(f32, f64))
def _solved(device: str, of: str, dtype: torch.dtype) -> Step:
    root, unit = leaf(device, 9, 131, 131, dtype=dtype), torch.eye(131, dtype=dtype, device=device)
    return train_on(lambda root: _SOLVED[of](root @ root.mT + unit).square().mean(), root)


_IN_PLACE: dict[str, Change] = {
    "chain": lambda x: x.sin().mul_(2).add_(1).clamp_(-1, 1).neg_(),
    "chain_of_saved": lambda x: (x * 2).add_(1).cos().mul_(3).sub_(2).sigmoid_(),
    "view": lambda x: _changed_view(x),
    "slice_loop": lambda x: _changed_rows(x),
    "transposed": lambda x: (x * 2).t_().mul_(3),
    "masked": lambda x: (x * 2).masked_fill_(x.detach() > 0, 0.0).tril_(),
    "copied": lambda x: torch.empty_like(x).copy_(x).mul_(2),
    "out": lambda x: x.mean() + torch.add(x.detach(), 1, out=torch.empty_like(x)).mean(),
    "cast": lambda x: x.half().mul_(2).float().add_(x.double().float()),
    "lerped": lambda x: (x * 2).lerp_(x, 0.5).addcmul_(x, x, value=0.1),
    "zeroed": lambda x: (x * 2).index_fill_(0, torch.zeros(1, dtype=torch.long, device=x.device), 0.0),
}


def _changed_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.view(-1)[1000:2000].mul_(3)
    y[:, :100].sigmoid_()
    return y.t()


def _changed_rows(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    for i in range(0, 2049, 400):
        y[i : i + 400] = x[i : i + 400].softmax(-1)
    return y


probe("in_place", of=tuple(_IN_PLACE))(
    lambda device, of: train_on(lambda x: _IN_PLACE[of](x).square().mean(), leaf(device, 2049, 517))
)

_OTHER_DTYPES: dict[str, Change] = {
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(2049, -1, 2)) ** 2),
    "complex_product": lambda x: (torch.complex(x, x) @ torch.complex(x.t(), x.t())).abs(),
    "complex_exp": lambda x: torch.exp(1j * x).real + torch.polar(x.abs(), x).imag,
    "fft": lambda x: torch.fft.fft(x).abs(),
    "fft2": lambda x: torch.fft.fft2(x).real,
    "rfft": lambda x: torch.fft.irfft(torch.fft.rfft(x, norm="ortho") * 2, n=514, norm="ortho"),
    "fftshift": lambda x: torch.fft.fftshift(torch.fft.fftn(x)).imag,
    "spectral": lambda x: torch.fft.irfft2(torch.fft.rfft2(x.view(3, 683, 514)) * 0.5, s=(683, 514)),
    "integers": lambda x: x * (torch.arange(514, device=x.device).div(3, rounding_mode="floor") % 7 << 1),
    "bits": lambda x: x * ((x.detach() > 0) & (x.detach() < 1) | (x.detach() == 2)).to(torch.uint8),
    "viewed": lambda x: x + x.detach().view(torch.int32).bitwise_and(255).to(f32),
    "double": lambda x: x.double().softmax(-1).to(bf16).float(),
    "promoted": lambda x: x.half() + x.double() * torch.ones(514, dtype=bf16, device=x.device),
    "eighth": lambda x: x.to(torch.float8_e4m3fn).to(f32) + x,
}


probe("in_other_dtypes", of=tuple(_OTHER_DTYPES))(
    lambda device, of: train_on(lambda x: _OTHER_DTYPES[of](x).square().mean(), leaf(device, 2049, 514))
)
