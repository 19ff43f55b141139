"""``memfix gate --time``: options that do not go together."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--time", "--update"), "--time reads a clock: --update is not for it"),
        (("--time", "--meter", "cuda"), "--time reads a clock: --meter is not for it"),
        (("--time", "--lock", "x"), "--time reads a clock: --lock is not for it"),
        (("--device", "cpu"), "--device is for --time; bytes are read by --meter"),
        (("--processes", "3"), "--processes is for --time; bytes are read by --meter"),
        (("--limit", "3"), "--limit is for --time; bytes are read by --meter"),
        (("--time", "--limit", "0"), "0.0 is not in the range x>0"),
        (("--time", "--processes", "0"), "0 is not in the range 1<=x<=8"),
    ],
)
def test_options_that_do_not_go_together(memfix: Any, arguments: tuple[str, ...], message: str) -> None:
    ended = memfix("gate", "rope", *arguments)
    assert ended.exit_code == 4
    assert message in ended.err
