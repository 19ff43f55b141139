"""A mutant that hangs, takes all memory or crashes is caught by its limit, and the next one is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from memfix.checks.effort import get_effort
from memfix.ops.embedding import gather
from memfix.selftest import keeper as keeper_module
from memfix.selftest.keeper import Keeper, Question
from memfix.selftest.modules import same_code
from memfix.selftest.parts import Part

TEXT = Path(gather.__file__).read_text()
FIRST = '    require_shape("ids", ids_N, "N")\n'


@pytest.fixture(scope="module")
def keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keeper]:
    patch = pytest.MonkeyPatch()
    patch.setattr(keeper_module, "MOST_BYTES", 1 << 30)
    patch.setattr(keeper_module.Judge, "parts", lambda *_, **__: [Part("gather", "equality", "float32")])
    kept = Keeper(
        "embedding", ["gather"], [gather.__file__], get_effort("dev"), None,
        interpreted=False, cache=str(tmp_path_factory.mktemp("cache")),
    )  # fmt: skip
    assert kept.receive().failure is None
    yield kept
    kept.close()
    patch.undo()


@pytest.mark.parametrize(
    ("planted", "check"),
    [
        ("while True: pass", "limit on time"),
        ("torch.ones(1 << 33)", "limit on memory"),
        ("import ctypes; ctypes.string_at(0)", "crash"),
        ("raise RuntimeError('no')", "equality"),
        ("", ""),
    ],
    ids=["hangs", "takes all memory", "crashes", "raises", "nothing planted"],
)
def test_it_is_caught_and_said_by_what(keeper: Keeper, planted: str, check: str) -> None:
    changed = TEXT.replace(FIRST, f"    {planted}\n{FIRST}") if planted else TEXT
    parts = (Part("gather", "equality", "float32"),)
    keeper.ask(Question(7, {gather.__name__: changed}, parts, seconds=2.0))
    reply = keeper.receive()
    assert (reply.number, reply.verdict, reply.check) == (7, "caught" if planted else "passed", check), reply.why


def test_the_same_instructions_are_seen_without_asking() -> None:
    assert same_code("x = 1\n", "\n\nx = 1  # one\n")
    assert not same_code("def f(x):\n    return x\n", "def f(x):\n    return -x\n")
