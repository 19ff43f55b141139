"""``memfix gate --time``: options that do not go together."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--time", "--update"), "--update does not apply to --time"),
        (("--time", "--meter", "cuda"), "--meter does not apply to --time"),
        (("--time", "--lock", "x"), "--lock does not apply to --time"),
        (("--device", "cpu"), "--device applies only to --time"),
        (("--processes", "3"), "--processes applies only to --time"),
        (("--limit", "3"), "--limit applies only to --time"),
        (("--time", "--limit", "0"), "0.0 is not in the range x>0"),
        (("--time", "--processes", "0"), "0 is not in the range 1<=x<=8"),
    ],
)
def test_options_that_do_not_go_together(memfix: Any, arguments: tuple[str, ...], message: str) -> None:
    ended = memfix("gate", "rope", *arguments)
    assert ended.exit_code == 4
    assert message in ended.err
