"""ASV's pages need no network: scripts by pinned checksums, data beside the page, and nothing else is asked for."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import pages
from memfix.errors import MemfixError

asv = pytest.importorskip("asv")


def archive_of(package: pages.Package) -> bytes:
    """A package with the right files in it and a line each."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name in package.files.values():
            info = tarfile.TarInfo(f"package/{name}")
            text = f"/* {package.name} {name} */".encode()
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text))
    return file.getvalue()


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A registry on the disk that has every package, pinned by its checksum."""
    folder, pinned = tmp_path / "registry", []
    for package in pages.PACKAGES:
        data = archive_of(package)
        path = folder / package.name / "-" / package.archive
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
        pinned.append(replace(package, sha512=base64.b64encode(hashlib.sha512(data).digest()).decode()))
    monkeypatch.setattr(pages, "PACKAGES", tuple(pinned))
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", folder.as_uri() + "/")
    return folder


@pytest.fixture
def html(tmp_path: Path) -> Path:
    """The page as this version of ASV writes it, with some data."""
    folder = tmp_path / "html"
    shutil.copytree(Path(asv.__file__).parent / "www", folder)
    (folder / "graphs/a b").mkdir(parents=True)
    (folder / "graphs/a b/one.json").write_text("[[1, 2.5]]")
    (folder / "info.json").write_text('{"timestamp": 1}')
    return folder


def test_the_page_asks_for_nothing_but_files_beside_it(registry: Path, html: Path, tmp_path: Path) -> None:
    pages.make_self_contained(html, tmp_path / "cache")
    page = (html / "index.html").read_text()
    scripts = re.findall(r'<(?:script|link)[^>]*\s(?:src|href)="([^"]*)"', page)
    assert len(scripts) > 15
    for script in scripts:
        assert not script.startswith("http")
        assert (html / script).exists() or script == "regressions.xml", "which asv publish writes"
    assert page.index("jquery.min.js") < page.index("data.js") < page.index('src="asv.js"')
    data = re.search(r"var pagesData = (.*?);\n", (html / "data.js").read_text(), re.S)
    assert data is not None
    assert json.loads(data[1]) == {"graphs/a b/one.json": [[1, 2.5]], "info.json": {"timestamp": 1}}


def test_packages_are_fetched_once(registry: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = [pages.fetched(package, cache) for package in pages.PACKAGES]
    shutil.rmtree(registry)
    assert [pages.fetched(package, cache) for package in pages.PACKAGES] == first


def test_a_package_that_is_not_the_pinned_one_is_not_used(registry: Path, tmp_path: Path) -> None:
    package = pages.PACKAGES[0]
    (registry / package.name / "-" / package.archive).write_bytes(b"something else")
    with pytest.raises(MemfixError, match=r"is not what was pinned: its SHA-512 differs"):
        pages.fetched(package, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_broken_cache_is_fetched_again(registry: Path, tmp_path: Path) -> None:
    package = pages.PACKAGES[0]
    good = pages.fetched(package, tmp_path)
    (tmp_path / package.archive).write_bytes(good[:10])
    assert pages.fetched(package, tmp_path) == good


def test_without_network_and_cache_it_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", "http://127.0.0.1:9")
    with pytest.raises(
        MemfixError, match=r"the pages need jquery-3\.3\.1\.tgz, .* run this once with network"
    ) as found:
        pages.fetched(pages.PACKAGES[0], tmp_path)
    assert found.value.exit_code == 2


def test_another_version_of_the_page_is_refused(registry: Path, html: Path, tmp_path: Path) -> None:
    page = html / "index.html"
    page.write_text(page.read_text().replace("</head>", '<script src="https://example.org/more.js"></script></head>'))
    with pytest.raises(MemfixError, match=r"fetches more than is known of its version .*more\.js"):
        pages.make_self_contained(html, tmp_path / "cache")


def test_a_benchmark_that_nobody_measured_has_no_box(html: Path) -> None:
    listed = {"benchmarks": {"ops.A.time_train": {"unit": "seconds"}, "ops.B.time_train": {}}, "project": "memfix"}
    (html / "index.json").write_text(json.dumps(listed))
    pages.show_only({"ops.A.time_train", "ops.gone"}, html)
    shown = json.loads((html / "index.json").read_text())
    assert shown == {"benchmarks": {"ops.A.time_train": {"unit": "seconds"}}, "project": "memfix"}
