"""Runs ``asv publish`` and makes its pages work offline: open ``.asv/html/index.html`` from the disk, or serve it.

    python -m benchmarks.pages

ASV's page fetches its scripts from several hosts, and its data by requests that browsers refuse for local files. Here
the scripts are downloaded once from their npm packages, by pinned versions and checksums, and are stored beside the
page; the data becomes a script too. The registry is the one that npm is configured to use, or ``NPM_CONFIG_REGISTRY``.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import click

from memfix.atomic_write import write_whole
from memfix.cli.ending import run
from memfix.errors import MemfixError

from .asv_results import measured, named, require_whole, unlisted

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".asv/packages"
PUBLIC_REGISTRY = "https://registry.npmjs.org"
FETCH_TIMEOUT_S = 60


@dataclass(frozen=True)
class Package:
    """An npm package, the checksum of its archive, and the files that replace addresses in ASV's page."""

    name: str
    version: str
    sha512: str
    files: dict[str, str]
    """Paths in the archive, by a regular expression of the address that they replace."""

    @property
    def archive(self) -> str:
        return f"{self.name}-{self.version}.tgz"


PACKAGES = (
    Package(
        "jquery",
        "3.3.1",
        "Ubldcmxp5np52/ENotGxlLe6aGMvmF4R8S6tZjsP6Knsaxd/xp3Zrh50cG93lR6nPXyUFwzN3ZSOQI0wRJNdGg==",
        {r"jquery-[\d.]+\.min\.js": "dist/jquery.min.js"},
    ),
    Package(
        "flot",
        "0.8.3",
        "xg2otcTJDvS+ERK+my4wxG/ASq90QURXtoM4LhacCq0jQW2jbyjdttbRNqU2cPykrpMvJ6b2uSp6SAgYAzj9tQ==",
        {
            r"jquery\.flot\.min\.js": "jquery.flot.js",
            r"jquery\.flot\.time\.min\.js": "jquery.flot.time.js",
            r"jquery\.flot\.selection\.min\.js": "jquery.flot.selection.js",
            r"jquery\.flot\.categories\.min\.js": "jquery.flot.categories.js",
        },
    ),
    Package(
        "flot-orderbars",
        "1.0.0",
        "Jv51fvzevUjNXEeozpwEKfPjhiZhfiJddv0WHjduUTCmSF+7T5K7C9c9Y1wIVmUhDBv5fLMjgbwKecT0GIKPZA==",
        {r"jquery\.flot\.orderBars\.js": "js/jquery.flot.orderBars.js"},
    ),
    Package(
        "stupid-table-plugin",
        "1.1.3",
        "2Vk7XouQPxUQPRe9w0Fu7ZZ8kHLK7rDoLMsCgtKxRNJ7f4dSOGvW9CkHsq5wD6QsaEnWoyLBYH3xOEsrK3yWBg==",
        {r"stupidtable\.min\.js": "stupidtable.min.js"},
    ),
    Package(
        "blueimp-md5",
        "2.19.0",
        "DRQrD6gJyy8FbiE4s+bDoXS9hiW3Vbx5uCdwvcCf3zLHL+Iv7LtGHLpr+GZV8rHG8tK766FGYBwRbu8pELTt+w==",
        {r"md5\.min\.js": "js/md5.min.js"},
    ),
    Package(
        "bootstrap",
        "3.1.1",
        "TAzqS8E/ISpVHP29gYhy+1NSV+FJwApDVQhDfgLYsIuUDJiqJzH2DfORN5tiu+Ie2iBLrzEG34t4Rf465cigqg==",
        {r"bootstrap\.min\.js": "dist/js/bootstrap.min.js", r"bootstrap\.min\.css": "dist/css/bootstrap.min.css"},
    ),
)

# answers the page's requests from data.js, but only after all scripts of the page have started
ANSWERING = """
jQuery.ajaxTransport("+json", function (options) {
  var path = decodeURIComponent(options.url.split("?")[0]);
  if (!(path in pagesData)) { return; }
  return {
    send: function (headers, done) { jQuery(function () { done(200, "OK", { json: pagesData[path] }); }); },
    abort: function () {}
  };
});
"""


