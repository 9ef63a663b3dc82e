"""The epochs of a job at one location: they are found, committed, and taken back."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import closing

from feeder.checkpoint.format import DamagedError
from feeder.checkpoint.store import CheckpointStore
from feeder.checkpoint.tolerate import is_unreadable, skip_damaged, tolerate_failed_removal
from feeder.errors import CheckpointError
from feeder.job.checkpoints.locations import MANIFESTS, CheckpointLocation, read_manifest_name
from feeder.job.checkpoints.manifest import Manifest, is_manifest

logger = logging.getLogger("feeder")


class Epochs:
    """What is complete at a location, of a job with these nodes. It keeps nothing in memory: every
    answer is read from the location, since other runs write there too.

    Every method raises `CheckpointError`, also where the location holds epochs of some of these
    nodes with others: there a node belongs to one job.
    """

    def __init__(self, location: CheckpointLocation, nodes: Sequence[str]) -> None:
        self.location = location
        self.nodes = sorted(nodes)
        self._store = CheckpointStore(location.url, writer=f"manifests-of-{self.nodes[0]}")

    # ---- found

    def newest(self, *, verify: bool = True, but: Container[int] = ()) -> Manifest | None:
        """The newest epoch that is complete, every byte of it checked; None where none was ever
        committed. Damaged ones are named in the log and passed over, and so are those of `but`.
        Without `verify` parts are there and say what they should: who loads one checks its bytes.
        """
        # Listed before others are looked for, so that no folder is an error of its own.
        names = self._names()
        self.check_others()
        for name in reversed(names):
            # A manifest that is removed meanwhile is no reason to say that there is no folder.
            with skip_damaged():
                manifest = self._read(name)
                if manifest.epoch in but:
                    continue
                if verify:
                    self.verify(manifest)
                else:
                    self._check_parts(manifest)
                return manifest
        if names:
            raise CheckpointError(
                f"none of the {len(names)} epochs of nodes {self.nodes!r} in {self.location.url!r} "
                "is whole; move them away to begin anew, or name another place"
            )
        return None

    def has(self, epoch: int) -> bool:
        """Whether an epoch was committed, whole or not."""
        return any(self._number(name) == epoch for name in self._names())

    def before(self, epoch: int) -> int | None:
        """The last epoch before one that was committed, whole or not; None where there is none."""
        return max((e for e in map(self._number, self._names()) if e < epoch), default=None)

    def is_newest(self, epoch: int) -> bool:
        """Whether the last that was committed, whole or not, is of this epoch."""
        return self._number(self._names()[-1]) == epoch

    def is_complete(self, epoch: int) -> bool:
        """Whether an epoch was committed, and all its parts are there."""
        try:
            return self.has(epoch) and bool(self.find(epoch))
        except CheckpointError as error:
            # A bad sector, or no right to a file, may go away: only what is missing or damaged
            # means that the epoch is not complete.
            is_missing = isinstance(error.__cause__, FileNotFoundError)
            if is_unreadable(error) or not (is_missing or isinstance(error, DamagedError)):
                raise
            logger.info("%s", error)
            return False

    def find(self, epoch: int) -> Manifest:
        """An epoch, the newest of this number, whose parts are there and say what they should."""
        names = self._names()
        found = [name for name in names if self._number(name) == epoch]
        if not found:
            self.check_others()
            raise CheckpointError(
                f"epoch {epoch} of nodes {self.nodes!r} is not complete in {self.location.url!r}, "
                f"expected one of {sorted(set(map(self._number, names)))!r}"
            )
        manifest = self._read(found[-1])
        self._check_parts(manifest)
        return manifest

    def generations(self) -> dict[int, list[int]]:
        """The generations that have committed each epoch. One listing."""
        found: dict[int, list[int]] = {}
        for name in self._names():
            _, generation, epoch = self._parse(name)
            found.setdefault(epoch, []).append(generation)
        return found

    def runs(self, after: int = 0) -> list[int]:
        """The generations of the runs that have begun to save, of those after one. One listing,
        which is short: of older runs nothing is left."""
        prefix = self.location.run_name(self.nodes)
        names = self._store.file_names(prefix, self.location.run_name(self.nodes, after))
        numbers = [name.removeprefix(prefix) for name in names]
        return sorted(int(number) for number in numbers if number.isdecimal())

    def path_of(self, manifest: Manifest) -> str:
        """Where a manifest lies, for messages."""
        return self._store.path_of(self._name(manifest))

    # ---- written

    def commit(self, manifest: Manifest) -> None:
        """Make an epoch exist: the one step that does, once all of its parts are durable."""
        with self._store as store:
            store.put(self._name(manifest), {}, meta=manifest.meta())

    def note_run(self, generation: int, run_id: str) -> bool:
        """Say that a run has begun to save, and whether it is the first of its generation to say
        so. What older runs have said is removed."""
        name = self.location.run_name(self.nodes, generation)
        older = [number for number in self.runs() if number < generation]
        with self._store as store:
            try:
                store.put(name, {}, meta={"run": generation, "id": run_id})
            except CheckpointError as error:
                if not isinstance(error.__cause__, FileExistsError):
                    raise
                # One that was written by a call that failed after it had done so is its own.
                return store.header(name).meta.get("id") == run_id
            for number in older:
                with tolerate_failed_removal():
                    store.remove(self.location.run_name(self.nodes, number), missing_ok=True)
        return True

    def take_back(self, epoch: int, generations: Iterable[int]) -> None:
        """Let an epoch exist no longer, so that its parts can be written again."""
        for generation in generations:
            name = self.location.manifest_name(self.nodes, generation, epoch)
            self._store.remove(name, missing_ok=True)

    def remove(self, epoch: int, generations: Iterable[int]) -> None:
        """Remove an epoch, its parts first: where that is cut short, what is left of it is found by
        its manifest, and removed the next time."""
        # The other way round a removal that is cut short would leave parts that nothing names.
        with closing(self.location.open_database(self.nodes[0])) as database:
            for node in self.nodes:
                database.remove(self.location.part_name(node, epoch), missing_ok=True)
        self.take_back(epoch, generations)

    def prune(self, keep: int) -> tuple[list[int], int]:
        """Remove the oldest epochs until `keep` are left; returns those, and how many are left.
        The newest that is whole stays in any case, and what cannot be removed, which is named in
        the log."""
        known = self.generations()
        whole = self.newest()
        removed = []
        for epoch in in_order(known)[:-keep]:
            if whole is not None and epoch != whole.epoch:
                with tolerate_failed_removal():
                    self.remove(epoch, known[epoch])
                    removed.append(epoch)
        return removed, len(known) - len(removed)

    # ---- names

    def _name(self, manifest: Manifest) -> str:
        return self.location.manifest_name(self.nodes, manifest.generation, manifest.epoch)

    def _parse(self, name: str) -> tuple[str, int, int]:
        return read_manifest_name(self.location, name) or ("", 0, 0)

    def _number(self, name: str) -> int:
        return self._parse(name)[2]

    def _names(self) -> list[str]:
        """The manifests of this job, from old to new."""
        key = self.nodes[0]
        names = self._store.file_names(f"{self.location.manifests_prefix}{key}.g")
        ours = [name for name in names if self._parse(name)[0] == key]
        return sorted(ours, key=lambda name: self._parse(name)[1:])

    # ---- checked

    def _read(self, name: str) -> Manifest:
        path = self._store.path_of(name)
        manifest = Manifest.from_meta(self._store.get(name).meta, path)
        if sorted(manifest.parts) != self.nodes:
            raise self._others_error(path, sorted(manifest.parts))
        return manifest

    def check_others(self) -> None:
        """Raise where a node of this job is in an epoch with other nodes."""
        newest: dict[str, str] = {}
        for name in sorted(self._store.file_names(self.location.manifests_prefix), key=self._parse):
            if read_manifest_name(self.location, name):
                newest[self._parse(name)[0]] = name
        for name in newest.values():
            try:
                manifest = Manifest.from_meta(self._store.get(name).meta, name)
            except CheckpointError as error:
                # One that is damaged, or of a newer version, is its own job's affair, which names
                # it. One that cannot be read may hold a node of this job.
                if is_unreadable(error):
                    raise
                continue
            nodes = sorted(manifest.parts)
            if set(nodes) & set(self.nodes) and nodes != self.nodes:
                raise self._others_error(self._store.path_of(name), nodes)

    def _others_error(self, path: str, nodes: list[str]) -> CheckpointError:
        return CheckpointError(
            f"{path!r} is of nodes {nodes!r}, this job has {self.nodes!r}; run it with the same "
            "nodes, or keep its checkpoints in another place"
        )

    def _check_parts(self, manifest: Manifest) -> None:
        """Raise `DamagedError` unless every part claims to be what the manifest means."""
        with closing(self.location.open_database(self.nodes[0])) as database:
            for node, part in manifest.parts.items():
                name = self.location.part_name(node, manifest.epoch)
                path = database.path_of(name)
                try:
                    digest = database.digest_of(name)
                except CheckpointError as error:
                    if not isinstance(error.__cause__, FileNotFoundError):
                        raise
                    raise self._part_error(manifest, f"its part {path!r} is missing") from error
                if digest != part.digest:
                    raise self._part_error(manifest, f"its part {path!r} is another than it says")

    def verify(self, manifest: Manifest) -> None:
        """Raise `DamagedError` unless every byte of every part is what it was."""
        self._check_parts(manifest)
        with closing(self.location.open_database(self.nodes[0])) as database:
            for node in manifest.parts:
                database.verify(self.location.part_name(node, manifest.epoch))

    def _part_error(self, manifest: Manifest, what: str) -> DamagedError:
        return DamagedError(
            f"epoch {manifest.epoch} of {self.path_of(manifest)!r} is not whole: {what}; put that "
            "file back, or resume from another epoch"
        )


def in_order(generations: Mapping[int, Sequence[int]]) -> list[int]:
    """Epochs from old to new, of the generations that have committed each."""
    return sorted(generations, key=lambda epoch: (max(generations[epoch]), epoch))


def read_manifests(location: CheckpointLocation, epoch: int) -> list[Manifest]:
    """The manifests of an epoch, of whatever jobs, from new to old. Raises `CheckpointError`."""
    store = CheckpointStore(location.url)
    named = [
        (read_manifest_name(location, name), name)
        for name in store.file_names(location.manifests_prefix)
    ]
    found = sorted((key[1], name) for key, name in named if key is not None and key[2] == epoch)
    return [
        Manifest.from_meta(store.get(name).meta, store.path_of(name)) for _, name in found[::-1]
    ]


def jobs_in(store: CheckpointStore) -> list[Epochs]:
    """The epochs of each job that has any in a store. Raises `CheckpointError`."""
    location = CheckpointLocation(url=store.url, db_type="file")
    # A job is known by its first node; the newest manifest of each says its nodes.
    newest: dict[str, str] = {}
    for name in sorted(store.file_names(MANIFESTS), key=lambda n: _order(location, n)):
        if found := read_manifest_name(location, name):
            newest[found[0]] = name
    jobs = []
    for name in newest.values():
        manifest = Manifest.from_meta(store.get(name).meta, store.path_of(name))
        jobs.append(Epochs(_location_of(store, manifest, ""), list(manifest.parts)))
    return jobs


def _order(location: CheckpointLocation, name: str) -> tuple[int, ...]:
    return (read_manifest_name(location, name) or ("", 0, 0))[1:]


def _location_of(store: CheckpointStore, manifest: Manifest, stem: str) -> CheckpointLocation:
    """Where the parts of a manifest lie, and as what: a store's own files, or else LMDBs."""
    location = CheckpointLocation(url=store.url, stem=stem, db_type="file")
    parts = [location.part_name(node, manifest.epoch) for node in manifest.parts]
    is_there = any(os.path.lexists(store.path_of(part)) for part in parts)
    if is_there and not any(map(store.exists, parts)):
        return dataclasses.replace(location, db_type="lmdb")
    return location


def verify_parts(store: CheckpointStore, name: str) -> None:
    """Where a checkpoint is the manifest of an epoch, read all of the parts that it means. Raises
    `CheckpointError` where one is not there, not whole, or another."""
    meta = store.get(name).meta
    if not (name.startswith(MANIFESTS) and is_manifest(meta)):
        return
    manifest = Manifest.from_meta(meta, store.path_of(name))
    key = f"{min(manifest.parts)}.g{manifest.generation}.{manifest.epoch}"
    stem = name.rpartition("/")[2].removesuffix(key)
    Epochs(_location_of(store, manifest, stem), list(manifest.parts)).verify(manifest)
