"""The ops equal what they replace, within their budgets."""

from frugal.contracts import entropy, mlp, segment_mean

import memfix

test_memory = memfix.suite(entropy, mlp, segment_mean)
