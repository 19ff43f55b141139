"""The report's decoder: its size, its loss, and that saving memory changes nothing in what it computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from memfix.incidents.incident import load_config
from memfix.incidents.long_context_loss.incident import incident
from memfix.incidents.long_context_loss.model import ATTENTION_TYPES, Decoder, next_labels

VOCABULARY = 512


def tiny(attention_type: str = "nsa", *overrides: str, checkpointing: bool = False) -> Decoder:
    torch.manual_seed(0)
    own = (f"model.attention_type={attention_type}", f"training.gradient_checkpointing={checkpointing}")
    return Decoder(load_config(incident, "tiny", (*own, *overrides)))


def logits(model: Decoder, ids_BT: torch.Tensor) -> torch.Tensor:
    return model.head(model.hidden_states(ids_BT))


def tokens(batch: int = 2, length: int = 37) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def gradients(model: Decoder, ids_BT: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(ids_BT, ids_BT).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


# ---------------------------------------------------------------- size
@pytest.mark.parametrize(("attention_type", "count"), [("nsa", 3_921_918_720), ("dense", 3_915_962_880)])
def test_the_4b_model_has_the_reports_number_of_parameters(attention_type: str, count: int) -> None:
    with torch.device("meta"):
        model = Decoder(load_config(incident, "report", [f"model.attention_type={attention_type}"]))
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert not list(model.buffers())


def test_sparse_attention_adds_two_gates_a_head_and_one_table_a_layer() -> None:
    sparse, dense = (dict(tiny(kind).named_parameters()) for kind in ATTENTION_TYPES)
    added = {name: tuple(parameter.shape) for name, parameter in sparse.items() if name not in dense}
    heads, width, head_width, compress_block = 4, 64, 16, 8
    assert added == {
        f"layers.{layer}.attention.{name}": shape
        for layer in (0, 1)
        for name, shape in (
            ("gate_compressed.weight", (heads, width)),
            ("gate_selected.weight", (heads, width)),
            ("position_embedding", (compress_block, head_width)),
        )
    }
    assert not dense.keys() - sparse.keys()


# ---------------------------------------------------------------- what it computes
@pytest.mark.parametrize("attention_type", ATTENTION_TYPES)
def test_the_loss_is_that_of_the_next_labels(attention_type: str) -> None:
    model, ids_BT = tiny(attention_type), tokens()
    labels_BT = ids_BT.where(torch.rand(ids_BT.shape, generator=torch.Generator().manual_seed(2)) < 0.8, -100)
    predicted_BTV = logits(model, ids_BT)[:, :-1]
    wanted = F.cross_entropy(predicted_BTV.flatten(0, 1), labels_BT[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(model(ids_BT, labels_BT), wanted)


@pytest.mark.parametrize("rows_per_chunk", [1, 5, 36, 37, 100])
def test_no_prediction_is_lost_at_the_border_of_a_chunk(rows_per_chunk: int) -> None:
    ids_BT = tokens()
    model = tiny("dense", "model.loss_form=recompute", f"model.rows_per_chunk={rows_per_chunk}")
    torch.testing.assert_close(model(ids_BT, ids_BT), tiny("dense", "model.loss_form=standard")(ids_BT, ids_BT))


@pytest.mark.parametrize("rows_per_chunk", ["null", "5"])
@pytest.mark.parametrize("form", ["reported", "checkpoint"])
def test_every_form_gives_the_same_loss(form: str, rows_per_chunk: str) -> None:
    ids_BT = tokens()
    model = tiny("dense", f"model.loss_form={form}", f"model.rows_per_chunk={rows_per_chunk}")
    torch.testing.assert_close(model(ids_BT, ids_BT), tiny("dense", "model.loss_form=standard")(ids_BT, ids_BT))


def test_labels_are_shifted_within_each_sequence_and_the_last_position_predicts_nothing() -> None:
    labels_BT = torch.tensor([[1, 2, 3], [4, -100, 6]])
    assert next_labels(labels_BT).tolist() == [[2, 3, -100], [-100, 6, -100]]
    assert next_labels(torch.tensor([[7]])).tolist() == [[-100]]
    assert labels_BT.tolist() == [[1, 2, 3], [4, -100, 6]]


def test_a_label_more_is_what_the_last_position_predicts() -> None:
    model, ids_BT = tiny("dense"), tokens()
    predicted_BTV = logits(model, ids_BT[:, :-1])
    wanted = F.cross_entropy(predicted_BTV.flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(model(ids_BT[:, :-1], ids_BT), wanted)
    assert next_labels(torch.tensor([[1, 2, 3]]), 2).tolist() == [[2, 3]]


@pytest.mark.parametrize("attention_type", ATTENTION_TYPES)
def test_no_position_sees_the_future(attention_type: str) -> None:
    model, ids_BT = tiny(attention_type), tokens(batch=1, length=90)
    changed_BT = ids_BT.clone()
    changed_BT[:, 60:] = (changed_BT[:, 60:] + 1) % VOCABULARY
    before, after = logits(model, ids_BT), logits(model, changed_BT)
    torch.testing.assert_close(before[:, :60], after[:, :60])
    assert not torch.allclose(before[:, 60:], after[:, 60:])


@pytest.mark.parametrize("attention_type", ATTENTION_TYPES)
def test_checkpointing_gives_the_same_gradients_to_the_bit(attention_type: str) -> None:
    plain = gradients(tiny(attention_type), tokens())
    checkpointed = gradients(tiny(attention_type, checkpointing=True), tokens())
    assert len(plain) == len(list(tiny(attention_type).parameters()))
    assert all(torch.equal(one, other) for one, other in zip(plain, checkpointed, strict=True))


@pytest.mark.parametrize("attention_type", ATTENTION_TYPES)
def test_float32_parameters_train_under_autocast(attention_type: str) -> None:
    model = tiny(attention_type, checkpointing=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens(), tokens())
    loss.backward()
    torch.testing.assert_close(loss.float(), tiny(attention_type)(tokens(), tokens()), rtol=0.02, atol=0.02)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_a_sequence_of_one_token_has_logits_and_no_loss() -> None:
    model = tiny()
    assert logits(model, tokens(1, 1)).shape == (1, 1, VOCABULARY)
    assert model(tokens(1, 1), tokens(1, 1)) == 0
