"""``memfix`` with a clock that counts calls, whose timing processes are forked from the command, not started afresh."""

from __future__ import annotations

PROGRAM = """
import multiprocessing, runpy
import sitecustomize  # the clock, which a fork of an interpreter that has started does not read by itself
of = multiprocessing.get_context
multiprocessing.get_context = lambda method: of("fork")
runpy.run_module("memfix", run_name="__main__", alter_sys=True)
"""
"""For ``python -c``; the folder of the clock must come first in ``PYTHONPATH``."""
