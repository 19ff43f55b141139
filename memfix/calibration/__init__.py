"""Holding the simulated meter's rules against a real GPU, operator by operator."""
