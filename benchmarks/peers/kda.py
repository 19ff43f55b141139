"""KDA compared with flash-linear-attention and with the Hopper kernels of NVIDIA's cuDNN frontend.

All contenders compute the final state, which gets no upstream gradient. g is always float32.
"""

# B batch, T tokens, H heads, K key width, V value width

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from memfix.contract import Form
from memfix.ops.kda.cuda import cuda_kda

from . import Comparison, Entry, Peer, Table, Tensors, fla_operators

LEAST_GATE = -5.0  # flash-linear-attention's safe_gate requires gates in [-5, 0]


def mild(tensors: Tensors, generator: torch.Generator) -> None:
    """Fill in keys of norm 1, gates between -5 and 0 that decay mildly, and beta between 0 and 1, as in a model.

    The contract draws values up to the edge of divergence, which overflow over thousands of tokens.
    """
    q_BTHK, k_BTHK, g_BTHK, beta_BTH = (tensors[name] for name in ("q", "k", "g", "beta"))
    made: dict[str, Any] = {"generator": generator, "device": q_BTHK.device}
    k_BTHK.copy_(F.normalize(torch.randn(k_BTHK.shape, **made), dim=-1))
    g_BTHK.copy_(F.logsigmoid(torch.randn(g_BTHK.shape, **made)).clamp_(min=LEAST_GATE))
    beta_BTH.copy_(torch.rand(beta_BTH.shape, **made))


def gates_down_to(lowest: float) -> Callable[[Tensors, torch.Generator], None]:
    """Return a function that fills in mild values, but gates uniform between ``lowest`` and 0."""

    def fill(tensors: Tensors, generator: torch.Generator) -> None:
        mild(tensors, generator)
        tensors["g"].uniform_(lowest, 0.0, generator=generator)

    return fill


def graphed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run the function as two CUDA graphs, for forward and backward, captured at the first call with these shapes.

    Each call copies the tensors into the static inputs of the graphs, and launches the graphs."""
    captured: dict[tuple[torch.Size, ...], Callable[..., Any]] = {}

    def call(*tensors: torch.Tensor | None, **options: Any) -> Any:
        given = tuple(tensor for tensor in tensors if tensor is not None)
        shapes = tuple(tensor.shape for tensor in given)
        if shapes not in captured:
            captured.clear()  # frees the graphs of the previous shape
            places = tuple(tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in given)
            with torch.enable_grad():
                captured[shapes] = torch.cuda.make_graphed_callables(functools.partial(function, **options), places)
        return captured[shapes](*given)

    return call


def _fla(*, safe_gate: bool) -> Callable[..., Any]:
    chunk_kda = fla_operators("kda").chunk_kda
    return lambda q, k, v, g, beta, initial_state=None, *, scale=None: chunk_kda(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=True, safe_gate=safe_gate
    )


def _cudnn() -> Callable[..., Any]:
    from cudnn.linear_attention.ops import kimi_delta_attention

    @functools.cache
    def bounds(batch: int, length: int, device: torch.device) -> torch.Tensor:
        return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)

    def kda(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None = None,
        *,
        scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = (tensor.flatten(0, 1) for tensor in (q, k, v, g, beta.float()))
        out, final_SHVK = kimi_delta_attention(
            *rows, bounds(*q.shape[:2], q.device), scale=scale, initial_state=initial_state, output_final_state=True
        )
        return out.view(v.shape), final_SHVK.transpose(2, 3)

    return kda


_FAST = ("triton", "cuda")  # at the long shapes the other forms take a thousand times as long
_PEERS = ("fla", "fla_safe_gate", "cudnn")
_IN_BFLOAT16 = "dtype=bfloat16 dtype.g=float32"
_WIDE = f"K=128 V=128 {_IN_BFLOAT16}"

COMPARISON = Comparison(
    peers={
        "fla": Peer("flash-linear-attention", functools.partial(_fla, safe_gate=False), ("fla", "triton")),
        "fla_safe_gate": Peer("flash-linear-attention", functools.partial(_fla, safe_gate=True), ("fla", "triton")),
        "cudnn": Peer("nvidia-cudnn-frontend", _cudnn, ("cudnn", "cuda")),
        "fla_graphed": Peer("flash-linear-attention", lambda: graphed(_fla(safe_gate=True)), ("fla", "triton")),
    },
    tables={
        "shapes": Table(
            [
                Entry("incident", _IN_BFLOAT16, forms=("wy", *_FAST, "cuda_graphed")),
                Entry("incident", "dtype=float32", forms=("naive", "streamed", "wy", "triton"), peers=()),
                Entry("long", f"B=1 T=8192 H=32 {_WIDE}", forms=_FAST, peers=_PEERS),
                Entry("batched", f"B=4 T=4096 H=16 {_WIDE}", forms=_FAST, peers=_PEERS),
                Entry("context", f"B=1 T=65536 H=16 {_WIDE}", forms=_FAST, peers=_PEERS),
            ],
            phases=("train", "forward"),
            values=("mild",),
        ),
        **{
            f"{gates}_gates": Table(
                [Entry("long", f"B=1 T=8192 H=32 {_WIDE}", forms=_FAST, peers=_PEERS)],
                phases=("train", "forward"),
                values=(gates,),
            )
            for gates in ("weak", "strong", "steep")
        },
        # "about 5 % slower", and slower the smaller the chunks: two claims of the incident report
        "chunks": Table(
            [Entry("incident", f"chunk_size={size}", forms=("naive", "streamed"), peers=()) for size in (32, 64, 128)],
            phases=("train", "forward"),
            values=("mild",),
            rounds=5,
        ),
    },
    forms={
        "cuda": Form(cuda_kda, has_kernels=True),
        "cuda_graphed": Form(graphed(cuda_kda), has_kernels=True),
    },
    values={
        "mild": mild,
        "weak": gates_down_to(-0.05),  # the state keeps its content over a hundred tokens
        "strong": gates_down_to(LEAST_GATE),
        "steep": gates_down_to(-20.0),  # decays cannot be referred to the middle of a chunk
    },
    gradient_of=(0,),
    error_at={"B": 1, "T": 256},
)
