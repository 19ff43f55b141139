"""How a pytest session inside of a test is started."""

from __future__ import annotations

from importlib.metadata import entry_points

# pytest looks for exceptions that nobody saw by two collections of all objects, which takes longer than most sessions;
# pytest-benchmark, where it is installed, takes a tenth of one to import
OPTIONS = ["--memfix-profile=dev"]
OPTIONS += [word for name in ("cacheprovider", "unraisableexception", "benchmark") for word in ("-p", f"no:{name}")]
if not any(entry.name == "memfix" for entry in entry_points(group="pytest11")):
    OPTIONS += ["-p", "memfix.pytest_plugin"]
