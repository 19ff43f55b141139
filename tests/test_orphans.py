"""No child outlives a parent that was killed."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked_python import forked_python

from memfix.checks import interpreter

ROOT = Path(__file__).resolve().parents[1]
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system does not end children")

# the parent starts children of each kind and is killed while they wait for work
KILLED = """
import os, signal, sys, time
from pathlib import Path

def start():
    from memfix.checks import interpreter
    from memfix.gate import workers
    from memfix.selftest import fork_server
    pool = workers._started_pool(2, "fork")
    pids = [process.pid for process in pool._processes.values()]
    interpreter.start_interpreter("fork")
    pids += [running._process.pid for running in interpreter._RUNNING]
    return [*pids, fork_server._fork(lambda: time.sleep(600))[0]]

def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

ours, theirs = os.pipe()
parent = os.fork()
if parent == 0:
    os.write(theirs, " ".join(map(str, start())).encode() + b"\\n")
    time.sleep(600)
os.close(theirs)
pids = list(map(int, os.fdopen(ours).readline().split()))
assert len(pids) >= 3, pids
assert all(map(is_running, pids))
os.kill(parent, signal.SIGKILL)
os.waitpid(parent, 0)
left = pids
for _ in range(100):
    left = [pid for pid in left if is_running(pid)]
    if not left:
        break
    time.sleep(0.1)
for pid in left:
    os.kill(pid, signal.SIGKILL)
print(len(left))
"""


@on_linux
def test_children_of_every_kind_end_with_a_parent_that_is_killed() -> None:
    ended = forked_python("-c", KILLED, cwd=ROOT)
    assert (ended.returncode, ended.stdout) == (0, "0\n"), ended.stderr


@on_linux
def test_a_child_whose_parent_ended_before_it_could_be_watched_ends_at_once() -> None:
    program = "import os, memfix.orphans\nmemfix.orphans.end_with(os.getppid() + 1)\nprint('still there')"
    ended = forked_python("-c", program, cwd=ROOT)
    assert (ended.returncode, ended.stdout) == (1, "")


def test_an_interpreter_that_ended_with_the_thread_that_started_it_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running, ended = SimpleNamespace(is_running=lambda: True), SimpleNamespace(is_running=lambda: False)
    monkeypatch.setattr(interpreter, "_missing_package", lambda: None)
    monkeypatch.setattr(interpreter, "_Interpreter", lambda method: running)
    monkeypatch.setattr(interpreter, "_RUNNING", [ended])
    for _ in range(2):
        interpreter.start_interpreter()
        assert [running] == interpreter._RUNNING


def test_every_child_begins_with_a_function_that_ends_with_its_parent() -> None:
    found, decorated = [], set()
    for path in [*(ROOT / "memfix").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "Process" in text or "ends_with_parent" in text else ():
            if isinstance(node, ast.FunctionDef) and "ends_with_parent" in map(ast.unparse, node.decorator_list):
                decorated.add(node.name)
            starts = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and starts in ("Process", "ProcessPoolExecutor"):
                argument = "target" if starts == "Process" else "initializer"
                begins = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == argument]
                found.append((path.name, *begins))
    assert len(found) >= 6
    assert [child for child in found if child[-1] not in decorated] == []
