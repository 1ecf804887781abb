"""Volumes as folders: made before a pod's first container, refreshed when a Secret changes, removed with the pod.

For: `pod_life.py`. Not for: mounting; `environment.Paths` rewrites paths instead.

| volume | folder |
|---|---|
| emptyDir | `<scratch>/<pod>/<name>`; medium Memory: below /dev/shm |
| secret, configMap, projected, downwardAPI | `<memory>/<pod>/<name>`: keys never reach a disk, as with a kubelet |
| persistentVolumeClaim | `<work_dir>/claims/<claim>`, kept |

The scratch folders have short names of their own (`Scratch`), because a unix socket's path may have 107 bytes and a
work dir can be anywhere. Projected files are replaced as the kubelet does it: a new folder, and one rename of the
link ..data.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlinf_api.errors import UserError
from rljob.local import room, shim
from rljob.local.environment import REFERENCES, Paths, PodFacts, Sources, field_value, source_name
from rljob.local.objects import Manifest
from rljob.local.status import CONTAINER_CREATING, NotYet

MEMORY_ROOT = Path("/dev/shm")
PREFIX = "rlj"
DEFAULT_MODE = 0o644
FILE_SOURCES = ("secret", "configMap", "downwardAPI")
_numbers = itertools.count()  # of the backends of this process: a run has one, a test may have two at once

Files = dict[str, tuple[bytes, int]]  # path in the volume -> content, mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """Two folders of this backend, named after its process: a later one can tell and clear what a crash left."""

    disk: Path
    memory: Path

    @classmethod
    def make(cls) -> Scratch:
        remove_leftovers()
        name = f"{PREFIX}-{os.getpid()}-{shim.stat_fields(os.getpid())[19]}-{next(_numbers)}"
        made = cls(disk=Path(tempfile.gettempdir(), name), memory=MEMORY_ROOT / name)
        for folder in (made.disk, made.memory):
            try:
                folder.mkdir(mode=0o700)
            except OSError as err:
                raise UserError(
                    f"folder {folder} cannot be made", got=room.told(err, folder), next="make room or set TMPDIR"
                ) from err
        return made

    def remove(self) -> None:
        for folder in (self.disk, self.memory):
            shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers() -> None:
    """Backends that died together with their shims left them; everybody else has cleaned up."""
    for root in (Path(tempfile.gettempdir()), MEMORY_ROOT):
        for folder in root.glob(f"{PREFIX}-*-*-*"):
            _, pid, start_time, _ = folder.name.split("-", 3)
            if not pid.isdigit() or _is_alive(int(pid), start_time):
                continue
            if folder.is_dir() and folder.stat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)


def _is_alive(pid: int, start_time: str) -> bool:
    fields = shim.stat_fields(pid)
    return bool(fields) and fields[0] != "Z" and fields[19] == start_time


class PodVolumes:
    """The volumes of one pod. `prepare` until it no longer raises NotYet, `refresh` at will, `remove` at the end."""

    def __init__(self, pod: Manifest, *, scratch: Scratch, number: int, claims: Path) -> None:
        self._pod = pod
        self._claims = claims
        self.folders = [scratch.disk / str(number), scratch.memory / str(number)]
        self._disk, self._memory = self.folders

    def prepare(self, *, facts: PodFacts, sources: Sources) -> None:
        for volume in self._volumes():
            try:
                self._prepare_one(volume, facts=facts, sources=sources)
            except OSError as err:
                why = f"{room.told(err, self.folder(volume))}; make room there"
                raise _mount_error(str(volume["name"]), why, is_of_machine=True) from err

    def _prepare_one(self, volume: Manifest, *, facts: PodFacts, sources: Sources) -> None:
        files = projected_files(volume, facts=facts, sources=sources)
        if files is not None:
            replace_files(self.folder(volume), files)
        else:
            self.folder(volume).mkdir(parents=True, exist_ok=True)

    def refresh(self, *, facts: PodFacts, sources: Sources) -> None:
        """A Secret that was deleted meanwhile leaves its files as they are, as a kubelet does."""
        try:
            self.prepare(facts=facts, sources=sources)
        except NotYet:
            return

    def folder(self, volume: Manifest) -> Path:
        if claim := volume.get("persistentVolumeClaim"):
            return self._claims / str(claim["claimName"])
        on_disk = "emptyDir" in volume and (volume["emptyDir"] or {}).get("medium") != "Memory"
        return (self._disk if on_disk else self._memory) / str(volume["name"])

    def paths_of(self, container: Manifest) -> Paths:
        folders = {volume["name"]: self.folder(volume) for volume in self._volumes()}
        mounts = []
        for mount in container.get("volumeMounts") or []:
            target = folders[mount["name"]] / mount["subPath"] if mount.get("subPath") else folders[mount["name"]]
            if mount.get("subPath") and not target.exists():
                target.mkdir(parents=True)
            mounts.append((mount["mountPath"], str(target)))
        return Paths(mounts=tuple(mounts))

    def termination_file(self, container: Manifest) -> tuple[Paths, Path]:
        """Where the container's last words go: in the volume that its path lies in, else a file of its own."""
        path = container.get("terminationMessagePath") or "/dev/termination-log"
        paths = self.paths_of(container)
        file = Path(paths.translate(path))
        if str(file) == path:
            file = self._disk / f"termination-{container['name']}"
            paths = Paths(mounts=(*paths.mounts, (path, str(file))))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"")
        return paths, file

    def remove(self) -> None:
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _volumes(self) -> list[Manifest]:
        volumes: list[Manifest] = self._pod["spec"].get("volumes") or []
        return volumes


