"""Timelines made by hand, for looking at and for testing."""

from __future__ import annotations

import random
from pathlib import Path

from memfix.meters.timeline import Buffer, Line, Timeline

MiB = 1 << 20
GiB = 1 << 30

SOURCE = """\
def block(x_BTD, w_up, w_down):
    h_BTF = x_BTD @ w_up
    a_BTF = torch.nn.functional.gelu(h_BTF)
    return x_BTD + a_BTF @ w_down

def attention(x_BTD):
    q, k, v = project(x_BTD).chunk(3, dim=-1)
    return scaled_dot_product_attention(q, k, v, is_causal=True)

def loss(hidden_TD, weight_VD, target_T):
    logits_CV = hidden_CD @ weight_VD.T
    total = total + F.cross_entropy(logits_CV.float(), target_C, reduction="sum")

def train_step(model, optimizer):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
"""


class Story:
    """Tells a step one birth and one death at a time."""

    def __init__(self) -> None:
        self.born: list[tuple[int, str, Line | None, str, int]] = []
        self.died: dict[int, int] = {}
        self.phases: list[tuple[int, str]] = []
        self.event = 0

    def phase(self, name: str) -> None:
        self.phases.append((self.event + 1 if self.phases else 0, name))

    def before(self, num_bytes: int) -> int:
        self.born.append((num_bytes, "existed before", None, "forward", 0))
        return len(self.born) - 1

    def make(self, num_bytes: int, what: str, line: Line | None) -> int:
        self.event += 1
        self.born.append((num_bytes, what, line, self.phases[-1][1], self.event))
        return len(self.born) - 1

    def drop(self, index: int) -> None:
        self.event += 1
        self.died[index] = self.event

    def end(self) -> Timeline:
        buffers = tuple(Buffer(*fields, self.died.get(index)) for index, fields in enumerate(self.born))
        return Timeline(buffers, self.event, tuple(self.phases))


def empty() -> Timeline:
    return Timeline((), 0, ())


def single_event() -> Timeline:
    return Timeline((Buffer(3 * MiB, "mm", None, "forward", 1, None),), 1, ((0, "forward"),))


def known_peak() -> Timeline:
    """1 GiB before; a of 2 GiB, b of 3 GiB: the peak is 5 GiB above, at event 2; a outlives the step."""
    story = Story()
    story.before(GiB)
    story.phase("forward")
    story.make(2 * GiB, "mm", Line("loss.py", 41, "loss"))
    kept = story.make(3 * GiB, "log_softmax", Line("loss.py", 42, "loss"))
    story.phase("backward")
    story.drop(kept)
    story.drop(story.make(512 * MiB, "mm", Line("loss.py", 41, "loss")))
    return story.end()


def hostile() -> Timeline:
    """Names and lines that would break a page, a formula or an XML file if they were believed."""
    story = Story()
    story.phase("<b>forward</b>")
    for number, what in enumerate(
        ("</script><script>document.title='broken'</script>", "a $\\frac{1}$ b & c", "\0\x1b[31m\ud800")
    ):
        story.make((number + 1) * MiB, what, Line(f"/x/<img src=x onerror=alert({number})>.py", number, "<f>"))
    return story.end()


def many_events(num_events: int = 100_000, seed: int = 0) -> Timeline:
    """Half births, half deaths, of 60 origins from rare to frequent, and one spike that downsampling must not lose."""
    draw = random.Random(seed)
    story = Story()
    story.before(40 * GiB)
    story.phase("forward")
    lines = [Line(f"/src/model/layers/part_{number % 17}.py", number, f"function_{number}") for number in range(60)]
    alive: list[int] = []
    while story.event < num_events:
        if story.event == num_events // 2:
            story.phase("backward")
        if story.event == num_events // 3:
            story.drop(story.make(200 * GiB, "spike", lines[0]))
        elif draw.random() < (0.6 if story.event < num_events / 2 else 0.4) or not alive:
            number = min(59, int(draw.expovariate(0.2)))
            alive.append(story.make(draw.randrange(1, 64 * MiB), f"op_{number}", lines[number]))
        else:
            story.drop(alive.pop(draw.randrange(len(alive))))
    return story.end()


def gpt_step(folder: Path, num_layers: int = 12, num_chunks: int = 16) -> Timeline:
    """A GPT's train step: stairs up in forward, a loss in chunks that keeps them all, stairs down, the optimizer."""
    file = folder / "gpt_train.py"
    file.write_text(SOURCE, encoding="utf-8")

    def line(number: int, function: str) -> Line:
        return Line(str(file), number, function)

    story = Story()
    for _ in range(num_layers):
        story.before(170 * MiB)
    story.phase("forward")
    saved: list[list[int]] = []
    for _ in range(num_layers):
        qkv = story.make(384 * MiB, "addmm", line(7, "attention"))
        out = story.make(128 * MiB, "_scaled_dot_product_flash_attention", line(8, "attention"))
        story.drop(story.make(24 * MiB, "workspace of flash attention", line(8, "attention")))
        up = story.make(512 * MiB, "mm", line(2, "block"))
        gelu = story.make(512 * MiB, "gelu", line(3, "block"))
        down = story.make(128 * MiB, "mm", line(4, "block"))
        added = story.make(128 * MiB, "add", line(4, "block"))
        story.drop(down)
        saved.append([qkv, out, up, gelu, added])
    kept = []
    for _ in range(num_chunks):
        logits = story.make(594 * MiB, "mm", line(11, "loss"))
        wide = story.make(1187 * MiB, "_to_copy", line(12, "loss"))
        kept.append(story.make(1187 * MiB, "_log_softmax", line(12, "loss")))
        story.drop(logits)
        story.drop(wide)
    story.phase("backward")
    gradients = [story.make(742 * MiB, "new_zeros", line(11, "loss"))]
    for chunk in reversed(kept):
        wide = story.make(1187 * MiB, "_log_softmax_backward_data", line(15, "train_step"))
        story.drop(chunk)
        narrow = story.make(594 * MiB, "_to_copy", line(15, "train_step"))
        story.drop(wide)
        story.drop(narrow)
    for layer in reversed(saved):
        wide = story.make(512 * MiB, "gelu_backward", line(15, "train_step"))
        for buffer in reversed(layer):
            gradients.append(story.make(34 * MiB, "mm", line(15, "train_step")))
            story.drop(buffer)
        story.drop(wide)
    story.phase("optimizer")
    for _ in range(num_layers):
        story.make(340 * MiB, "zeros_like", line(16, "train_step"))
        story.drop(story.make(170 * MiB, "_foreach_sqrt", line(16, "train_step")))
    for gradient in gradients:
        story.drop(gradient)
    return story.end()
