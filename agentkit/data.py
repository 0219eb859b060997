"""Data sets of environments: catalogue, location on this machine, download and verification.

Invariant: a data set is complete or absent: it is written to a temporary folder, checked, and renamed; its files are
then read-only. A checksum is the official one or unknown; sets without a checksum are checked by their counts. Another
user cannot place a data set where this user's is searched. File system errors are raised as ``DataError``.

To add a data set, add an entry to ``DATASETS``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentkit import progress
from agentkit.archives import is_archive, unpack
from agentkit.errors import AgentkitError, ConfigError, DataError

RECORD = ".agentkit.json"
"""File in a data set's folder with the checksum of every file when it was fetched."""


@dataclass(frozen=True)
class Remote:
    """One file to download."""

    url: str
    """The official address."""
    path: str
    """Name in the data set's folder; for an archive, the folder for its content (``.`` is the data set's)."""
    size: int | None = None
    """Bytes, where known."""
    sha256: str | None = None
    """The official checksum, or None if none is published."""
    unpack: bool = False


@dataclass(frozen=True)
class DataSet:
    """One data set."""

    name: str
    title: str
    licence: str
    homepage: str
    size: str
    """Size of the download as text, such as ``"6 MB"``."""
    forms: tuple[tuple[str, ...], ...]
    """Alternative lists of the files in its folder that make it complete; one of them is enough."""
    counts: Mapping[str, int]
    """Expected counts of items, as returned by ``counter``: products, games of a split, …"""
    counter: str
    """``package.module:function`` that takes the data set's folder and returns its counts."""
    splits: Mapping[str, str] = field(default_factory=dict)
    files: tuple[Remote, ...] = ()
    version: int | None = None
    """Part of the folder's name; increased when ``generate`` changes its output."""
    generate: str | None = None
    """``package.module:function`` that generates the data set in a folder, for agentkit's own data sets."""

    @property
    def folder(self) -> str:
        return self.name if self.version is None else f"{self.name}-v{self.version}"


_GOOGLE_DRIVE = "https://drive.usercontent.google.com/download?export=download&confirm=t&id="
_WEBSHOP = {
    "licence": "MIT (code); the products' texts belong to their owners",
    "homepage": "https://github.com/princeton-nlp/WebShop",
    "counter": "agentkit.envs.webshop.catalogue:count",
    "splits": {"test": "goals 0 to 499", "eval": "goals 500 to 1499", "train": "the others"},
}
_HUGGING_FACE = "https://huggingface.co/datasets/SWE-bench/{}/resolve/main/data/{}-00000-of-00001.parquet"


def _swebench(name: str, title: str, repository: str, split: str, count: int, size: str) -> DataSet:
    return DataSet(
        name=name,
        title=title,
        licence="MIT (harness and data set); each repository has its own",
        homepage="https://www.swebench.com",
        size=size,
        forms=((f"{split}.parquet",), (f"lite_{split}.parquet",)),
        counts={"instances": count},
        counter="agentkit.envs.swebench.instance:count",
        splits={split: "all of it"},
        files=(Remote(_HUGGING_FACE.format(repository, split), f"{split}.parquet"),),
    )


_HUMAN = Remote(_GOOGLE_DRIVE + "14Kb5SPBk_jfdLZ_CDBNitW98QLDlKR5O", "items_human_ins.json")

_ALFWORLD = {
    "counter": "agentkit.envs.alfworld.games:count",
    "splits": {
        "train": "games to learn from",
        "valid_seen": "other games in the same rooms",
        "valid_unseen": "games in other rooms",
    },
}

