"""KDA one token at a time: the function is ``kda``'s, and has a contract of its own here."""

from __future__ import annotations

from ..kda.decode import decode_kda

__all__ = ["decode_kda"]
