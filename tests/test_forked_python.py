"""Commands that are forked from a Python that has torch end as those of a fresh one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from forked_python import forked_python


def test_a_module_has_its_own_folder_path_arguments_and_environment(tmp_path: Path) -> None:
    (tmp_path / "here.py").write_text("word = 'cwd'\n")
    (tmp_path / "more").mkdir()
    (tmp_path / "more/there.py").write_text("word = 'PYTHONPATH'\n")
    (tmp_path / "said.py").write_text(
        "import os, sys, here, there\n"
        "print(__name__, __spec__.name, here.word, there.word, sys.argv[1:], os.environ['SAID'], os.getcwd())\n"
        "print('torch' in sys.modules, 'memfix' in sys.modules, file=sys.stderr)\n"
    )
    done = forked_python("-m", "said", "a", "b", cwd=tmp_path, env={"PYTHONPATH": "more", "SAID": "yes"})
    assert done.stdout == f"__main__ said cwd PYTHONPATH ['a', 'b'] yes {tmp_path}\n"
    assert (done.returncode, done.stderr) == (0, "True False\n")


@pytest.mark.parametrize(
    ("code", "status", "err"),
    [
        ("pass", 0, ""),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('in words')", 1, "in words\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15, ""),
    ],
)
def test_the_end_of_a_command_is_that_of_a_fresh_process(code: str, status: int, err: str) -> None:
    done = forked_python("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", err)


def test_an_exception_is_shown_and_the_next_command_runs() -> None:
    done = forked_python("-c", "print('before', end=''); 1 / 0")
    assert (done.returncode, done.stdout) == (1, "before")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert forked_python("-c", "print(1)").stdout == "1\n"


def test_exit_handlers_and_threads_are_waited_for() -> None:
    code = "import atexit, threading, time\natexit.register(print, 'exit')\n"
    code += "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()"
    assert forked_python("-c", code).stdout == "thread\nexit\n"


def test_a_command_that_takes_too_long_is_killed_with_its_children(tmp_path: Path) -> None:
    code = "import os, subprocess; child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True)"
    code += f"\nopen({str(tmp_path / 'child')!r}, 'w').write(str(child.pid)); child.wait()"
    with pytest.raises(subprocess.TimeoutExpired):
        forked_python("-c", code, timeout_s=2)
    child = int((tmp_path / "child").read_text())
    status = Path(f"/proc/{child}/status")
    assert not status.exists() or "zombie" in status.read_text()
    assert forked_python("-c", "import os; print(os.getpid())").returncode == 0


def test_a_command_that_is_no_module_and_no_code_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^command must be -m MODULE or -c CODE, got \('script.py',\)$"):
        forked_python("script.py")


def test_what_a_command_runs_is_forked_too_where_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("")
    inner = "import sys; print('torch' in sys.modules, 'own' in sys.modules, sys.argv[1:]); raise SystemExit(3)"
    code = "import subprocess, sys, own\n"
    code += f"done = subprocess.run([sys.executable, '-c', {inner!r}, 'a'], capture_output=True, encoding='utf-8')\n"
    code += "print(done.returncode, done.stdout, subprocess.run(['echo', 'other'], capture_output=True).stdout)"
    assert forked_python("-c", code, cwd=tmp_path, forks=True).stdout == "3 True False ['a']\n b'other\\n'\n"
    assert forked_python("-c", code, cwd=tmp_path).stdout == "3 False False ['a']\n b'other\\n'\n"
