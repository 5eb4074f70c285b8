"""What was read once is kept on disk, beside the trace or in the user's cache folder.

An entry is found by the content of the file and by the source of the readers: another file of the same name, or a
newer fsdpviz, reads anew. Hashing a large file takes longer than opening its entry, so that a hash is remembered with
the file's size, times and inode, as git does: while those are the same, so is the content. A file so young that it
could change again within its clock's tick is hashed each time.

Any number of processes may read and write: an entry is made under another name and then renamed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

from ..files.parts import Part
from ..files.sniff import GZIP, PACKED
from ..files.sources import Source
from ..table import Note
from .stored import StoredError, can_be_stored, read_parts, write_parts

FOLDER = ".fsdpviz_cache"
WORTH_BYTES = 4 << 20  # of JSON: a smaller file is read again in less time than one notices
MOST_BYTES = 4 << 30  # of all entries in one folder; the least recently used are dropped
_TICK_NS = 2_000_000_000
_ENTRY = re.compile(r"[0-9]+-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{8}")
_HALF_MADE = (".new-", ".old-")


def cached(source: Source, read: Callable[[], Sequence[Part]]) -> Sequence[Part]:
    """What ``read`` gives, or gave when the same file was read before.

    Small files (WORTH_BYTES) and those that are gone when the trace is open are read each time. A damaged entry is
    noted and made anew; where nothing can be written, nothing is.
    """
    try:
        stamp = _Stamp.of(source.path)
        if source.is_temporary or not _is_worth(source.path, stamp):
            return read()
        roots = _roots(source.path)
        content = _known_content(source.path, stamp, roots)
    except OSError:  # reading it says why
        return read()
    damage: list[Note] = []
    if content is not None:
        name = _entry_name(source, stamp, content)
        for root in roots:
            if (root / name).is_dir():
                try:
                    found = read_parts(root / name, source.name)
                    _remember(root, source.path, stamp, content)
                    return found
                except StoredError as error:
                    damage = [Note("damaged cache entry, read again and rewritten", 1, str(error)[-80:])]
    with ThreadPoolExecutor(1, thread_name_prefix="fsdpviz-hash") as pool:  # hashing leaves the interpreter free
        hashing = pool.submit(_content, source.path) if content is None else None
        parts = read()
        try:
            content = hashing.result() if hashing else content
        except OSError:
            return parts
    if content is not None and _is_still(source.path, stamp) and can_be_stored(parts):
        _store(roots, source, stamp, content, parts)
    return [replace(part, tables=replace(part.tables, notes=(*part.tables.notes, *damage))) for part in parts]


def is_cached(source: Source) -> bool:
    """True where ``cached`` need not read the file, or where reading it takes no time to speak of."""
    try:
        stamp = _Stamp.of(source.path)
        if not _is_worth(source.path, stamp):
            return True
        roots = _roots(source.path)
        content = None if source.is_temporary else _known_content(source.path, stamp, roots)
        return content is not None and any((root / _entry_name(source, stamp, content)).is_dir() for root in roots)
    except OSError:
        return False


# -- which file it is


@dataclass(frozen=True)
class _Stamp:
    size: int
    modified_ns: int
    changed_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> _Stamp:
        found = path.stat()
        return cls(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def _is_still(path: Path, stamp: _Stamp) -> bool:
    """False too where the file is gone by now."""
    try:
        return _Stamp.of(path) == stamp
    except OSError:
        return False


def _is_worth(path: Path, stamp: _Stamp) -> bool:
    if stamp.size >= WORTH_BYTES:
        return True
    with path.open("rb") as file:
        return stamp.size >= WORTH_BYTES // PACKED and file.read(2) == GZIP


def _content(path: Path) -> str:
    digest = blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _known_content(path: Path, stamp: _Stamp, roots: Sequence[Path]) -> str | None:
    """The content's hash: as remembered, or made anew where an entry for a file of this size exists; None where no
    entry can be this file's, so that hashing need not come first.
    """
    for root in roots:
        if (content := _remembered(root, path, stamp)) is not None:
            return content
    prefix = f"{stamp.size}-"
    if any(entry.name.startswith(prefix) for root in roots if root.is_dir() for entry in root.iterdir()):
        return _content(path)
    return None


def _memory(root: Path, path: Path) -> Path:
    return root / f"seen-{blake2b(os.fsencode(path.absolute()), digest_size=16).hexdigest()}.json"


def _remembered(root: Path, path: Path, stamp: _Stamp) -> str | None:
    try:
        memory = _memory(root, path)
        if not memory.is_file():  # a pipe would never end
            return None
        seen = json.loads(memory.read_text(encoding="utf-8"))
        content = seen.pop("content")
    except (OSError, ValueError, AttributeError, KeyError):
        return None
    return content if seen == asdict(stamp) and isinstance(content, str) and content.isalnum() else None


def _remember(root: Path, path: Path, stamp: _Stamp, content: str) -> None:
    if time.time_ns() - max(stamp.modified_ns, stamp.changed_ns) < _TICK_NS or _remembered(root, path, stamp):
        return
    made = None
    try:
        handle, name = tempfile.mkstemp(dir=root, prefix=".new-")
        made = Path(name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(asdict(stamp) | {"content": content}, file)
        made.replace(_memory(root, path))
    except OSError:  # a full disk
        pass
    finally:
        if made:
            made.unlink(missing_ok=True)


@lru_cache(maxsize=1)
def reader_version() -> str:
    """A digest of the readers' own source, so that nobody has to remember to raise a number."""
    package = Path(__file__).parents[2]
    digest = blake2b(digest_size=8)
    for file in sorted((*(package / "trace").rglob("*.py"), *(package / "base").glob("*.py"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _entry_name(source: Source, stamp: _Stamp, content: str) -> str:
    told = json.dumps(sorted(source.lane_names.items())) + source.format
    return f"{stamp.size}-{content}-{reader_version()}-{blake2b(told.encode(), digest_size=4).hexdigest()}"


# -- where entries are


def _roots(path: Path) -> list[Path]:
    """The folders that may hold an entry; a new one goes to the first that can be written. A link beside the trace is
    not followed: it may lead to any folder, and whoever sent the trace may have made it.
    """
    beside = path.absolute().parent
    # root may write anywhere, so that the mode is asked too: a folder that was made read-only stays as it is
    is_open = bool(beside.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH)) and os.access(beside, os.W_OK)
    roots = [beside / FOLDER] if is_open and not (beside / FOLDER).is_symlink() else []
    with suppress(RuntimeError):  # a user without a home, as in some containers
        roots.append(user_folder())
    return roots


def user_folder() -> Path:
    """The user's cache folder for traces, as each system wants it."""
    if stated := os.environ.get("XDG_CACHE_HOME"):
        return Path(stated) / "fsdpviz" / "traces"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "fsdpviz" / "traces"
    if sys.platform == "win32" and (stated := os.environ.get("LOCALAPPDATA")):
        return Path(stated) / "fsdpviz" / "Cache" / "traces"
    return Path.home() / ".cache" / "fsdpviz" / "traces"


def _store(roots: Sequence[Path], source: Source, stamp: _Stamp, content: str, parts: Sequence[Part]) -> None:
    for root in roots:
        made = None
        try:
            root.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(dir=root, prefix=".new-"))
            write_parts(made, parts)
            _put(made, root / _entry_name(source, stamp, content))
            _remember(root, source.path, stamp, content)
            _prune(root)
            return
        except OSError:
            if made:  # a full disk
                return
        finally:
            if made:
                shutil.rmtree(made, ignore_errors=True)


def _put(made: Path, entry: Path) -> None:
    try:
        made.rename(entry)
    except OSError:  # there is one: of another process, as good as this one, or the damaged one
        away = Path(tempfile.mkdtemp(dir=entry.parent, prefix=".old-"))
        try:
            entry.rename(away / "entry")
            made.rename(entry)
        finally:
            shutil.rmtree(away, ignore_errors=True)


def _prune(root: Path) -> None:
    """Drops the oldest entries, and what a process that died left half made, until MOST_BYTES are enough. Nothing of
    another name is touched.
    """
    ages = {child: child.lstat().st_mtime for child in root.iterdir()}
    left = MOST_BYTES
    for child in sorted(ages, key=lambda child: ages[child], reverse=True):
        if child.name.startswith(_HALF_MADE):
            if time.time() - ages[child] > 3600:
                _remove(child)
        elif _ENTRY.fullmatch(child.name) and child.is_dir():
            left -= sum(file.stat().st_size for file in child.iterdir())
            if left < 0:
                _remove(child)


def _remove(made: Path) -> None:
    if made.is_dir() and not made.is_symlink():
        shutil.rmtree(made, ignore_errors=True)
    else:
        made.unlink(missing_ok=True)
