"""Log-probabilities of given tokens: the function is ``linear_cross_entropy``'s, with a contract of its own here."""

from __future__ import annotations

from ..linear_cross_entropy.log_probabilities import token_log_probabilities

__all__ = ["token_log_probabilities"]
