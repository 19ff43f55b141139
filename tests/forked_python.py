"""``forked_python("-m", "memfix", "gate")``: a command in a process of its own, without importing torch again.

The process is forked from one that has torch and not memfix (``fork_server.py``), which starts with the first command.
What a command needs is imported from its own ``cwd`` and ``PYTHONPATH``, as in a fresh process. Start a fresh one where
its start or its end is what is tested: which modules it imports, variables that a library reads when it is imported,
how the interpreter ends.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

# libraries that start threads when they are imported take these for their number
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def forked_python(
    *command: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 600,
    forks: bool = False,
) -> subprocess.CompletedProcess[str]:
    """``python -m MODULE ...`` or ``python -c CODE ...``, as ``subprocess.run`` would give it back.

    With ``forks``, what the command itself runs of that kind by ``subprocess.run`` is forked too.
    """
    if command[0] not in ("-m", "-c") or len(command) < 2:
        raise ValueError(f"command must be -m MODULE or -c CODE, got {command}")
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder) / name for name in ("stdout", "stderr")]
        for path in said:
            path.touch()
        request = {
            "command": command,
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "stdout": str(said[0]),
            "stderr": str(said[1]),
            "forks": forks,
        }
        status = (SERVERS or [_started()])[-1].run(request, timeout_s)
        out, err = (path.read_text(encoding="utf-8", errors="replace") for path in said)
    return subprocess.CompletedProcess([sys.executable, *command], os.waitstatus_to_exitcode(status), out, err)


def _started() -> Server:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("fork_server.py"))],
        env={**environment, **ONE_THREAD},
        cwd=os.sep,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    SERVERS.append(Server(process.pid, process.stdin, process.stdout.fileno()))
    atexit.register(process.communicate)
    return SERVERS[-1]


class Server:
    """The other end of ``fork_server.serve``."""

    def __init__(self, process: int, requests: IO[bytes], answers: int) -> None:
        self.process, self._requests, self._answers = process, requests, answers

    def run(self, request: dict[str, object], timeout_s: float) -> int:
        """The status that ``os.waitpid`` gives of the child."""
        self._requests.write(json.dumps(request).encode() + b"\n")
        self._requests.flush()
        child = self._answer()
        try:
            self._wait(request, timeout_s)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            self._answer()
            raise
        return self._answer()

    def _wait(self, request: dict[str, object], timeout_s: float) -> None:
        if not select.select([self._answers], [], [], timeout_s)[0]:
            raise subprocess.TimeoutExpired(str(request["command"]), timeout_s)

    def _answer(self) -> int:
        line = b""
        while not line.endswith(b"\n"):
            # one byte at a time: what a buffer held, select would not see
            byte = os.read(self._answers, 1)
            if not byte:
                raise RuntimeError(f"{Path(__file__).with_name('fork_server.py')} ended: process {self.process}")
            line += byte
        return int(line)

    def close(self) -> None:
        self._requests.close()
        os.waitpid(self.process, 0)


SERVERS: list[Server] = []
"""The last is asked. In a command that was forked with ``forks`` it is one of the command's own."""
