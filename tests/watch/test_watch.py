"""``memfix.watch``: peaks by stage and step, the prediction beside them, and what it says after a failure."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import traceback

import pytest
import torch
from fake_gpu import NAME, FakeGpu

import memfix
from memfix.errors import MeterUnavailable, UsageError
from memfix.meters.base import Reading, Step
from memfix.meters.stages import Stage, stage
from memfix.pictures import save
from memfix.watch import Highest

MiB = 1 << 20


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = FakeGpu()
    gpu.install(monkeypatch)
    return gpu


class Model:
    """Weights, activations that are kept for backward, gradients, and optimizer states from the first step on."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.weights = gpu.take(10 * MiB)
        self.states: list[int] = []
        self.kept: list[int] = []
        self.gradients: list[int] = []

    def forward(self, layers: int) -> None:
        for _ in range(layers):
            self.kept.append(self.gpu.take(4 * MiB))

    def backward(self) -> None:
        self.gradients.append(self.gpu.in_backward(lambda: self.gpu.take(10 * MiB)))
        self.gpu.in_backward(lambda: self.gpu.drop(*self.kept))
        self.kept.clear()

    def step(self) -> None:
        if not self.states:
            self.states = [self.gpu.take(20 * MiB)]
        self.gpu.drop(self.gpu.take(5 * MiB), *self.gradients)
        self.gradients.clear()


def train(watch: memfix.Watch, model: Model, layers: list[int]) -> None:
    for number in layers:
        with watch.stage("forward"):
            model.forward(number)
        with watch.stage("backward"):
            model.backward()
        with watch.stage("optimizer"):
            model.step()
        watch.step()


