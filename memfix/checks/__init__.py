"""Checks: a contract, a form and a case in, findings out. They know neither the registry nor the gate."""
