"""The checks of the claims of this report, one file per subject, and the evidence that they share."""

# B batch, T tokens, L layers, D width, V vocabulary

from __future__ import annotations

from ... import evidence
from ...decoder_parts import num_parameters
from ...profile import PARAMETERS
from ..model import Pythia

ORIGINAL_WORDS = 50_000  # in the vocabulary before the fix, by the report
DENSE = "model.use_sparse_attention=false"  # as the report's breakdown counts; its command trains with sparse attention
ORIGINAL = (f"model.vocab_size={ORIGINAL_WORDS}", DENSE)

# overrides for a tiny model with few words, which trains on a CPU in seconds
SHRUNKEN = (
    "model.vocab_size=60", "model.layers=2", "model.width=16", "model.heads=2", "model.max_positions=12",
    "model.window=4", "model.dropout=0", "data.context_length=12", "data.types=200", "data.tokens=5000",
    "training.batch_size=4", "training.device=cpu",
)  # fmt: skip


class Evidence(evidence.Evidence):
    incident_name = "pythia_vocabulary"

    @property
    def dims(self) -> dict[str, int]:
        """B batch, T tokens, L layers, D width, V vocabulary, e item size, all of the report's run."""
        config = self.config()
        model = config.model
        return {
            "B": config.batch_size, "T": config.data.context_length, "L": model.layers, "D": model.width,
            "V": model.vocab_size, "e": 4,
        }  # fmt: skip

    def parameters(self, words: int = 10_000) -> int:
        """The number of parameters, counted over the model's tensors."""
        return num_parameters(self.model(f"model.vocab_size={words}"))

    def kept_for_backward(self, *overrides: str) -> int:
        """The bytes that a forward keeps for backward, the log-probabilities included."""
        rows = self.rows(*overrides)
        return rows[Pythia.loss_stage].stage.end_bytes - rows[PARAMETERS].stage.end_bytes

    def alive_at_peak(self, stage: str, *overrides: str) -> list[int]:
        """The sizes of all tensors that are alive at the peak of a stage."""
        timeline = self.profile(*overrides).reading.timeline
        assert timeline is not None
        ((start, end),) = ((start, end) for start, end, name in timeline.stage_spans() if name == stage)
        event = max(range(start, end), key=timeline.live_bytes.__getitem__)
        return [buffer.bytes for buffer in timeline.alive_at(event)]
