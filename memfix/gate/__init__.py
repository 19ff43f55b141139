"""The gate: findings and the lock in, a verdict out."""
