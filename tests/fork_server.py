"""A Python that has imported torch and forks for each command, so that no command pays for the import again.

``forked_python.py`` starts it and talks to it. A request is one line of JSON on standard input. The answer is two lines
on standard output: the id of the child, and what ``os.waitpid`` says of it.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import threading
import traceback
import types
import weakref
from typing import IO, Any

from forked_python import SERVERS, Server, forked_python

# what memfix, its benchmarks and a pytest session import, in the order in which a fresh process would
IMPORTED = ("pytest", "numpy", "torch", "torch._dynamo", "hypothesis.strategies", "rich.progress", "click", "yaml")


def main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    import torch
    from hypothesis import given, strategies

    assert "memfix" not in sys.modules, "each command imports its own memfix"
    threads = os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else [""]
    assert len(threads) == 1, "a fork copies the calling thread only; another one may hold a lock"
    # Hypothesis looks at all objects when it first draws
    given(strategies.none())(lambda nothing: None).hypothesis.fuzz_one_input(b"")
    # no child ends what torch has begun here: that would take longer than many a command
    atexit.unregister(torch._dynamo.utils.dump_compile_times)
    for begun in weakref.finalize._registry:  # type: ignore[attr-defined]
        begun.atexit = False
    gc.collect()  # so that no child soon does: it would look at all of torch, and copy its pages
    serve(sys.stdin, os.fdopen(os.dup(1), "w"))


def serve(requests: IO[str], answers: IO[str]) -> None:
    for line in requests:
        child = os.fork()
        if child == 0:
            run(json.loads(line))
        print(child, file=answers, flush=True)
        print(os.waitpid(child, 0)[1], file=answers, flush=True)


def run(request: dict[str, Any]) -> None:
    """Run ``python -m MODULE ...`` or ``python -c CODE ...`` as a fresh process would, and end this process."""
    os.setpgid(0, 0)  # a command that takes too long is killed with its children
    for number, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["stdout"], os.O_WRONLY),
        (2, request["stderr"], os.O_WRONLY),
    ):
        file = os.open(name, flags)
        os.dup2(file, number)
        os.close(file)
    if request["forks"]:
        fork_commands()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    # the interpreter reads these when it starts
    places = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:0] = [os.getcwd(), *(os.path.abspath(place) for place in places)]
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    importlib.invalidate_caches()
    os._exit(_ended(*request["command"]))


def fork_commands() -> None:
    """Have the Python commands that this process runs by ``subprocess.run`` forked from a copy of it as it is now."""
    (theirs, ours), (answers, their_answers) = os.pipe(), os.pipe()
    server = os.fork()
    if server == 0:
        os.close(ours)
        os.close(answers)
        serve(os.fdopen(theirs), os.fdopen(their_answers, "w"))
        os._exit(0)
    os.close(theirs)
    os.close(their_answers)
    SERVERS.append(Server(server, os.fdopen(ours, "wb"), answers))
    atexit.register(SERVERS[-1].close)
    run_anew = subprocess.run

    def run_forked(command: Any, *, cwd: Any = None, env: Any = None, **options: Any) -> Any:
        if command[0] == sys.executable and command[1] in ("-m", "-c"):
            return forked_python(*command[1:], cwd=cwd, env=env)
        return run_anew(command, cwd=cwd, env=env, **options)

    subprocess.run = run_forked  # type: ignore[assignment]


def _ended(option: str, program: str, *arguments: str) -> int:
    """The exit code. Nothing of the interpreter is torn down, which takes as long as some commands."""
    sys.argv = [option, *arguments]
    try:
        if option == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(program, "<string>", "exec", dont_inherit=True), vars(main))
        code: Any = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        file.flush()
    return (code or 0) & 0xFF


if __name__ == "__main__":
    # neither the folder of this file nor what the tests import is a command's own
    del sys.path[0]
    main()
