"""The benchmark of the simulated meter: its decoder is a train step that is known exactly."""

from __future__ import annotations

import memfix
from benchmarks.oracle import decoder_step, small_step


def test_a_decoders_train_step_is_predicted_the_same_twice() -> None:
    first, second = memfix.peak(small_step), memfix.peak(small_step)
    assert (first.peak_bytes, first.alive_at_peak) == (second.peak_bytes, second.alive_at_peak)
    assert first.notes == ()


def test_twice_the_layers_add_their_weights_to_the_base() -> None:
    def base_bytes(layers: int) -> int:
        shape = {"width": 64, "heads": 2, "kv_heads": 1, "head": 32, "hidden": 96, "vocabulary": 100, "tokens": 128}
        return memfix.peak(lambda device: decoder_step(device, layers=layers, **shape)).base_bytes

    weights = 2 * 64 + (2 + 2) * 32 * 64 + 64 * 64 + 2 * 96 * 64 + 96 * 64
    per_layer = weights * 2 * 4  # weight, gradient and two moments, in bfloat16
    assert base_bytes(4) - base_bytes(2) == 2 * per_layer