DATASETS: dict[str, DataSet] = {
    known.name: known
    for known in (
        DataSet(
            name="alfworld-own",
            title="ALFWorld: agentkit's own games",
            licence="Apache-2.0",
            homepage="agentkit",
            size="nothing",
            forms=(("train", "valid_seen", "valid_unseen"),),
            counts={"train": 600, "valid_seen": 96, "valid_unseen": 96},
            version=2,
            generate="agentkit.envs.alfworld.generator:write",
            **_ALFWORLD,
        ),
        DataSet(
            name="alfworld",
            title="ALFWorld: the official games, version 2.1.2",
            licence="MIT",
            homepage="https://github.com/alfworld/alfworld",
            size="about 40 MB",
            forms=(
                ("train", "valid_seen", "valid_unseen"),
                ("json_2.1.1/train", "json_2.1.1/valid_seen", "json_2.1.1/valid_unseen"),
                ("json_2.1.2/train", "json_2.1.2/valid_seen", "json_2.1.2/valid_unseen"),
            ),
            counts={"train": 3_553, "valid_seen": 140, "valid_unseen": 134},
            files=(
                Remote(
                    "https://github.com/alfworld/alfworld/releases/download/0.4.0/json_2.1.2_tw-pddl.zip",
                    ".",
                    unpack=True,
                ),
            ),
            **_ALFWORLD,
        ),
        DataSet(
            name="webshop-own",
            title="WebShop: agentkit's own products",
            licence="Apache-2.0",
            homepage="agentkit",
            size="nothing",
            forms=(("items_shuffle.json", "items_ins_v2.json"),),
            counts={},
            counter=_WEBSHOP["counter"],
            splits=_WEBSHOP["splits"],
            version=1,
            generate="agentkit.envs.webshop.generator:write",
        ),
        DataSet(
            name="webshop-small",
            title="WebShop: the official 1,000 products",
            size="about 10 MB",
            forms=(("items_shuffle_1000.json", "items_ins_v2_1000.json"), ("products.jsonl.gz", "attributes.json")),
            counts={"products": 1_000, "goals": 6_910},
            files=(
                Remote(_GOOGLE_DRIVE + "1EgHdxQ_YxqIQlvvq5iKlCrkEKR6-j0Ib", "items_shuffle_1000.json"),
                Remote(_GOOGLE_DRIVE + "1IduG0xl544V_A_jv3tHXC0kyFi7PnyBu", "items_ins_v2_1000.json"),
                _HUMAN,
            ),
            **_WEBSHOP,
        ),
        DataSet(
            name="webshop-full",
            title="WebShop: all 1.18 million products",
            size="about 5.5 GB",
            forms=(("items_shuffle.json", "items_ins_v2.json", "items_human_ins.json"),),
            counts={},
            files=(
                Remote(_GOOGLE_DRIVE + "1A2whVgOO0euk5O13n2iYDM0bQRkkRduB", "items_shuffle.json"),
                Remote(_GOOGLE_DRIVE + "1s2j6NgHljiZzQNL3veZaAiyW_qDEgBNi", "items_ins_v2.json"),
                _HUMAN,
            ),
            **_WEBSHOP,
        ),
        DataSet(
            name="boxoban-test",
            title="Boxoban: 1,000 unfiltered test levels for Sokoban",
            licence="Apache-2.0",
            homepage="https://github.com/google-deepmind/boxoban-levels",
            size="about 120 kB",
            forms=(("000.txt",), ("unfiltered-test-000.txt",)),
            counts={"levels": 1_000},
            counter="agentkit.envs.sokoban.level:count",
            splits={"test": "all of it"},
            files=(
                Remote(
                    "https://raw.githubusercontent.com/google-deepmind/boxoban-levels/master/unfiltered/test/000.txt",
                    "000.txt",
                ),
            ),
        ),
        _swebench("swebench-lite-dev", "SWE-bench Lite: development", "SWE-bench_Lite", "dev", 23, "about 150 kB"),
        _swebench("swebench-lite", "SWE-bench Lite", "SWE-bench_Lite", "test", 300, "about 2 MB"),
        _swebench("swebench-verified", "SWE-bench Verified", "SWE-bench_Verified", "test", 500, "about 3 MB"),
    )
}


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Raise file system errors (no space, no permission, …) as ``DataError``."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{error}; data sets are stored in {root()}; set AGENTKIT_DATA to use another folder"
        ) from error


def root() -> Path:
    """Return the folder of all data sets: ``AGENTKIT_DATA``, or a folder in the user's cache.

    Raises:
        DataError: the user has no home directory.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    place = Path(os.environ.get("AGENTKIT_DATA") or f"{cache}/agentkit/data")
    try:
        return place.expanduser().absolute()
    except RuntimeError as error:
        raise DataError(
            f"{place}: no such home directory; set AGENTKIT_DATA to use another folder for data sets"
        ) from error


@_explained()
def derived_root() -> Path:
    """Return the folder for data derived from data sets, such as indexes. Its parent exists and is writable.

    Raises:
        DataError: no folder is writable.
    """
    return _base() / ".derived"


def dataset(name: str) -> DataSet:
    """Return the data set with this name. Raises ``ConfigError`` for an unknown name."""
    if name not in DATASETS:
        raise ConfigError(f"no data set {name!r}; known: {', '.join(DATASETS)}")
    return DATASETS[name]


@_explained()
def find(name: str) -> Path | None:
    """Return the folder of a data set, or None if it is not on this machine.

    Raises:
        ConfigError: the name is unknown.
        DataError: the file system refuses to read it.
    """
    known = dataset(name)
    return next((place / known.folder for place in _places() if complete(known, place / known.folder)), None)


def locate(name: str) -> Path:
    """Return the folder of a data set; generate it first if it is agentkit's own.

    Raises:
        ConfigError: the name is unknown.
        DataError: the data set is not on this machine, or cannot be generated.
    """
    folder = find(name)
    if folder is None and dataset(name).generate is not None:
        folder = fetch(name)
    if folder is None:
        raise DataError(
            f"the data set {name} is not in {root()}: run `agentkit data fetch {name}` (downloads "
            f"{dataset(name).size}), or `agentkit data fetch {name} --from FILE_OR_FOLDER` if you have it already; "
            "set AGENTKIT_DATA to use another folder"
        )
    return folder


def complete(known: DataSet, folder: Path) -> bool:
    """Return whether a folder contains all files of one of the data set's forms."""
    # Not Path.exists, which raises PermissionError.
    return any(all(os.path.exists(folder / name) for name in form) for form in known.forms)


