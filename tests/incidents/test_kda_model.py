"""The KDA block and the model around it: what goes into the op, what is refused, and that no form changes an answer."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from kda_runs import SHRUNKEN, shrunken

from memfix.incidents.incident import find_config, load_config
from memfix.incidents.kda_transitions import block as blocks
from memfix.incidents.kda_transitions.block import SCAN_FORMS, KDABlock, validated_chunk_size
from memfix.incidents.kda_transitions.incident import incident
from memfix.incidents.kda_transitions.model import KDAModel, ModelConfig
from memfix.ops.kda import kda

ON_CPU = [form for form in SCAN_FORMS if form != "triton"]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[torch.Tensor, ...], dict[str, Any]]]:
    """Every call of the op: tensors and options."""
    calls: list[tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = []

    def spy(*tensors: torch.Tensor, **options: Any) -> Any:
        calls.append((tensors, options))
        return kda(*tensors, **options)

    monkeypatch.setattr(blocks, "kda", spy)
    return calls


def a_block(**options: Any) -> KDABlock:
    torch.manual_seed(0)
    return KDABlock(12, 2, 4, **options)


def hidden(tokens: int = 9) -> torch.Tensor:
    return torch.randn(2, tokens, 12, generator=torch.Generator().manual_seed(1))


# ---------------------------------------------------------------- the chunk, from YAML to the op
def test_a_value_of_the_file_arrives_at_the_op(seen: Any, tmp_path: Path) -> None:
    text = find_config(incident, Path("hn_xs.yaml")).read_text()
    path = tmp_path / "run.yaml"
    path.write_text(text.replace("kda_memory_chunk_size: 64", "kda_memory_chunk_size: 17"))
    config = load_config(incident, path, SHRUNKEN)
    with pytest.warns(UserWarning, match="memory_chunk_size 17"):
        model = KDAModel(config)
    ids_BT = torch.zeros(1, 20, dtype=torch.int64)
    model(ids_BT, ids_BT)
    assert [options["chunk_size"] for _, options in seen] == [17, 17]


def test_the_reported_form_gets_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    real, sizes = blocks.contract.function("reported"), []

    def spy(*tensors: torch.Tensor, chunk_size: int) -> Any:
        sizes.append(chunk_size)
        return real(*tensors, chunk_size=chunk_size)

    monkeypatch.setattr(type(blocks.contract), "function", lambda self, form: spy)
    a_block(memory_chunk_size=33, form="reported")(hidden())
    assert sizes == [33]


def test_the_default_is_64_at_every_level(seen: Any) -> None:
    assert inspect.signature(KDABlock).parameters["memory_chunk_size"].default == 64
    assert inspect.signature(ModelConfig).parameters["kda_memory_chunk_size"].default == 64
    a_block()(hidden())
    assert [options["chunk_size"] for _, options in seen] == [64]


@pytest.mark.parametrize("size", [32, 64, 100, 128])
def test_recommended_sizes_are_silent(size: int) -> None:
    with warnings.catch_warnings(action="error"):
        assert validated_chunk_size(size) == size
        a_block(memory_chunk_size=size)


@pytest.mark.parametrize("size", [1, 16, 31, 129, 4096])
def test_other_sizes_work_and_warn(size: int) -> None:
    with pytest.warns(UserWarning, match=f"memory_chunk_size {size} is outside the recommended 32 to 128") as said:
        block = a_block(memory_chunk_size=size)
    assert said[0].filename == __file__  # the caller's line, not ours
    torch.testing.assert_close(block(hidden()), a_block()(hidden()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "error", "message"),
    [
        (0, ValueError, "memory_chunk_size must be at least 1, got 0"),
        (-64, ValueError, "memory_chunk_size must be at least 1, got -64"),
        (64.0, TypeError, "memory_chunk_size must be an int, got 64.0"),
        ("64", TypeError, "memory_chunk_size must be an int, got '64'"),
        (True, TypeError, "memory_chunk_size must be an int, got True"),
    ],
)
def test_what_is_no_number_of_tokens_is_refused(size: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as refused:
        a_block(memory_chunk_size=size)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kda_mode": "parallel"}, "kda_mode must be one of scan, sequential, got 'parallel'"),
        (
            {"form": "dense"},
            "form must be one of auto, naive, reported, streamed, wy, triton, got 'dense'",
        ),
    ],
)
def test_modes_and_forms_that_do_not_exist_are_refused_by_name(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match="must be one of") as refused:
        a_block(**options)
    assert str(refused.value) == message


# ---------------------------------------------------------------- what goes into the op
def test_keys_have_length_1_decays_are_at_most_1_and_beta_is_a_share(seen: Any) -> None:
    a_block(value_width=3)(10 * hidden())
    ((q, k, v, g, beta), _) = seen[0]
    for unit in (q, k):
        torch.testing.assert_close(unit.norm(dim=-1), torch.ones(2, 9, 2))
    assert (v.shape, g.shape, beta.shape) == ((2, 9, 2, 3), (2, 9, 2, 4), (2, 9, 2))
    assert (g < 0).all()
    assert ((beta > 0) & (beta < 1)).all()


def test_first_decays_are_spread_from_slow_to_fast(seen: Any) -> None:
    a_block()(torch.zeros(1, 1, 12))
    g_HK = seen[0][0][3][0, 0]
    torch.testing.assert_close(g_HK[0], -torch.tensor([1e-3, 10**-2.333333, 10**-1.666667, 1e-1]), rtol=1e-4, atol=0)
    torch.testing.assert_close(g_HK[1], 16 * g_HK[0], rtol=1e-4, atol=0)


def test_the_log_of_the_decay_stays_in_float32(seen: Any) -> None:
    a_block().bfloat16()(hidden().bfloat16())
    q, *_, g, beta = seen[0][0]
    assert (q.dtype, g.dtype, beta.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)


def test_what_is_far_ahead_changes_nothing_before_it() -> None:
    x, block = hidden(), a_block()
    changed = x.clone()
    changed[:, 6:] += 1
    torch.testing.assert_close(block(x)[:, :6], block(changed)[:, :6])
    assert not torch.allclose(block(x)[:, 6:], block(changed)[:, 6:])


# ---------------------------------------------------------------- no setting changes an answer
def gradients(model: KDAModel) -> list[torch.Tensor]:
    ids_BT = torch.arange(80).reshape(2, 40) * 7 % 64
    loss = model(ids_BT, ids_BT.roll(-1))
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def built(*overrides: str) -> KDAModel:
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):
        return KDAModel(shrunken(*overrides)).double()


@pytest.mark.parametrize("form", ON_CPU)
@pytest.mark.parametrize("size", [7, 64])
def test_forms_and_chunks_share_parameters_and_gradients(form: str, size: int) -> None:
    plain = built("model.kda_mode=sequential", "model.value_width=5")
    other = built(f"model.kda_form={form}", f"model.kda_memory_chunk_size={size}", "model.value_width=5")
    shapes = [{name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} for model in (plain, other)]
    assert shapes[0] == shapes[1]
    for one, expected in zip(gradients(other), gradients(plain), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("form", ON_CPU)
def test_checkpointing_changes_nothing(form: str) -> None:
    asked = f"model.kda_form={form}"
    for one, expected in zip(
        gradients(built(asked, "training.gradient_checkpointing=true")), gradients(built(asked)), strict=True
    ):
        assert torch.equal(one, expected)


def test_every_parameter_has_a_gradient() -> None:
    names = [name for name, _ in built().named_parameters()]
    idle = [name for name, gradient in zip(names, gradients(built())[1:], strict=True) if not gradient.any()]
    assert idle == []
