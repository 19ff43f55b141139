"""Benchmarks of every op: history with ASV, comparisons with peers. They judge nothing; ``memfix gate`` does."""