def registry() -> str:
    """Return the URL of the registry that npm would use."""
    found = os.environ.get("NPM_CONFIG_REGISTRY")
    if found is None and shutil.which("npm"):
        asked = subprocess.run(["npm", "config", "get", "registry"], capture_output=True, text=True, cwd=ROOT)
        found = asked.stdout.strip() if asked.returncode == 0 else None
    return (found or PUBLIC_REGISTRY).rstrip("/")


def fetched(package: Package, cache: Path) -> bytes:
    """Return the package's archive, from the cache or else from the registry; refuse one with another checksum."""
    kept = cache / package.archive
    if kept.exists():
        data = kept.read_bytes()
        if _is(package, data):
            return data
    url = f"{registry()}/{package.name}/-/{package.archive}"
    try:
        with urllib.request.urlopen(url, timeout=FETCH_TIMEOUT_S) as answer:
            data = answer.read()
    except (OSError, ValueError) as error:
        raise MemfixError(
            f"the pages need {package.archive}, which is not in {cache} and cannot be fetched from {url}: {error}; "
            "run this once with network, or copy that folder from where it was"
        ) from None
    if not _is(package, data):
        raise MemfixError(f"{url} is not what was pinned: its SHA-512 differs; nothing of it is used")
    write_whole(kept, data, "the package")
    return data


def _is(package: Package, data: bytes) -> bool:
    return base64.b64encode(hashlib.sha512(data).digest()).decode() == package.sha512


def make_self_contained(html: Path, cache: Path = CACHE) -> None:
    """Store scripts and data beside the page, and refuse a page that would still fetch from the network."""
    page = (html / "index.html").read_text(encoding="utf-8")
    for package in PACKAGES:
        with tarfile.open(fileobj=io.BytesIO(fetched(package, cache))) as archive:
            for pattern, name in package.files.items():
                member = archive.extractfile(f"package/{name}")
                assert member is not None
                target = f"packages/{package.name}-{package.version}/{Path(name).name}"
                write_whole(html / target, member.read(), "the page's script")
                tag = rf'(<(?:script|link rel="stylesheet") (?:src|href)=)"https://[^"]*/{pattern}"[^>]*>'
                page, count = re.subn(tag, lambda found, target=target: f'{found[1]}"{target}">', page)  # type: ignore[misc]
                if count != 1:
                    raise MemfixError(f"ASV's page has another {pattern!r} than its version 0.6.6; pin that version")
    left = re.search(r'<(?:script|link)[^>]*(?:src|href)="https?://[^"]*"', page)
    if left:
        raise MemfixError(f"ASV's page fetches more than is known of its version 0.6.6: {left[0]}; pin that version")
    first_own = page.index('<script language="javascript" type="text/javascript"')
    page = f'{page[:first_own]}<script src="data.js"></script>\n    {page[first_own:]}'
    data = {
        path.relative_to(html).as_posix(): json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(html.rglob("*.json"))
    }
    write_whole(html / "data.js", f"var pagesData = {json.dumps(data, allow_nan=True)};{ANSWERING}", "the page's data")
    write_whole(html / "index.html", page, "the page")


def show_only(benchmarks: set[str], html: Path) -> None:
    """Drop all other benchmarks from the page: ASV shows an empty box for a benchmark that was never measured."""
    index = json.loads((html / "index.json").read_text(encoding="utf-8"))
    index["benchmarks"] = {name: entry for name, entry in index["benchmarks"].items() if name in benchmarks}
    write_whole(html / "index.json", json.dumps(index), "the page's index")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Publish ASV's results as pages that need no network."""
    from asv.config import Config

    config = Config.load(str(ROOT / "asv.conf.json"))
    results, html = ROOT / config.results_dir, ROOT / config.html_dir
    require_whole(results)
    if not (results / "benchmarks.json").exists():
        raise MemfixError(f"{config.results_dir} holds no results; run python -m benchmarks.walk first")
    for package in PACKAGES:  # fails early: asv publish takes long
        fetched(package, CACHE)
    done = subprocess.run([sys.executable, "-m", "asv", "publish"], cwd=ROOT)
    if done.returncode:
        raise MemfixError(f"asv publish failed with exit code {done.returncode}; see its messages above")
    show_only(measured(results), html)
    make_self_contained(html)
    dropped = unlisted(results)
    if dropped:
        click.echo(f"measured once, and no longer listed, so not in the pages: {named(dropped)}", err=True)
    click.echo(f"{html.relative_to(ROOT)}/index.html")


if __name__ == "__main__":
    run(main, "python -m benchmarks.pages")
