"""Writes the first contract of an op: ``memfix init`` in somebody's repository, ``memfix new-op`` in memfix itself.

An example call gives inputs and dims (``example.py``), naive says at which sizes it runs (``probing.py``), the
simulated meter gives budgets that hold today (``budgets.py``), and files are written once everything passes.
"""
