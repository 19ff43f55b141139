"""Tests that the ops equal the functions that they replace, and stay within their budgets."""

from frugal.contracts import entropy, mlp, segment_mean

import memfix

test_memory = memfix.suite(entropy, mlp, segment_mean)
