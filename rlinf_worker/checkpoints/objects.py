"""Checkpoints in an object store: s3://bucket/prefix, gs://bucket/prefix.

    <uri>/b0-40/actor/config.json                         a file
    <uri>/b0-40/actor/model.bin/.part-00001-of-00012      a twelfth of one that is larger than PART_BYTES

A large file goes up in parts that are objects of their own, and not as the store's multi-part upload: of one that a
killed process has begun, the store keeps and bills parts that no listing shows, and only a lifecycle rule of the bucket
removes. These are seen, and go with the folder that they are in (docs/adr/0032).

Credentials are the pod's: variables (AWS_ACCESS_KEY_ID, ...), a web identity, the machine's metadata. What the library
says of an error may hold a key's id or a signed address, so that neither goes into a log or a sentence: the status and
the store's own word for it do.
"""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO, Final
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import GCSStore, S3Store

from rlinf_worker.checkpoints.own_disk import OwnDisk
from rlinf_worker.checkpoints.place import Owed

PART_BYTES: Final = 32 * 2**20
"""The bytes of a file that are sent, and kept in memory, at once: within REQUEST_S at 10 Mbit/s, with few requests for
that."""
STREAMS: Final = 4  # parts under way at once: what a link needs that has 0.1 s to the store, and 128 MiB of memory
REQUEST_S: Final = 30.0  # for one request and its answer
CONNECT_S: Final = 5.0
RETRIES: Final = 5  # 0.1 s, doubled: through a store that is busy for seconds
RETRY_S: Final = 15.0
"""Seconds after which no request is repeated: an outage costs a checkpoint, and not the training. With REQUEST_S,
twice, less than the driver waits for the last checkpoint: a job whose store swallows all fails, and is not taken for
complete."""
BUFFER_BYTES: Final = 2**20  # that are read ahead of who reads parts of a file

