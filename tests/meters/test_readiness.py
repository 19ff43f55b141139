"""A GPU is timed only where nobody else uses it and nothing holds its clocks down."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from memfix.cli.ready import ready
from memfix.errors import MemfixError, MeterUnavailable
from memfix.meters import readiness
from memfix.units import GiB

IDLE = 0x1
POWER_CAP, HOT = 0x4, 0x20


class FakeNvml(SimpleNamespace):
    """One GPU as NVML shows it; ``now`` is what changes."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, **now: Any) -> None:
        super().__init__(**{"busy": 0, "used": GiB // 2, "reasons": IDLE, "pids": [], **now})
        self.samples = 0

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetHandleByIndex": 0,
            "nvmlDeviceGetName": "NVIDIA Fake",
            "nvmlSystemGetDriverVersion": "1.2.3",
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=self.busy),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=self.used),
            "nvmlDeviceGetCurrentClocksEventReasons": self.reasons,
            "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=pid) for pid in self.pids],
            "nvmlDeviceGetClockInfo": 345,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetTemperature": 30,
            "nvmlDeviceGetPowerUsage": 75_000,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        }
        return lambda *arguments: answers[name]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "SAMPLE_PERIOD_S", 0.0)


def shown(monkeypatch: pytest.MonkeyPatch, **now: Any) -> readiness.Readiness:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(**now))
    return readiness.read()


def test_an_idle_gpu_is_ready_and_its_clocks_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = shown(monkeypatch)
    assert reading.is_ready
    assert (reading.sm_clock_mhz, reading.max_sm_clock_mhz, reading.power_limit_w) == (345, 1980, 700.0)
    assert reading.throttle_reasons == ("idle",)
    assert reading.line().startswith("NVIDIA Fake, driver 1.2.3: ready (SM 345 of 1980 MHz")


@pytest.mark.parametrize(
    ("now", "trouble"),
    [
        ({"pids": [123, 45]}, "used by process 45, 123"),
        ({"busy": 40}, "busy 40 % of the time"),
        ({"used": 9 * GiB}, "9.00 GiB are in use by processes that are not shown here"),
        ({"reasons": IDLE | POWER_CAP | HOT}, "clocks are held down by power cap, temperature"),
    ],
)
def test_what_would_spoil_a_time_is_named(monkeypatch: pytest.MonkeyPatch, now: dict[str, Any], trouble: str) -> None:
    reading = shown(monkeypatch, **now)
    assert reading.troubles == (trouble,)
    assert f"not ready: {trouble}" in reading.line()


def test_a_busy_gpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml(busy=40)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    read, seen = readiness.read, []

    def read_and_end() -> readiness.Readiness:
        seen.append(read())
        fake.busy = 0  # the other has ended
        return seen[-1]

    monkeypatch.setattr(readiness, "read", read_and_end)
    assert readiness.ready_within(60).is_ready
    assert [reading.is_ready for reading in seen] == [False, True]


def test_the_command_ends_with_2_and_keeps_what_was_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(busy=40))
    result = CliRunner().invoke(ready, ["--json", str(tmp_path / "seen.json")])
    assert isinstance(result.exception, MemfixError)
    assert result.exception.exit_code == 2
    assert "a time taken now is not this code's own" in str(result.exception)
    assert json.loads((tmp_path / "seen.json").read_text())["utilization_percent"] == 40


def test_no_gpu_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(MeterUnavailable, match="no GPU to be timed: NVML does not answer"):
        readiness.read()
