"""A mutant that hangs, takes all memory or crashes is caught by its limit, and the next one is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from memfix.checks.effort import get_effort
from memfix.checks.plan import Check
from memfix.ops.embedding import gather
from memfix.selftest import fork_server
from memfix.selftest.fork_server import ForkServer, Request, Setup
from memfix.selftest.modules import same_code

TEXT = Path(gather.__file__).read_text()
GROUP = (Check("embedding", "equality", "gather", dtype="float32"),)
FIRST = '    require_shape("ids", ids_N, "N")\n'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    patch = pytest.MonkeyPatch()
    patch.setattr(fork_server, "MOST_BYTES", 1 << 30)
    patch.setattr(fork_server, "check_groups", lambda *_, **__: [GROUP])
    cache = str(tmp_path_factory.mktemp("cache"))
    started = ForkServer(Setup("embedding", ("gather",), (gather.__file__,), get_effort("dev"), None, False, cache))
    assert GROUP in started.receive()  # and others, where the server had to be spawned and knows of no patch
    yield started
    started.close()
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
def test_it_is_caught_and_said_by_what(server: ForkServer, planted: str, check: str) -> None:
    changed = TEXT.replace(FIRST, f"    {planted}\n{FIRST}") if planted else TEXT
    seconds = 0.5 if check == "limit on time" else 30.0
    server.ask(7, Request({gather.__name__: changed}, (GROUP,), seconds=seconds))
    number, reply = server.receive()
    assert (number, reply.verdict, reply.check) == (7, "caught" if planted else "passed", check), reply.why


def test_the_same_instructions_are_seen_without_asking() -> None:
    assert same_code("x = 1\n", "\n\nx = 1  # one\n")
    assert not same_code("def f(x):\n    return x\n", "def f(x):\n    return -x\n")