def peaks(report: memfix.WatchReport) -> list[tuple[str, int, int]]:
    return [(one.name, one.peak_bytes // MiB, one.step) for one in report.peaks]


# ---------------------------------------------------------------- peaks
def test_each_stage_has_its_highest_peak_and_the_step_that_reached_it(gpu: FakeGpu) -> None:
    model = Model(gpu)
    with memfix.watch() as watch:
        train(watch, model, [2, 3, 1])
    report = watch.report()
    assert report.num_steps == 3
    assert peaks(report) == [
        ("forward", 10 + 20 + 12, 2),
        ("backward", 10 + 20 + 12 + 10, 2),
        ("optimizer", 10 + 20 + 10 + 5, 1),
        ("whole step", 52, 2),
    ]
    assert report.peak_bytes == 52 * MiB
    assert str(report).startswith(f"memfix watch: 3 steps on {NAME}, peak 52.00 MiB\n")


def test_the_largest_step_is_a_reading_with_lines_and_a_timeline(gpu: FakeGpu, tmp_path) -> None:
    model = Model(gpu)
    with memfix.watch() as watch:
        train(watch, model, [1, 4, 1])
    report = watch.report()
    reading = report.reading
    assert reading is not None
    assert (report.read_step, reading.base_bytes, reading.peak_bytes) == (2, 30 * MiB, 26 * MiB)
    assert (reading.meter, reading.held_bytes, reading.allocated_bytes) == ("cuda", 0, 26 * MiB)
    kept, gradient = reading.alive_at_peak
    assert (kept.bytes, kept.what, kept.count) == (16 * MiB, "tensor, kept for backward", 4)
    assert kept.place.endswith("in forward")
    assert kept.code == "self.kept.append(self.gpu.take(4 * MiB))"
    assert (gradient.bytes, gradient.what, gradient.place) == (10 * MiB, "made in backward", "")
    assert reading.notes == ()
    assert reading.timeline is not None
    assert [name for _, _, name in reading.timeline.stage_spans()] == ["forward", "backward", "optimizer"]
    save(reading.timeline, tmp_path / "step.html", "the largest step")
    assert "each of 4 passes keeps its tensor for backward" in str(report)


def test_a_second_step_is_read_although_the_first_was_as_high(gpu: FakeGpu) -> None:
    model = Model(gpu)
    with memfix.watch() as watch:
        train(watch, model, [0, 0, 0])
    assert watch.report().read_step == 2


def test_a_snapshot_is_taken_only_for_a_step_that_is_clearly_higher(gpu: FakeGpu) -> None:
    gpu.take(1000 * MiB)
    with memfix.watch() as watch:
        for _ in range(50):
            gpu.take(MiB // 2)
            watch.step()
    # one of what existed before, the first two steps, and then wherever 1 % was added: at steps 23 and 44
    assert gpu.snapshots == 1 + 2 + 2
    assert watch.report().read_step == 44


def test_without_lines_no_history_is_recorded(gpu: FakeGpu) -> None:
    model = Model(gpu)
    with memfix.watch(lines=False) as watch:
        assert gpu.recording is None
        train(watch, model, [1, 2])
    report = watch.report()
    assert (gpu.snapshots, report.peak_bytes) == (0, 48 * MiB)
    assert report.reading is not None
    assert (report.reading.timeline, report.reading.alive_at_peak) == (None, ())
    assert report.reading.stages[0] == Stage("forward", 30 * MiB, 38 * MiB, 38 * MiB)


def test_a_block_without_steps_is_one_step(gpu: FakeGpu) -> None:
    with memfix.watch() as watch:
        gpu.drop(gpu.take(3 * MiB))
    assert peaks(watch.report()) == [("whole step", 3, 1)]


def test_what_happens_after_the_last_step_is_told_only_if_it_is_higher(gpu: FakeGpu) -> None:
    with memfix.watch() as watch:
        gpu.drop(gpu.take(3 * MiB))
        watch.step()
        gpu.drop(gpu.take(2 * MiB))
    assert peaks(watch.report()) == [("whole step", 3, 1)]
    with memfix.watch() as watch:
        watch.step()
        gpu.drop(gpu.take(4 * MiB))
    assert peaks(watch.report()) == [("whole step", 0, 1), ("after the last step", 4, 1)]


def test_steps_of_another_kind_do_not_mix_with_training_steps(gpu: FakeGpu) -> None:
    with memfix.watch() as watch:
        for _ in range(2):
            gpu.drop(gpu.take(2 * MiB))
            watch.step()
        with watch.stage("validation"):
            gpu.drop(gpu.take(9 * MiB))
        watch.step("validation")
    report = watch.report()
    assert peaks(report) == [("whole step", 2, 1), ("validation: validation", 9, 1), ("validation", 9, 1)]
    assert report.reading is not None
    assert (report.num_steps, report.reading.peak_bytes) == (2, 2 * MiB)


def test_an_inner_stage_interrupts_the_outer_one_and_marks_of_the_model_count(gpu: FakeGpu) -> None:
    with memfix.watch() as watch:
        with watch.stage("forward"):
            first = gpu.take(MiB)
            with watch.stage("loss"):
                gpu.drop(gpu.take(5 * MiB))
            gpu.drop(first, gpu.take(MiB))
        stage("metrics")
        gpu.drop(gpu.take(7 * MiB))
        stage(None)
        watch.step()
    assert peaks(watch.report()) == [("forward", 2, 1), ("loss", 6, 1), ("metrics", 7, 1), ("whole step", 7, 1)]


def test_memory_that_grows_from_step_to_step_is_told(gpu: FakeGpu) -> None:
    base = gpu.take(100 * MiB)
    with memfix.watch() as watch:
        for _ in range(4):
            gpu.take(MiB)
            watch.step()
    assert "live memory before a step grew from 101.00 MiB (step 2) to 103.00 MiB (step 4)" in str(watch.report())
    gpu.drop(base)


def test_a_history_that_is_too_short_is_told(gpu: FakeGpu) -> None:
    with memfix.watch(max_entries=2) as watch:
        gpu.drop(gpu.take(9 * MiB))
        gpu.drop(gpu.take(MiB))
        watch.step()
    report = watch.report()
    assert report.peak_bytes == 9 * MiB
    assert "note: the allocator's history of 2 entries does not hold the peak" in str(report)


# ---------------------------------------------------------------- the prediction
def predicted(peak: int, base: int, stages: tuple[Stage, ...] = (), exact: bool = True) -> Reading:
    return Reading("simulated", "H200", peak * MiB, base * MiB, 0, 0, peak * MiB, stages=stages, exact=exact)


def test_the_prediction_stands_beside_the_whole_step_and_its_stages(gpu: FakeGpu) -> None:
    said = predicted(20, 30, (Stage("forward", 30 * MiB, 38 * MiB, 40 * MiB), Stage("other", 0, 0, 0)), exact=False)
    model = Model(gpu)
    with memfix.watch(predicted=said) as watch:
        train(watch, model, [1, 2])
    report = watch.report()
    assert report.difference_bytes() == -2 * MiB
    assert str(report).splitlines()[1:8] == [
        "                      peak  at step     predicted    difference",
        "  forward        38.00 MiB        2     40.00 MiB     -2.00 MiB",
        "  backward       48.00 MiB        2",
        "  optimizer      45.00 MiB        1",
        "  whole step     48.00 MiB        2     50.00 MiB     -2.00 MiB",
        "step 2 took 18.00 MiB above 30.00 MiB that were live before it",
        "predicted: 20.00 MiB above 30.00 MiB, an estimate; difference of the step itself -2.00 MiB",
    ]


def test_a_report_is_plain_data(gpu: FakeGpu) -> None:
    model = Model(gpu)
    with memfix.watch(predicted=predicted(20, 30)) as watch:
        train(watch, model, [1, 2])
    data = json.loads(json.dumps(watch.report().as_dict()))
    assert data["peaks"][0] == {"kind": "step", "stage": "forward", "peak_bytes": 38 * MiB, "step": 2}
    assert (data["peak_bytes"], data["difference_bytes"], data["failure"]) == (48 * MiB, -2 * MiB, None)
    assert Reading.from_dict(data["reading"]).peak_bytes == 18 * MiB


# ---------------------------------------------------------------- failures
def run_out_of_memory(gpu: FakeGpu, watch: memfix.Watch) -> None:
    model = Model(gpu)
    gpu.capacity = 62 * MiB
    train(watch, model, [1, 2])
    with watch.stage("forward"):
        model.forward(6)
    with watch.stage("backward"):
        model.backward()


def test_an_out_of_memory_error_says_what_was_alive_and_which_line_asked(gpu: FakeGpu) -> None:
    before = gpu.take(2 * MiB)
    with pytest.raises(torch.OutOfMemoryError) as caught, memfix.watch() as watch:
        run_out_of_memory(gpu, watch)
    told = "".join(traceback.format_exception(caught.value))
    lines = [line.strip() for line in "".join(caught.value.__notes__).splitlines()]
    assert lines[0] == (
        "memfix: out of memory in step 3, stage backward: 10.00 MiB could not be allocated: 56.00 MiB of 62.00 MiB "
        "were live, 6.00 MiB free on the GPU"
    )
    assert lines[1].startswith("requested by ")
    assert "in backward   self.gradients.append(self.gpu.in_backward(" in lines[1]
    assert lines[2] == "alive then, largest first"
    sizes = [line.split("  ")[0] for line in lines[3:7]]
    assert sizes == ["24.00 MiB", "20.00 MiB", "10.00 MiB", "2.00 MiB"]
    assert "tensor, kept for backward" in lines[3]
    assert "(6 x 4.00 MiB)" in lines[3]
    assert lines[6] == "2.00 MiB  existed before the watch"
    assert lines[7].startswith("likely cause: each of 6 passes keeps its tensor for backward")
    assert lines[0] in told
    assert ("failed step: forward", 56, 3) in peaks(watch.report())
    failure = watch.report().failure
    assert failure is not None
    assert failure.timeline is not None
    assert failure.timeline.live_bytes[-1] == 56 * MiB
    assert json.loads(json.dumps(watch.report().as_dict()))["failure"]["live_bytes"] == 56 * MiB
    gpu.drop(before)


def test_a_failure_names_the_rank_where_there_are_several(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, answer in (("is_initialized", True), ("get_world_size", 4), ("get_rank", 3)):
        monkeypatch.setattr(torch.distributed, name, lambda answer=answer: answer)
    gpu.capacity = 0
    with pytest.raises(torch.OutOfMemoryError), memfix.watch() as watch:
        gpu.take(1)
    assert watch.report().failed_in == "step 1, rank 3"


def test_a_failure_that_the_program_survives_is_a_note(gpu: FakeGpu) -> None:
    heard: list[str] = []
    gpu.capacity = 4 * MiB
    with memfix.watch(on_failure=lambda report: heard.append(report.lines()[0])) as watch:
        with pytest.raises(torch.OutOfMemoryError):
            gpu.take(5 * MiB)
        gpu.drop(gpu.take(2 * MiB))
        watch.step()
    assert heard == ["memfix: out of memory in step 1: 5.00 MiB could not be allocated: 0 B of 4.00 MiB were live, "
                     "4.00 MiB free on the GPU"]  # fmt: skip
    assert watch.report().failure is None
    assert str(watch.report()).splitlines()[-1] == "note: an allocation failed in step 1 and the program went on"


def test_a_listener_that_fails_does_not_replace_the_error_of_torch(gpu: FakeGpu) -> None:
    def fails(report: memfix.WatchReport) -> None:
        raise KeyError("planted")

    gpu.capacity = MiB
    with pytest.raises(torch.OutOfMemoryError), memfix.watch(on_failure=fails) as watch:
        gpu.take(5 * MiB)
    assert "note: the failed allocation in step 1 could not be explained: KeyError('planted')" in str(watch.report())


def test_another_error_passes_without_a_note(gpu: FakeGpu) -> None:
    with pytest.raises(KeyError) as caught, memfix.watch():
        raise KeyError("theirs")
    assert not hasattr(caught.value, "__notes__")


# ---------------------------------------------------------------- beginning and end
@pytest.mark.parametrize("error", [None, KeyError("theirs"), torch.OutOfMemoryError("planted")])
def test_everything_is_as_before_afterwards(gpu: FakeGpu, error: Exception | None) -> None:
    with contextlib.suppress(KeyError, torch.OutOfMemoryError), memfix.watch() as watch:
        assert gpu.recording == {"context": "alloc", "stacks": "python", "max_entries": 100_000}
        watch.enter_stage("open")
        if error is not None:
            raise error
    assert gpu.recording is None
    stage("unheard")
    watch.enter_stage("unheard")
    watch.step()
    assert [one.stage for one in watch.report().peaks if one.stage == "unheard"] == []
    with memfix.watch():
        pass


def test_one_observer_serves_all_watches(gpu: FakeGpu) -> None:
    for _ in range(3):
        with memfix.watch():
            pass
    assert len(gpu.observers) == 1
    gpu.capacity = 0
    with pytest.raises(torch.OutOfMemoryError):
        gpu.take(1)


def test_a_watch_inside_a_watch_is_refused(gpu: FakeGpu) -> None:
    with memfix.watch(), pytest.raises(UsageError, match=r"memfix.watch is running already; end it first"):
        memfix.watch().__enter__()
    with memfix.watch(), memfix.watch(enabled=False) as inner:
        pass
    assert str(inner.report()) == "memfix watch: nothing was measured: enabled=False"


def test_a_history_that_the_program_records_itself_is_left_alone(gpu: FakeGpu) -> None:
    torch.cuda.memory._record_memory_history("all", max_entries=7)
    with pytest.raises(UsageError, match=r"end that by torch.cuda.memory._record_memory_history\(None\)"):
        memfix.watch().__enter__()
    assert gpu.recording == {"max_entries": 7}
    with memfix.watch(lines=False):
        pass
    assert gpu.recording == {"max_entries": 7}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a GPU")
def test_without_a_gpu_it_does_nothing_and_says_so_or_refuses() -> None:
    with pytest.warns(UserWarning, match=r"memfix\.watch does nothing here: torch sees no GPU"):
        watch = memfix.watch().__enter__()
    with watch.stage("forward"):
        pass
    watch.step()
    watch.__exit__(None, None, None)
    assert str(watch.report()) == "memfix watch: nothing was measured: torch sees no GPU"
    with pytest.raises(MeterUnavailable, match=r"memfix\.watch cannot measure: torch sees no GPU; enabled='auto' "):
        memfix.watch(enabled=True).__enter__()


@pytest.mark.filterwarnings("ignore:memfix.watch does nothing here. the GPU is simulated")
def test_a_step_with_a_watch_can_be_predicted_with_its_stages() -> None:
    def build(device: str) -> Step:
        x = torch.ones(1000, device=device)

        def step() -> None:
            with memfix.watch() as watch:
                with watch.stage("forward"):
                    y = x.exp()
                with watch.stage("again"):
                    y = y.exp()
                watch.step()

        return step

    reading = memfix.peak(build)
    assert (reading.peak_bytes, reading.exact) == (8000, True)
    assert [(one.name, one.peak_bytes) for one in reading.stages] == [("forward", 8000), ("again", 12000)]


def test_arguments_are_checked_where_they_are_given() -> None:
    with pytest.raises(UsageError, match=r"enabled must be True, False or 'auto', got 'yes'"):
        memfix.watch(enabled="yes")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"predicted must be a Reading, such as memfix.peak returns; got 5"):
        memfix.watch(predicted=5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="max_entries must be at least 1, got 0"):
        memfix.watch(max_entries=0)


def test_the_name_memfix_watch_costs_no_import_of_torch_and_of_no_trainer() -> None:
    code = (
        "import sys, memfix; memfix.watch, memfix.Watch; print({'torch', 'transformers', 'lightning'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_peak_is_plain_data() -> None:
    assert Highest("validation", "loss", 1, 2).name == "validation: loss"