@_explained()
def fetch(name: str, source: Path | None = None) -> Path:
    """Download or generate a data set unless it is complete already. An interrupted download is continued.

    Args:
        name: a name in ``DATASETS``.
        source: a local copy to use instead of the official addresses: an archive, a folder with the files, or the file
            of a data set that has only one.

    Returns:
        The folder of the data set.

    Raises:
        ConfigError: the name is unknown.
        DataError: the download failed, the content is not the data set, or the folder cannot be written.
    """
    known, origin = dataset(name), source or "what was downloaded"
    if (there := find(name)) is not None:
        return there
    with _lock(name) as base:
        if (there := find(name)) is not None:  # fetched by another process meanwhile
            return there
        target, filling = base / known.folder, base / f".{name}.filling"
        shutil.rmtree(filling, ignore_errors=True)  # left by a process that was killed
        filling.mkdir()
        try:
            if source is not None:
                with progress.work(f"copying {name} from {source}"):
                    _take(known, source, filling)
            elif known.generate is not None:
                with progress.work(f"generating the data set {name}"):
                    _named(known.generate)(filling)
            else:
                _download(known, filling, base / ".downloads" / name)
            made = _complete_one(known, filling)
            if made is None:
                wanted = " or ".join(" and ".join(form) for form in known.forms)
                raise DataError(f"{origin} is not the data set {name}: {wanted} is missing")
            with progress.work(f"checking {name}"):
                _check_counts(known, made, origin)
                _seal(made)
            if target.exists():  # incomplete, or it would have been found
                raise DataError(f"{target} exists and is not the data set {name}; move it away, then fetch again")
            made.rename(target)
        finally:
            shutil.rmtree(filling, ignore_errors=True)
        shutil.rmtree(base / ".downloads" / name, ignore_errors=True)
        return target


@_explained()
def verify(name: str) -> list[str]:
    """Check a data set on this machine, and return its problems: missing or changed files, wrong counts.

    Raises:
        ConfigError: the name is unknown.
        DataError: the data set is not on this machine.
    """
    known, folder = dataset(name), locate(name)
    problems = []
    record = folder / RECORD
    if record.is_file():
        try:
            digests = dict(json.loads(record.read_text()))
        except (TypeError, ValueError):
            digests = {}
            problems.append(f"{RECORD}, the record of what was fetched, is damaged")
        for path, digest in digests.items():
            if not (folder / path).is_file():
                problems.append(f"{path} is missing")
            elif sha256(folder / path) != digest:
                problems.append(f"{path} has changed since it was fetched")
    for remote in known.files:
        path = folder / remote.path
        if remote.sha256 and not remote.unpack and path.is_file() and sha256(path) != remote.sha256:
            problems.append(f"{remote.path} is not the official file")
    try:
        _check_counts(known, folder, folder)
    except DataError as error:
        problems.append(str(error))
    return problems


def sha256(path: Path) -> str:
    """Return the SHA-256 digest of a file in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _places() -> Iterator[Path]:
    """Yield the folders to search, in order."""
    yield root()
    if not _writable(root()) and _own(_spare_root()):
        yield _spare_root()


def _spare_root() -> Path:
    """Return the folder used if ``root()`` is not writable, as in sandboxes."""
    return Path(tempfile.gettempdir()) / f"agentkit-data-{os.getuid()}"


def _own(folder: Path) -> bool:
    """Return whether it is a folder, not a link, that only this user can write."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _writable(folder: Path) -> bool:
    """Return whether this user can write the folder, or create it if it does not exist."""
    while not os.path.lexists(folder):
        folder = folder.parent
    return os.access(folder, os.W_OK)


