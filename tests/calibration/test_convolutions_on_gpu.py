"""Convolutions on a GPU: cuDNN takes what the table says."""

from __future__ import annotations

import random

import pytest
import torch

from memfix.calibration.convolutions import known_convolutions, workspaces
from memfix.calibration.run import this_gpu
from memfix.meters.simulated.gpus import H200
from memfix.meters.simulated.tables import table_of

NUM_CHOSEN = 100


@pytest.mark.gpu(use="meters")
def test_a_known_convolution_takes_what_the_table_says() -> None:
    table = table_of(H200)
    assert table is not None
    if this_gpu() != H200 or str(torch.backends.cudnn.version()) != table.surroundings["cudnn"]:
        pytest.skip(f"the table is of an H200 with cuDNN {table.surroundings['cudnn']}")
    chosen = random.Random(0).sample(known_convolutions(), NUM_CHOSEN)
    assert workspaces(chosen, lambda _: None) == {each.spelled: table.convolutions[each.spelled] for each in chosen}
