"""Writes the first contract of an op: ``memfix init`` in the user's repository, ``memfix new-op`` in memfix itself.

Inputs and dims come from an example call (``example.py``), their ranges from trial calls of naive and the forms
(``probing.py``), and budgets from the simulated meter (``budgets.py``). Files are written once everything passes.
"""