def _base() -> Path:
    """Create and return the folder for new data sets: ``root()``, or the spare one if that is not writable."""
    usual, spare = root(), _spare_root()
    if _writable(usual):
        usual.mkdir(parents=True, exist_ok=True)
        return usual
    spare.mkdir(mode=0o700, exist_ok=True)
    if not _own(spare):
        raise DataError(
            f"{usual} is not writable, and {spare} is not a folder that only you can write; "
            "set AGENTKIT_DATA to use another folder"
        )
    return spare


@contextlib.contextmanager
def _lock(name: str) -> Iterator[Path]:
    """Keep other processes from fetching the same data set; yield the folder for new data sets."""
    base = _base()
    if base != root() and dataset(name).generate is None:
        raise DataError(f"{root()} is not writable; set AGENTKIT_DATA to use another folder")
    with (base / f".{name}.lock").open("w") as lock:
        try:
            # Generating a data set takes a moment, so wait for it. A download may take hours.
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if dataset(name).generate else fcntl.LOCK_NB))
        except OSError as error:
            raise DataError(f"another process is fetching {name} into {base}; wait for it") from error
        yield base


def _download(known: DataSet, target: Path, parts: Path) -> None:
    from agentkit.download import download

    parts.mkdir(parents=True, exist_ok=True)
    for number, remote in enumerate(known.files):
        label = remote.path if not remote.unpack else remote.url.rsplit("/", 1)[-1]
        part = parts / f"{number}"
        with progress.work(label, remote.size, unit="B") as work:
            download(remote.url, part, size=remote.size, progress=work.reached)
        if remote.sha256 is not None and sha256(part) != remote.sha256:
            part.unlink()
            raise DataError(f"{remote.url} is not the official file: its checksum differs; fetch again")
    for number, remote in enumerate(known.files):  # after all downloads
        part = parts / f"{number}"
        if remote.unpack:
            with progress.work(f"unpacking {known.name}"):
                unpack(part, target / remote.path)
        else:
            (target / remote.path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(part, target / remote.path)


def _take(known: DataSet, source: Path, target: Path) -> None:
    """Copy a folder or a single file, or unpack an archive. Records of checksums from elsewhere are removed."""
    single = _name_of_only_file(known, source)
    if source.is_dir():
        # List first: the target may be inside the source.
        for folder, _, files in list(os.walk(source, onerror=_raise, followlinks=True)):
            copied = target / Path(folder).relative_to(source)
            copied.mkdir(exist_ok=True)
            for name in files:
                shutil.copyfile(Path(folder, name), copied / name)
    elif source.is_file() and is_archive(source):
        unpack(source, target)
    elif source.is_file() and single is not None:
        (target / single).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target / single)
    elif not source.exists():
        raise DataError(f"{source} does not exist")
    else:
        wanted = " or ".join(" and ".join(form) for form in known.forms)
        raise DataError(
            f"{source} is neither a folder nor an archive (zip, tar, tar.gz, tar.xz, tar.bz2) with {wanted}"
        )
    for record in target.rglob(RECORD):
        record.unlink()


def _name_of_only_file(known: DataSet, source: Path) -> str | None:
    """Return the name in the data set of a file that can be its only one; None if it cannot."""
    names = [form[0] for form in known.forms if len(form) == 1 and Path(form[0]).suffix == source.suffix]
    return source.name if source.name in names else next(iter(names), None)


def _raise(error: OSError) -> None:
    raise error


def _complete_one(known: DataSet, folder: Path) -> Path | None:
    """Return the folder, or its only subfolder, that is the complete data set; None if there is none."""
    if complete(known, folder):
        return folder
    inner = [path for path in folder.iterdir() if complete(known, path)]
    return inner[0] if len(inner) == 1 else None


def _seal(folder: Path) -> None:
    """Record the checksums of all files, and make the files read-only."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    (folder / RECORD).write_text(json.dumps({path.relative_to(folder).as_posix(): sha256(path) for path in paths}))
    for path in [*paths, folder / RECORD]:
        path.chmod(0o444)
    folder.chmod(0o755)  # independent of the umask


def _check_counts(known: DataSet, folder: Path, origin: object) -> None:
    if not known.counts:
        return
    counter = _named(known.counter)
    try:
        found = counter(folder)
    except AgentkitError:
        raise
    except Exception as error:  # damaged files make readers raise any error
        raise DataError(f"{known.name} in {origin} cannot be read: {type(error).__name__}: {error}") from error
    wrong = [
        f"{found.get(what, 0)} {what} instead of {count}"
        for what, count in known.counts.items()
        if found.get(what) != count
    ]
    if wrong:
        raise DataError(f"{known.name} in {origin} has {', '.join(wrong)}")


def _named(target: str) -> Callable[..., Mapping[str, int]]:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
