"""The loss with its classes spread over processes: ``linear_cross_entropy``'s, with a contract of its own here."""

from __future__ import annotations

from ..linear_cross_entropy.vocabulary_parallel import vocabulary_parallel_linear_cross_entropy

__all__ = ["vocabulary_parallel_linear_cross_entropy"]