def projected_files(volume: Manifest, *, facts: PodFacts, sources: Sources) -> Files | None:
    """None: this volume is a plain folder."""
    if "projected" in volume:
        mode, parts = volume["projected"].get("defaultMode", DEFAULT_MODE), volume["projected"].get("sources") or []
    elif kind := next((kind for kind in FILE_SOURCES if kind in volume), ""):
        mode, parts = volume[kind].get("defaultMode", DEFAULT_MODE), [volume]
    else:
        return None
    files: Files = {}
    for part in parts:
        for kind in (kind for kind in FILE_SOURCES if kind in part):
            files |= _one_source(kind, part[kind], mode=mode, volume=volume["name"], facts=facts, sources=sources)
    return files


def _one_source(
    kind: str, source: Manifest, *, mode: int, volume: str, facts: PodFacts, sources: Sources
) -> Iterator[tuple[str, tuple[bytes, int]]]:
    if kind == "downwardAPI":
        for item in source.get("items") or []:
            value = field_value(item["fieldRef"]["fieldPath"], facts) or ""
            yield item["path"], (value.encode(), item.get("mode", mode))
        return
    title, name = REFERENCES[kind], source_name(source)
    data = sources.get((title, name))
    if data is None:
        if not source.get("optional"):
            raise _mount_error(volume, f'{title.lower()} "{name}" not found')
        return
    items = source.get("items") or [{"key": key, "path": key} for key in data]
    for item in items:
        if item["key"] in data:
            yield item["path"], (data[item["key"]], item.get("mode", mode))
        elif not source.get("optional"):
            raise _mount_error(volume, f"references non-existent {title.lower()} key: {item['key']}")


def _mount_error(volume: str, why: str, *, is_of_machine: bool = False) -> NotYet:
    what = f'MountVolume.SetUp failed for volume "{volume}": {why}'
    return NotYet(what, waiting_reason=CONTAINER_CREATING, event_reason="FailedMount", is_of_machine=is_of_machine)


def replace_files(folder: Path, files: Mapping[str, tuple[bytes, int]]) -> None:
    """All files change at once for a reader that goes through ..data; nothing is touched when nothing changed."""
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "..data"
    if link.exists() and _read_files(link) == {path: content for path, (content, _) in files.items()}:
        return
    old = link.resolve() if link.exists() else None
    fresh = Path(tempfile.mkdtemp(prefix="..", dir=folder))
    fresh.chmod(0o755)
    for path, (content, mode) in files.items():
        target = fresh / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        target.chmod(mode)
    new_link = folder / "..data_new"
    new_link.symlink_to(fresh.name)
    os.replace(new_link, link)
    tops = {path.split("/")[0] for path in files}
    for top in tops:
        if not (folder / top).is_symlink():
            (folder / top).symlink_to(f"..data/{top}")
    for entry in folder.iterdir():
        if not entry.name.startswith("..") and entry.name not in tops:
            entry.unlink()
    if old is not None:
        shutil.rmtree(old)


def _read_files(folder: Path) -> dict[str, bytes]:
    root = folder.resolve()
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
