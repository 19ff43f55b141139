"""How a pytest session inside of a test is started."""

from __future__ import annotations

from importlib.metadata import entry_points

OPTIONS = ["--memfix-profile=dev", "-p", "no:cacheprovider"]
if not any(entry.name == "memfix" for entry in entry_points(group="pytest11")):
    OPTIONS += ["-p", "memfix.pytest_plugin"]
