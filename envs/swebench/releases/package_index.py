"""Fetch source archives from a package index without executing code of them.

Invariant: an archive is only bytes with a checksum. Its metadata is not read, because that would run its ``setup.py``
(``pip download`` of a source archive does). The indexes are those of pip's configuration.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
import ssl
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import httpx

from agentkit.errors import ConfigError

PYPI = "https://pypi.org/simple"
LIMIT = 64 << 20
"""Bytes of the largest archive."""
_TIMEOUT = 60.0
_JSON = "application/vnd.pypi.simple.v1+json"
_LINK = re.compile(r"<a\s[^>]*?href=[\"']([^\"']+)[\"'][^>]*>([^<]+)</a>", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """One archive in an index."""

    filename: str
    url: str
    sha256: str | None


def normal(name: str) -> str:
    """Return a project's name in the form that indexes compare."""
    return re.sub(r"[-_.]+", "-", name).lower()


def fetch(name: str, version: str, folder: Path, sha256: str | None = None) -> Path:
    """Return the source archive of a release, from ``folder`` or from an index.

    Args:
        name: of the project.
        version: of the release.
        folder: where archives are stored.
        sha256: the required checksum; None trusts the index.

    Raises:
        ConfigError: there is no such archive, it has another checksum, or the index cannot be reached.
    """
    there = next((path for path in sorted(folder.glob("*.tar.gz")) if is_source(path.name, name, version)), None)
    if there is not None and (sha256 is None or _digest(there.read_bytes()) == sha256):
        return there
    settings = _Settings.read()
    try:
        source = next(found for found in settings.sources(name) if is_source(found.filename, name, version))
        data = settings.get(source.url)
    except StopIteration:
        raise ConfigError(f"no source archive (.tar.gz) of {name} {version} in {', '.join(settings.places)}") from None
    except (httpx.HTTPError, OSError) as error:
        raise ConfigError(
            f"cannot fetch {name} {version}: {error}; put its .tar.gz into {folder} if you have it"
        ) from error
    for expected in (sha256, source.sha256):
        if expected is not None and _digest(data) != expected:
            raise ConfigError(f"{source.url} is not the archive of {name} {version}: its checksum differs")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / Path(source.filename).name
    part = target.with_suffix(".part")
    part.write_bytes(data)
    part.replace(target)
    return target


def is_source(filename: str, name: str, version: str) -> bool:
    """Return whether a file name is that of the source archive of this release."""
    return filename.endswith(".tar.gz") and normal(filename.removesuffix(".tar.gz")) == normal(f"{name}-{version}")


def links(page: str, url: str, content_type: str) -> Iterator[Source]:
    """Yield the files that a page of the simple repository API lists, in either of its two formats."""
    if "json" in content_type:
        for file in json.loads(page)["files"]:
            yield Source(file["filename"], urljoin(url, file["url"]), file.get("hashes", {}).get("sha256"))
        return
    for href, text in _LINK.findall(page):
        target, _, fragment = html.unescape(href).partition("#")
        digest = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else None
        yield Source(html.unescape(text).strip(), urljoin(url, target), digest)


@dataclass(frozen=True)
class _Settings:
    """The indexes that pip uses."""

    indexes: tuple[str, ...]
    folders: tuple[str, ...]
    cert: str | None

    @classmethod
    def read(cls) -> _Settings:
        """Return pip's settings from its files and the environment."""
        command = [sys.executable, "-m", "pip", "config", "list"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, stdin=subprocess.DEVNULL)
        values: dict[str, list[str]] = {}
        for line in done.stdout.splitlines():
            key, _, value = line.partition("=")
            # Entries of the environment come first in the list and win, as in pip.
            values.setdefault(key.rpartition(".")[2], []).append(value.strip().strip("'\""))
        first = values.get("index-url", [PYPI])[0]
        more = [url for line in values.get("extra-index-url", []) for url in line.split()]
        folders = [place for line in values.get("find-links", []) for place in line.split()]
        return cls((first, *more), tuple(folders), values.get("cert", [None])[0])

    @property
    def places(self) -> Iterable[str]:
        return (*self.folders, *self.indexes)

    def sources(self, name: str) -> Iterator[Source]:
        for folder in map(_local, self.folders):
            if folder is not None and folder.is_dir():
                yield from (Source(path.name, path.as_uri(), None) for path in sorted(folder.glob("*.tar.gz")))
        for index in self.indexes:
            url = f"{index.rstrip('/')}/{normal(name)}/"
            local = _local(url)
            if local is not None:
                page = local / "index.html"
                if page.is_file():
                    yield from links(page.read_text(), url, "text/html")
                continue
            with self._client() as client:
                answer = client.get(url, headers={"Accept": f"{_JSON}, text/html;q=0.2"})
                if answer.status_code == httpx.codes.NOT_FOUND:
                    continue
                answer.raise_for_status()
                yield from links(answer.text, str(answer.url), answer.headers.get("content-type", ""))

    def get(self, url: str) -> bytes:
        local = _local(url)
        if local is not None:
            return local.read_bytes()
        data = bytearray()
        with self._client() as client, client.stream("GET", url) as answer:
            answer.raise_for_status()
            for block in answer.iter_bytes():
                data += block
                if len(data) > LIMIT:
                    raise ConfigError(f"{url} is larger than {LIMIT >> 20} MiB")
        return bytes(data)

    def _client(self) -> httpx.Client:
        verify = ssl.create_default_context(cafile=self.cert) if self.cert else True
        return httpx.Client(verify=verify, timeout=_TIMEOUT, follow_redirects=True)


def _local(place: str) -> Path | None:
    """Return the path of a ``file:`` address or of a plain folder; None for other addresses."""
    parts = urlsplit(place)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return None if parts.scheme else Path(place)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
