"""The NPT layer and its conversion: the weight of every token, what is left untouched, and 8-bit base weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from npt_stand_ins import FFN_WIDTH, LAYERS, WIDTH, Conv1D, Decoder, GPT2Block, LlamaDecoderLayer, hidden_states
from torch import nn

from memfix.errors import UsageError
from memfix.incidents.npt_weight_delta import convert, int8_linear
from memfix.incidents.npt_weight_delta.int8_linear import Int8Linear, make_8bit
from memfix.incidents.npt_weight_delta.layer import FORMS, NptLinear
from memfix.meters import get_meter
from memfix.meters.base import Step

KINDS = pytest.mark.parametrize("block", [GPT2Block, LlamaDecoderLayer])


def projection(base: nn.Module) -> torch.Tensor:
    """``[D, F]``"""
    return base.weight.T if isinstance(base, nn.Linear) else base.weight  # type: ignore[union-attr, return-value]


def with_random_b(layer: NptLinear) -> NptLinear:
    nn.init.normal_(layer.b)
    return layer


# ---------------------------------------------------------------- the layer
@pytest.mark.parametrize("modulation", ["linear", "tanh"])
@pytest.mark.parametrize("form", ["auto", "token_chunks", "offload", "naive", "reported"])
@pytest.mark.parametrize("base", [lambda: nn.Linear(WIDTH, FFN_WIDTH), lambda: Conv1D(FFN_WIDTH, WIDTH)])
def test_the_weight_of_a_token_is_changed_by_its_attention(
    base: Callable[[], nn.Module], form: str, modulation: str
) -> None:
    """By the einsum of the report, with the gradient that A has through the modulation as well."""
    layer = with_random_b(NptLinear(base().double(), 3, modulation=modulation, form=form))
    hidden, attention = hidden_states(0).requires_grad_(), hidden_states(1).requires_grad_()
    wanted = [hidden, attention, layer.a, layer.b]
    layer.remember(layer, (), attention)
    ours = layer(hidden)
    m = attention @ layer.a if modulation == "linear" else 0.1 * torch.tanh(attention @ layer.a)
    delta = torch.einsum("bsr,dr,rf->bsdf", m, layer.a, layer.b)
    true = torch.einsum("bsd,bsdf->bsf", hidden, projection(layer.base) + delta) + layer.base.bias
    torch.testing.assert_close(ours, true)
    upstream = torch.randn_like(true)
    for got, expected in zip(*(torch.autograd.grad(out, wanted, upstream) for out in (ours, true)), strict=True):
        torch.testing.assert_close(got, expected)


def test_the_weight_is_not_copied() -> None:
    """A train step of a frozen base makes no tensor of its size."""
    made: list[int] = []

    def build(device: str) -> Step:
        layer = NptLinear(nn.Linear(512, 1024, bias=False, device=device).requires_grad_(False), 2)
        hidden = torch.empty(1, 4, 512, device=device, requires_grad=True)

        def step() -> None:
            layer.remember(layer, (), hidden)
            layer(hidden).sum().backward()

        return step

    timeline = get_meter("simulated").measure(build).timeline
    assert timeline is not None
    made.extend(buffer.bytes for buffer in timeline.buffers if buffer.born)
    assert made
    assert max(made) < 512 * 1024 * 4 / 16


def test_nothing_is_kept_when_the_feed_forward_has_run() -> None:
    layer = NptLinear(nn.Linear(WIDTH, FFN_WIDTH).double(), 2)
    layer.remember(layer, (), hidden_states())
    layer(hidden_states())
    with pytest.raises(RuntimeError, match="the feed-forward of this layer ran before its attention"):
        layer(hidden_states())


def test_a_tuple_is_as_good_as_its_first_tensor() -> None:
    layer = with_random_b(NptLinear(nn.Linear(WIDTH, FFN_WIDTH).double(), 2))
    results, weights = [], object()
    for output in (hidden_states(1), (hidden_states(1),), (hidden_states(1), weights)):
        passed_on = layer.remember(layer, (), output)
        assert type(passed_on) is type(output)
        assert not (passed_on[0] if isinstance(output, tuple) else passed_on).any()
        for hidden in (hidden_states(), (hidden_states(),), (hidden_states(), weights)):
            layer.remember(layer, (), output)
            results.append(layer(hidden))
    assert passed_on[1] is weights
    assert all(torch.equal(result, results[0]) for result in results)
    for hidden, error in (([hidden_states()], TypeError), ((), ValueError)):
        layer.remember(layer, (), hidden_states(1))
        with pytest.raises(error, match="hidden must be a tensor or a tuple that starts with one"):
            layer(hidden)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"rank": 0}, ValueError, "rank must be at least 1, got 0"),
        ({"rank": 2, "modulation": "relu"}, ValueError, "modulation must be one of linear, tanh, got 'relu'"),
        ({"rank": 2, "form": "facored"}, ValueError, "form must be one of .*got 'facored'"),
    ],
)
def test_a_layer_that_cannot_be(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        NptLinear(nn.Linear(WIDTH, FFN_WIDTH), **settings)


def test_a_projection_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must be an nn.Linear, or have a weight of \[D, F\].*got Embedding"):
        NptLinear(nn.Embedding(WIDTH, FFN_WIDTH), 2)


# ---------------------------------------------------------------- the conversion
@KINDS
@pytest.mark.parametrize("form", [form for form in FORMS if form != "triton"])
def test_a_converted_model_starts_as_the_original_where_attention_is_added(block: type[nn.Module], form: str) -> None:
    model = Decoder(block)
    before = model(hidden_states())
    convert(model, num_layers=2, rank=2, drops_attention=False, form=form)
    torch.testing.assert_close(model(hidden_states()), before)


@KINDS
def test_attention_acts_through_the_weight_alone(block: type[nn.Module]) -> None:
    """As published: the hidden states have no attention added, and the feed-forward sees them so."""
    model = Decoder(block)
    (layer,) = convert(model, num_layers=1, rank=2).layers
    with_random_b(layer)
    *_, last = model.blocks
    x = hidden_states()
    for block_before in model.blocks[:-1]:
        x = block_before(x)
    norms = [child for child in last.children() if isinstance(child, (nn.LayerNorm, nn.RMSNorm))]
    attention: Any = last.attn if block is GPT2Block else last.self_attn
    m = attention.forward(norms[0](x))[0] @ layer.a
    hidden = norms[1](x)
    first = hidden @ projection(layer.base) + ((hidden @ layer.a) * m) @ layer.b
    if block is GPT2Block:
        out = last.mlp.c_proj(F.gelu(first + layer.base.bias))  # type: ignore[operator, union-attr]
    else:
        out = last.mlp.down_proj(F.silu(first) * last.mlp.up_proj(hidden))  # type: ignore[operator, union-attr]
    torch.testing.assert_close(model(hidden_states()), x + out)


@KINDS
def test_unconverted_layers_are_untouched_and_a_conversion_is_undone(block: type[nn.Module]) -> None:
    model = Decoder(block)
    next(model.parameters()).requires_grad_(False)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    modules, before = dict(model.named_modules()), model(hidden_states())
    conversion = convert(model, num_layers=1, first_layer=1, rank=2)
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == [
        f"{model.name}.1.mlp.{'c_fc' if block is GPT2Block else 'gate_proj'}.{part}" for part in "ab"
    ]
    now = dict(model.named_modules())
    changed = {name for name in modules if now[name] is not modules[name]}
    assert changed == {f"{model.name}.1.mlp.{'c_fc' if block is GPT2Block else 'gate_proj'}"}
    assert not any(module._forward_hooks for name, module in now.items() if f"{model.name}.1." not in name)
    conversion.undo()
    assert dict(model.named_modules()) == modules
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert torch.equal(model(hidden_states()), before)
    with pytest.raises(UsageError, match="undone already"):
        conversion.undo()


def test_gradients_reach_a_and_b_of_every_converted_layer() -> None:
    model = Decoder(LlamaDecoderLayer)
    layers = convert(model, num_layers=LAYERS, rank=2).layers
    for layer in layers:
        with_random_b(layer)
    model(hidden_states()).sum().backward()
    assert all(part.grad is not None and part.grad.any() for layer in layers for part in (layer.a, layer.b))
    assert [parameter for parameter in model.parameters() if parameter.grad is not None] == [
        part for layer in layers for part in (layer.a, layer.b)
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"num_layers": 4}, "num_layers 4 from layer 0 on: the decoder has 3 layers"),
        ({"num_layers": 2, "first_layer": 2}, "num_layers 2 from layer 2 on: the decoder has 3 layers"),
        ({"num_layers": 2, "first_layer": -1}, "first_layer must be at least 0, got -1"),
        ({"num_layers": 1, "rank": 0}, "rank must be at least 1, got 0"),
    ],
)
def test_a_conversion_that_cannot_be_leaves_the_model_alone(settings: dict[str, Any], message: str) -> None:
    model = Decoder(GPT2Block)
    modules = dict(model.named_modules())
    with pytest.raises(ValueError, match=message):
        convert(model, **{"rank": 2, **settings})
    assert dict(model.named_modules()) == modules
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_layer_is_not_converted_twice() -> None:
    model = Decoder(GPT2Block)
    convert(model, num_layers=1, rank=2)
    with pytest.raises(UsageError, match="layer 2 was converted already: undo that conversion first"):
        convert(model, num_layers=2, rank=2)


def test_what_is_no_decoder_is_refused_with_what_was_looked_for() -> None:
    layers = nn.ModuleList(nn.TransformerDecoderLayer(4, 2) for _ in range(2))
    with pytest.raises(UsageError) as refused:
        convert(nn.Sequential(layers), num_layers=1, rank=2)
    assert str(refused.value) == (
        "no decoder layers in Sequential: looked for a ModuleList whose modules each have an attention "
        "(attention, self_attn, attn) and a feed-forward (ffn, mlp) with a first projection (gate, gate_proj, c_fc, up)"
    )


def tiny_transformers() -> list[Any]:
    transformers = pytest.importorskip("transformers")
    gpt2 = transformers.GPT2Config(n_layer=3, n_embd=8, n_head=2, vocab_size=20, resid_pdrop=0, attn_pdrop=0)
    llama = transformers.LlamaConfig(
        num_hidden_layers=3, hidden_size=8, intermediate_size=12, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=20,
    )  # fmt: skip
    return [transformers.GPT2LMHeadModel(gpt2), transformers.LlamaForCausalLM(llama)]


@pytest.mark.parametrize("number", [0, 1], ids=["gpt2", "llama"])
def test_models_of_transformers_are_converted_and_restored(number: int) -> None:
    model = tiny_transformers()[number].eval()
    ids = torch.arange(6).reshape(1, 6)
    before = model(ids).logits
    conversion = convert(model, num_layers=2, rank=2, drops_attention=False)
    torch.testing.assert_close(model(ids).logits, before)
    conversion.undo()
    conversion = convert(model, num_layers=2, rank=2)
    for layer in conversion.layers:
        with_random_b(layer)
    model.gradient_checkpointing_enable()
    model.train()
    model(ids, labels=ids).loss.backward()
    assert all(part.grad is not None and part.grad.any() for layer in conversion.layers for part in (layer.a, layer.b))
    conversion.undo()
    assert torch.equal(model.eval()(ids).logits, before)


# ---------------------------------------------------------------- 8-bit base weights
def linear_of(width: int, ffn_width: int, *, bias: bool = False) -> nn.Linear:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return nn.Linear(width, ffn_width, bias=bias)


@pytest.mark.parametrize(("width", "ffn_width"), [(1, 1), (7, 3), (16, 33)])
@pytest.mark.parametrize("rows_per_chunk", [1, 8, 1024])
def test_8_bits_are_off_by_at_most_half_a_step(
    width: int, ffn_width: int, rows_per_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8_linear, "ROWS_PER_CHUNK", rows_per_chunk)
    exact = linear_of(width, ffn_width, bias=True).double()
    exact.weight.data[0] = 0  # a row without a largest value
    ours = Int8Linear(exact)
    hidden = torch.randn(2, 5, width, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(2, 5, ffn_width, dtype=torch.float64)
    absmax = exact.weight.detach().abs().amax(1)
    rounding = 1 + 1e-6  # of the float32 scale
    bound = absmax / 254 * hidden.detach().abs().sum(-1, keepdim=True) * rounding
    assert ((ours(hidden) - exact(hidden)).abs() <= bound + 1e-12).all()
    gradients = [torch.autograd.grad(linear(hidden), hidden, upstream)[0] for linear in (ours, exact)]
    bound = (upstream.abs() * absmax).sum(-1, keepdim=True) / 254 * rounding
    assert ((gradients[0] - gradients[1]).abs() <= bound + 1e-12).all()
    assert ours.weight.nbytes + ours.scale.nbytes == width * ffn_width + 4 * ffn_width


def test_the_largest_of_a_row_is_exact_and_others_are_not() -> None:
    weight = torch.tensor([[2.0, -1.0, 0.01], [0.0, 0.0, 0.0]])
    linear = nn.Linear(3, 2, bias=False)
    linear.weight.data = weight
    ours = Int8Linear(linear)
    torch.testing.assert_close(ours(torch.eye(3)).T[:, 0], weight[:, 0])
    assert ours.weight.tolist() == [[127, -64, 1], [0, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_8_bits_take_any_dtype(dtype: torch.dtype) -> None:
    linear = linear_of(64, 48)
    hidden = torch.randn(3, 64).to(dtype).requires_grad_()
    out = Int8Linear(linear)(hidden)
    out.sum().backward()
    assert out.dtype == dtype
    assert hidden.grad is not None
    assert hidden.grad.dtype == dtype
    torch.testing.assert_close(out.float(), linear(hidden.float()), rtol=0.05, atol=0.05)


def test_a_pass_with_8_bits_makes_a_chunk_of_the_weight_at_a_time() -> None:
    """16-bit copies of 1024 rows, by way of float32, and the gradient summed in float32; nothing is kept."""
    width, ffn_width, tokens = 512, 8192, 16

    def build(device: str) -> Step:
        linear = Int8Linear(nn.Linear(width, ffn_width, bias=False, device=device))
        hidden = torch.empty(tokens, width, device=device, dtype=torch.float16, requires_grad=True)

        def step() -> None:
            linear(hidden).sum().backward()

        return step

    reading = get_meter("simulated").measure(build)
    chunk = 1024 * width * (2 + 4)
    activations = tokens * (ffn_width * 2 + width * (4 + 2))
    assert reading.peak_bytes <= chunk + activations + 1024


def test_every_linear_layer_of_the_layers_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_linear, "bitsandbytes_is_there", lambda: False)
    model = Decoder(LlamaDecoderLayer)
    convert(model, num_layers=1, rank=2, drops_attention=False)
    before = model(hidden_states())
    make_8bit(model.blocks)
    kinds = [type(module) for module in model.modules()]
    assert (kinds.count(Int8Linear), kinds.count(nn.Linear), kinds.count(NptLinear)) == (4 * LAYERS, 0, 1)
    torch.testing.assert_close(model(hidden_states()), before, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("form", ["auto", "offload"])
def test_an_8_bit_base_has_the_same_change_of_low_rank(form: str) -> None:
    layer = with_random_b(NptLinear(linear_of(WIDTH, FFN_WIDTH, bias=True).double(), 2, form=form))
    hidden, attention = hidden_states(0).requires_grad_(), hidden_states(1)
    results = []
    for base in (layer.base, Int8Linear(layer.base)):  # type: ignore[arg-type]
        layer.base = base
        layer.remember(layer, (), attention)
        change = layer(hidden) - base(hidden)
        results.append([change, *torch.autograd.grad(change.square().sum(), [hidden, layer.a, layer.b])])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


def test_bitsandbytes_is_taken_where_it_is_installed() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = Decoder(LlamaDecoderLayer).float()
    before = model(hidden_states().float())
    make_8bit(model.blocks)
    model.to("cpu")  # this is when it rounds
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(bitsandbytes.nn.Linear8bitLt) == 4 * LAYERS
    torch.testing.assert_close(model(hidden_states().float()), before, rtol=0.1, atol=0.1)
