"""A stand-in for GitHub that ``gh api`` talks to: pull requests, comments and artifacts in a folder."""

from __future__ import annotations

import json
import sys
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

GH = """#!{python} -IS
import sys
sys.path.insert(0, {here!r})
from fake_github import main
main({folder!r})
"""
REPOSITORY = "owner/lab"


class FakeGitHub:
    """State in files, since every call of ``gh`` is a process of its own; :meth:`install` writes ``gh``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(
        self, *, pulls: Sequence[Any] = (), comments: Sequence[Any] = (), artifacts: Mapping[str, bytes] | None = None
    ) -> Path:
        """The folder for the PATH. ``comments`` are those of every pull request; ``artifacts`` those of every run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        listed = []
        for number, (name, content) in enumerate((artifacts or {}).items(), start=100):
            (self.folder / f"{number}.zip").write_bytes(content)
            listed.append({"id": number, "name": name, "size_in_bytes": len(content)})
        state = {"pulls": pulls, "comments": comments, "artifacts": listed}
        (self.folder / "state.json").write_text(json.dumps(state))
        gh = self.folder / "gh"
        gh.write_text(GH.format(python=sys.executable, here=str(Path(__file__).parent), folder=str(self.folder)))
        gh.chmod(0o755)
        return self.folder

    def calls(self) -> list[Any]:
        """Method, path and data of every call so far."""
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def writes(self) -> list[Any]:
        return [call for call in self.calls() if call[0] != "GET"]

    def body(self) -> str:
        """The one comment that was written."""
        ((_, _, data),) = self.writes()
        return data["body"]

    def answer(self, method: str, address: str, data: Any) -> bytes:
        with (self.folder / "calls.jsonl").open("a") as calls:
            calls.write(json.dumps([method, address, data]) + "\n")
        state = json.loads((self.folder / "state.json").read_text())
        path, _, query = address.removeprefix(f"repos/{REPOSITORY}/").partition("?")
        asked = dict(urllib.parse.parse_qsl(query))
        if path.endswith("/zip"):
            return (self.folder / f"{path.split('/')[-2]}.zip").read_bytes()
        if path.endswith("/artifacts"):
            return json.dumps({"artifacts": [a for a in state["artifacts"] if a["name"] == asked["name"]]}).encode()
        if path.endswith("/comments") and method == "GET":
            page = int(asked["page"])
            return json.dumps(state["comments"][2 * page - 2 : 2 * page]).encode()
        return json.dumps(state["pulls"] if path == "pulls" else {}).encode()


def main(folder: str) -> None:
    """``gh api --method METHOD ADDRESS [--input -]``"""
    api, flag, method, address, *rest = sys.argv[1:]
    assert (api, flag) == ("api", "--method")
    data = json.load(sys.stdin) if rest == ["--input", "-"] else None
    sys.stdout.buffer.write(FakeGitHub(Path(folder)).answer(method, address, data))