_PART: Final = re.compile(r"^(.+)/\.part-[0-9]{5}-of-[0-9]{5}$")
_CODE: Final = re.compile(r"<Code>(\w+)</Code>")
_STATUS: Final = re.compile(r"status code: ([0-9]{3})")
_NO_BUCKET: Final = re.compile(r"NoSuchBucket|bucket does not exist")  # Amazon's word, and Google's
_FULL: Final = ("QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "InsufficientStorage")
WANTED: Final = "a bucket in which the pods of the job may list, read, write and delete objects"
_RIGHTS: Final = "give these rights to the pods' service account, or to the key in the pools' templates"


class StoreRefused(OSError):
    """A store's refusal, in words for people."""

    def __init__(self, number: int, got: str, *, next: str, passes: bool = False) -> None:
        super().__init__(number, got)
        self.owed = Owed(got=got, wanted=WANTED, next=next, passes=passes)


def refused(text: str, *, uri: str) -> StoreRefused:
    """What the library says of an error, as what a person can do about it.

    >>> refused("... status code: 507 ...: <Code>XMinioStorageFull</Code>", uri="s3://ckpt/ppo").owed.got
    'no room (507 XMinioStorageFull)'
    """
    code, status = _CODE.search(text), _STATUS.search(text)
    said = " ".join(found[1] for found in (status, code) if found)
    bucket = urlsplit(uri).netloc
    if (code and code[1] in _FULL) or (status and status[1] == "507"):
        next = "raise the bucket's quota or lower spec.checkpoint.keep"
        return StoreRefused(errno.EDQUOT, f"no room ({said})", next=next)
    if _NO_BUCKET.search(text):
        return StoreRefused(errno.ENXIO, f"no bucket {bucket!r}", next="make it or correct spec.checkpoint.uri")
    if "169.254.169.254" in text or "metadata.google.internal" in text:
        return StoreRefused(errno.EACCES, "no credentials", next=_RIGHTS)
    if status and status[1] in ("401", "403"):
        return StoreRefused(errno.EACCES, f"access denied ({said})", next=_RIGHTS)
    if "without LOCATION" in text:
        got = f"bucket {bucket!r} of another region"
        return StoreRefused(errno.EXDEV, got, next="set AWS_REGION in the pools' templates")
    if status is None:
        next = "look at the pods' network, and at AWS_ENDPOINT_URL where the store is not Amazon's"
        return StoreRefused(errno.EHOSTUNREACH, "no answer", next=next, passes=True)
    passes = status[1] == "429" or status[1].startswith("5")
    next = "look at the store; it is tried again" if passes else "look at the store, and at spec.checkpoint.uri"
    return StoreRefused(errno.EIO, f"an answer of {said}", next=next, passes=passes)


@dataclass(frozen=True, slots=True)
class Stored:
    """An object that is a file, or a part of one."""

    name: str
    size: int


class Objects:
    """`Objects("s3://bucket/prefix")`. `moved` is called as bytes go and come, from any thread."""

    def __init__(self, uri: str, *, moved: Callable[[], None] = lambda: None) -> None:
        self._uri, self._moved = uri.rstrip("/"), moved
        self.what = f"the checkpoint place {self._uri}"
        self._disk = OwnDisk(self._uri)
        kind = GCSStore if uri.startswith("gs://") else S3Store
        self._store: GCSStore | S3Store = kind.from_url(
            self._uri,
            client_options={
                "timeout": timedelta(seconds=REQUEST_S),
                "connect_timeout": timedelta(seconds=CONNECT_S),
                "allow_http": True,  # where the endpoint says http://, and nowhere else
            },
            retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_S)},
        )

    def at(self, name: str) -> str:
        return f"{self._uri}/{name}" if name else self._uri

    def owed(self, error: OSError, *, to_read: bool = False) -> Owed:
        if isinstance(error, StoreRefused):
            return error.owed
        next = "look at the pod's own disk, on which a shard lies until it is sent (TMPDIR)"
        return Owed(got=error.strerror or str(error), wanted=WANTED, next=next)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            if _NO_BUCKET.search(str(error)):
                raise refused(str(error), uri=self._uri) from None
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from None
        except BaseError as error:
            raise refused(str(error), uri=self._uri) from None
        self._moved()

    # --- reading ------------------------------------------------------------------------------------------------------
    def top(self) -> list[str]:
        with self._asking():
            found = obstore.list_with_delimiter(self._store)
        return [*found["common_prefixes"], *(entry["path"] for entry in found["objects"])]

    def _below(self, folder: str) -> dict[str, list[Stored]]:
        """Objects by the name of their file, in order."""
        files: dict[str, list[Stored]] = {}
        with self._asking():
            for page in obstore.list(self._store, prefix=folder):
                for entry in page:
                    name = entry["path"].removeprefix(f"{folder}/")
                    part = _PART.match(name)
                    files.setdefault(part[1] if part else name, []).append(Stored(entry["path"], entry["size"]))
        return {name: sorted(objects, key=lambda one: one.name) for name, objects in sorted(files.items())}

    def sizes(self, folder: str) -> dict[str, int]:
        return {name: sum(one.size for one in objects) for name, objects in self._below(folder).items()}

    def exists(self, name: str) -> bool:
        try:
            with self._asking():
                obstore.head(self._store, name)
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str) -> str:
        with self._asking():
            return bytes(obstore.get(self._store, name).bytes()).decode()

    def _range(self, name: str, *, start: int, length: int) -> bytes:
        with self._asking():
            return bytes(obstore.get_range(self._store, name, start=start, length=length)) if length else b""

    def open(self, name: str) -> BinaryIO:
        folder, _, file = name.rpartition("/")
        objects = self._below(folder).get(file)
        if objects is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.at(name))
        return io.BufferedReader(_Ranges(objects, self._range), BUFFER_BYTES)

    @contextmanager
    def folder(self, name: str, files: Mapping[str, int]) -> Iterator[Path]:
        found = self._below(name)
        try:
            to = self._disk.make("read")
            with _streams() as each:
                each(self._fetch, [(to / file, found.get(file, ())) for file in files])
            yield to
        finally:
            self._disk.discard("read")

    def _fetch(self, to: Path, objects: Sequence[Stored]) -> None:
        to.parent.mkdir(parents=True, exist_ok=True)
        with to.open("wb") as file:
            for one in objects:
                file.write(self._range(one.name, start=0, length=one.size))

    # --- writing ------------------------------------------------------------------------------------------------------
    def try_writing(self) -> None:
        self.put(".probe", "x")
        self.remove(".probe")

    def put(self, name: str, text: str) -> None:
        self._send(name, text.encode())

    def _send(self, name: str, words: bytes) -> None:
        with self._asking():
            obstore.put(self._store, name, words, use_multipart=False)

    def draft(self, name: str) -> Path:
        return self._disk.make(name)

    def take_in(self, draft: str, into: str) -> dict[str, int]:
        at, sizes, pieces = self._disk.at(draft), dict[str, int](), list[tuple[Path, str, int]]()
        os.stat(at)  # where there is no draft, it is not an empty one
        for path in sorted(path for path in at.rglob("*") if path.is_file()):
            name = path.relative_to(at).as_posix()
            sizes[name] = path.stat().st_size
            count = max(1, -(-sizes[name] // PART_BYTES))
            for number in range(count):
                part = f"/.part-{number:05}-of-{count:05}" if count > 1 else ""
                pieces.append((path, f"{into}/{name}{part}", number * PART_BYTES))
        with _streams() as each:
            each(self._send_piece, pieces)
        self.discard(draft)
        return sizes

    def _send_piece(self, path: Path, name: str, start: int) -> None:
        with path.open("rb") as file:
            file.seek(start)
            self._send(name, file.read(PART_BYTES))

    def discard(self, draft: str) -> None:
        self._disk.discard(draft)

    def remove(self, name: str) -> None:
        self._delete([name])

    def remove_all(self, folder: str) -> None:
        self.remove(f"{folder}/COMMIT")
        self._delete([one.name for objects in self._below(folder).values() for one in objects])

    def _delete(self, names: list[str]) -> None:
        try:
            with self._asking():
                obstore.delete(self._store, names)
        except FileNotFoundError:
            pass  # gs:// tells of what is not there, s3:// does not

    def tidy(self) -> None:
        return


class _Ranges(io.RawIOBase):
    """A file of which only what is asked for is fetched."""

    def __init__(self, objects: Sequence[Stored], fetch: Callable[..., bytes]) -> None:
        self._objects, self._fetch, self._at = objects, fetch, 0
        self._size = sum(one.size for one in objects)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        start = self._at
        for one in self._objects:
            if start < one.size:
                words = self._fetch(one.name, start=start, length=min(len(buffer), one.size - start))
                buffer[: len(words)] = words
                self._at += len(words)
                return len(words)
            start -= one.size
        return 0


@contextmanager
def _streams() -> Iterator[Callable[..., None]]:
    """Calls a function for each of some arguments, STREAMS at a time; after the first that fails no other begins."""
    pool = ThreadPoolExecutor(STREAMS, thread_name_prefix="checkpoint")

    def each(function: Callable[..., None], arguments: Sequence[tuple[object, ...]]) -> None:
        for future in [pool.submit(function, *one) for one in arguments]:
            future.result()

    try:
        yield each
    finally:
        pool.shutdown(cancel_futures=True)
