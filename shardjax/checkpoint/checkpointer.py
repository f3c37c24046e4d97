"""Checkpoints of a run: saved while it goes on, restored on any mesh.

A step directory has `arrays` (parameters, optimizer state and all else that is an array,
by Orbax), `tables` (the rows of embedding tables, by key) and the manifest, with what is
neither: the loader's position, the configuration, and what the arrays are.
"""

import copy
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, Protocol

from shardjax.checkpoint.arrays import ArrayWriter, describe, restore
from shardjax.checkpoint.chain import (
    Cycle,
    Increments,
    chain_of,
    parts_of,
    read_chain,
)
from shardjax.checkpoint.content import (
    arrays_of,
    fields_of,
    lengths_of,
    metrics_of,
    shared_of,
    target_of,
    with_model_tables,
    with_tables_as_saved,
    without_padding,
)
from shardjax.checkpoint.interval import SavePolicy
from shardjax.checkpoint.jointly import Peers, joined
from shardjax.checkpoint.manifest import Manifest, check_details
from shardjax.checkpoint.reading import as_step
from shardjax.checkpoint.rows import RowWriter, read_all_counts
from shardjax.checkpoint.steps import StepFolder
from shardjax.embed import EmbeddingCollection
from shardjax.export.rows import versions
from shardjax.partition import check_sequence
from shardjax.together import PeerError

_log = logging.getLogger(__name__)
PREEMPTED = 75  # the exit code of a run that saved and ended as it was asked to
_AHEAD = 64  # batches that may be planned between two steps
_PACKAGES = ("shardjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


class Position(Protocol):
    """Something with a position that can be gone back to, such as a Loader."""

    def get_state(self) -> dict[str, Any]: ...

    def set_state(self, state: Mapping[str, object]) -> None: ...


@dataclass(frozen=True)
class Restored:
    """A checkpoint that a run goes on from.

    Attributes:
      step: its number.
      state: the training state.
      extra: what `save` was given.
    """

    step: int
    state: Any
    extra: dict[str, Any]


class Checkpointer:
    """Saves a run's state into a folder, a directory per step, and restores it.

    Training stands still only while the arrays are copied; rows of embedding tables are
    read a part at each step, and everything is written in the background. One save is
    in flight at a time. A step is there once it is whole: see `StepFolder`.

    Args:
      directory: of this run; made if it is not there.
      interval: when `maybe_save` saves, as of `parse_interval`: "auto", a number of steps,
        a time such as "10m", or "none".
      keep: how many of the newest steps stay, besides those that they need; None for all.
      full_every: of so many saves in a row one has all rows of the tables, and the others
        those that have changed since the one before. To restore such a step takes those
        back to the last one with all rows. 1: each save has all.
      collection: the embedding tables of the state, if it has some.
      loader: whose position goes with the state: training data are read on from there.
      config: of the run, to be kept with each step; a dict for JSON.
      last: the last step of the run: `maybe_save` saves it whatever the interval.
      max_overhead, mtbf: as of `SavePolicy`.

    Raises:
      OSError: if the folder cannot be written to, another run writes in it, or it is not
        one that all processes share.
      ValueError, TypeError: for an interval or number that is none.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp
      >>> state = {"w": jnp.arange(3.0)}
      >>> with tempfile.TemporaryDirectory() as path, Checkpointer(path) as checkpointer:
      ...     checkpointer.save(5, state)
      ...     checkpointer.wait()
      ...     found = checkpointer.restore(state)
      >>> found.step, found.state
      (5, {'w': Array([0., 1., 2.], dtype=float32)})
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        interval: Any = "none",
        keep: int | None = 3,
        full_every: int = 1,
        collection: EmbeddingCollection | None = None,
        loader: Position | None = None,
        config: dict[str, Any] | None = None,
        last: int | None = None,
        max_overhead: float = 0.035,
        mtbf: float | None = None,
    ):
        for name, number in (
            ("keep", keep),
            ("last", last),
            ("full_every", full_every),
        ):
            _check_count(name, number, none=name != "full_every")
        check_details(0, {"config": config})
        self.keep = keep
        self._collection, self._loader, self._config = collection, loader, config
        ahead = 1 if collection is None else _AHEAD
        self._policy = SavePolicy(
            interval, max_overhead=max_overhead, mtbf=mtbf, ahead=ahead
        )
        self._peers = Peers()
        self._folder = self._peers.first_opens(
            Path(directory), lambda first: StepFolder(directory, write=first)
        )
        self._increments = Increments(full_every, collection)
        self._cycle = Cycle(full_every)
        self._arrays = ArrayWriter()
        self._save: _Save | None = None
        self._unfinished: list[int] = []  # steps whose saves nobody has waited for yet
        weakref.finalize(self, _tell_of_lost, self.path, self._unfinished)
        self._last = last
        self._at: int | None = None  # the step that was saved or restored last
        self._back: int | None = None  # the step restored, until one is saved
        self._due: int | None = None  # step of the next save, announced
        self._announced = False  # what is known from the start
        self._stepped_at: float | None = None
        self._recent: list[float] = []  # seconds of steps without a save
        self._asked = threading.Event()  # this process has been asked to end the run
        self._stops = (
            False  # whether it ends: all processes know of it at the same step
        )
        self._catches = False  # whether anybody can ask

    @property
    def path(self) -> Path:
        """The folder."""
        return self._folder.path

    @property
    def policy(self) -> SavePolicy:
        """What decides when to save; see `SavePolicy.figures`."""
        return self._policy

    def steps(self) -> list[int]:
        """The steps that can be restored, ascending; one in flight is not among them."""
        return self._folder.steps()

    def inspect(self, step: int) -> Manifest:
        """What is known of a step; its files are not read."""
        return self._folder.read(step)

    def verify(self, step: int) -> None:
        """Reads all files of a step.

        Raises:
          CorruptCheckpointError: if one is not what was written.
        """
        self._folder.verify(step)

    def save(self, step: int, state: Any, extra: dict[str, Any] | None = None) -> None:
        """Starts to save a state; it may be given to the next training step afterwards.

        Waits for the save before. The rows of embedding tables are read while training
        goes on; after the last step call `wait(state)`, which reads the rest.

        Args:
          step: its number, such as steps taken.
          state: after that step.
          extra: what else is to be kept, a dict for JSON.

        Raises:
          FileExistsError: if there is such a step or a later one, and the run has not gone
            back to one before it by `restore`.
          RuntimeError: for tables in a storage or with policies that remember, if batches
            after this step have been planned and nobody has announced the save; see
            `maybe_save`.
          OSError: if the save before failed. Steps before are as they were.
        """
        self.wait(state)
        self._begin(step, state, extra)

    def _begin(self, step: int, state: Any, extra: dict[str, Any] | None) -> None:
        started = time.monotonic()
        extra = {} if extra is None else extra
        check_details(step, extra)
        step = as_step(step)

        def begin() -> list[Any]:
            if not self._peers.is_first:
                return []
            self._make_room(step)
            return [str(self._folder.begin(step)), self._folder.steps()]

        path, steps = self._peers.together(begin)[0]
        folder = Path(path)
        save = _Save(step, folder, started, self._at)
        self._at, self._back = step, None
        try:
            details: dict[str, Any] = {
                "loader": None if self._loader is None else self._loader.get_state(),
                "config": self._config,
                "extra": copy.deepcopy(extra),  # it may change while it is written
                "versions": versions(_PACKAGES),
                "tables": None,
                "rows": None,
            }
            if self._collection is not None:
                base = self._increments.base(steps)
                tables = self._collection.snapshots.take(
                    state.tables, None if base is None else base[1]
                )
                save.snapshot, details["tables"] = tables
                if base is not None and save.snapshot.removed is not None:
                    save.base = base[0]
            fields = fields_of(state)
            parts = arrays_of(fields, self._collection)
            details["arrays"] = without_padding(describe(parts), lengths_of(fields))
            self._arrays.save(folder / "arrays", parts)
        except BaseException:
            save.close()
            self._discard(step)
            self._at = save.before
            raise
        self._save = save
        self._unfinished.append(save.step)
        save.thread = threading.Thread(
            target=self._write, args=(save, details), name="checkpoint", daemon=True
        )
        save.thread.start()
        save.state = state
        stall = time.monotonic() - started
        self._policy.saved(step, self._cycle.mean("stall", stall))
        self._stepped_at = None

    def _make_room(self, step: int) -> None:
        """Sees to it that the step about to be saved will be the newest."""
        steps = self._folder.steps()
        later = [s for s in steps if self._back is not None and s > self._back]
        before = [s for s in steps if s not in later]
        if before and before[-1] > step:
            raise FileExistsError(
                f"steps are saved in ascending order, and {str(self.path)!r} has the steps"
                f" {[s for s in before if s > step]} after step {step} already. Go on from"
                " one of its steps (`restore`), or give the folder of another run"
            )
        if later and step not in before:
            self._folder.leave(later)

    def _write(self, save: "_Save", details: dict[str, Any]) -> None:
        """Writes all else and commits the step; in a thread."""
        try:
            # a step is there once all processes have written their parts of it
            parts = self._peers.write(lambda: self._write_own(save, details))
            needs = () if save.base is None else (save.base,)

            def commit() -> None:
                if self._peers.is_first:
                    known = joined(details, save.base, parts)
                    self._folder.commit(save.step, details, known, needs)

            self._peers.together(commit, True)
            if self.keep is not None and self._peers.is_first:
                self._prune(self.keep)
        except PeerError as error:
            save.error = OSError(f"step {save.step} has not been saved: {error}")
        except BaseException as error:
            save.error = error
        finally:
            save.close()
            save.ended = time.monotonic()

    def _write_own(self, save: "_Save", details: Mapping[str, Any]) -> dict[str, Any]:
        """Writes this process's part; returns what there is to know of it."""
        part: dict[str, Any] = {"known": {}}
        if save.snapshot is not None:
            folder = self._peers.folder
            groups = details["tables"]["groups"]
            rows = RowWriter(save.folder / "tables" / folder, groups)
            for group, records in save.snapshot.records():
                rows.write(group, records)
            below = f"tables/{folder}/" if folder else "tables/"
            part |= {
                "folder": folder,
                "counts": rows.write_counts(save.snapshot.outline.counts),
                "written": rows.written,
                "removed": rows.write_removed(save.snapshot.removed),
                "rows": [group["rows"] for group in groups],
                "known": {below + k: v for k, v in rows.finish().items()},
            }
            save.close()
        self._arrays.wait(self._peers.any_failed)
        return part

    def _discard(self, step: int) -> None:
        """Removes what has been written of a step. Of several processes another one may
        still write: who opens the folder next removes it."""
        if self._peers.count == 1:
            self._folder.discard(step)

    def _prune(self, keep: int) -> None:
        try:
            self._folder.prune(keep)
        except OSError as error:  # the step that was saved is there nevertheless
            _log.warning("older steps of %s are still there: %s", self.path, error)

    def maybe_save(
        self,
        step: int,
        state: Any,
        extra: dict[str, Any] | Callable[[], dict[str, Any]] | None = None,
    ) -> bool:
        """Saves if it is time to. Call it after every step, and with 0 (or the step that
        the run was restored at) before the first.

        So it can announce saves before batches are planned that come after them.

        Args:
          step: steps taken, one more than the last time.
          state: after them.
          extra: as of `save`, or a function that makes it, called for a save alone.

        Returns:
          Whether a save was begun.

        Raises:
          OSError: if a save has failed; once, and after the next one was begun if that is
            due. Training can go on; of several processes it cannot: it fails in all of
            them, and some may wait for others in what has failed, so they are to end.
        """
        now = time.monotonic()
        if self._stepped_at is not None:
            seconds = now - self._stepped_at
            self._policy.stepped(step, seconds)
            if self._save is None:
                self._recent = [*self._recent[-31:], seconds]
            else:
                self._save.seconds.append(seconds)
        failure = None
        if self._catches and self._peers.any(step, self._asked.is_set()):
            self._stops = True
        due = step == self._last or (self._due is not None and step >= self._due)
        if self._save is not None:
            self._save.state = state
            try:
                if due:
                    self.wait(state)
                elif self._save.ended is not None:
                    self._end()
            except OSError as error:
                if self._peers.count > 1:  # some may wait in it: none can go on
                    raise
                failure = error  # raised below: this step is not to be missed for it
        begun = due and step != self._at
        if begun:
            self._begin(step, state, extra() if callable(extra) else extra)
        if due and self._stops:
            self.wait(state)
            _log.warning(
                "saved step %d, and now the run ends as SIGTERM asks for", step
            )
            raise SystemExit(PREEMPTED)
        if due or self._due is None or self._stops:
            self._announce(step)
        self._stepped_at = time.monotonic()
        if failure is not None:
            raise failure
        return begun

    def _announce(self, step: int) -> None:
        """Asks the policy for the next save, and says so to those who plan ahead."""
        snapshots = None if self._collection is None else self._collection.snapshots
        interval = self._policy.interval
        every = int(interval.every) if interval.kind == "steps" else None
        if snapshots is not None and not self._announced:
            # for good, before anything is planned: so none of them is missed
            if every is not None:
                snapshots.announce(every - step % every, every)
            if self._last is not None and self._last > step:
                snapshots.announce(self._last - step)
            self._announced = True
        if self._stops:
            soon = step + 1 if snapshots is None else self._announce_at(step + 1, step)
            self._due = min(soon, self._due or soon)
            return
        if every is not None:
            self._due = (step // every + 1) * every
            return
        if interval.kind == "none":
            self._due = None
            return
        ahead = 0 if snapshots is None else snapshots.ahead
        ahead = max(self._peers.together(lambda: ahead))
        # the clock of the first process decides
        due = self._peers.together(lambda: self._policy.next_step(step + ahead))[0]
        if snapshots is not None and due is not None:
            due = self._announce_at(due, step)
        self._due = due

    def _announce_at(self, due: int, step: int) -> int:
        """Announces a snapshot after step `due` or, if planning is further, as soon as
        there can be one in all processes; returns when."""
        assert self._collection is not None
        while True:
            soonest = step + self._collection.snapshots.announce(due - step)
            latest = max(self._peers.together(lambda at=soonest: at))
            if latest == due:
                return due
            due = latest

    @contextmanager
    def catch_sigterm(self) -> Iterator[None]:
        """A context, in the main thread, in which SIGTERM does not end the process at once:
        `maybe_save` saves as soon as it can, and then ends it with exit code 75.

        Schedulers send SIGTERM some seconds before they take a machine away. 75 is
        EX_TEMPFAIL of sysexits.h: the same command again goes on.
        """
        before = signal.signal(signal.SIGTERM, lambda *_: self._asked.set())
        self._catches = True
        try:
            yield
        finally:
            self._catches = False
            signal.signal(signal.SIGTERM, before)

    def wait(self, state: Any = None) -> None:
        """Waits for the save in flight, if there is one.

        Args:
          state: the present one, if steps have been taken since `save`: what of the
            rows has not been read is read now.

        Raises:
          OSError: if the save failed.
          ValueError: without the state, if rows are left that can only be read from it.
        """
        save = self._save
        if save is None:
            return
        if save.snapshot is not None and save.snapshot.left and save.ended is None:
            held = save.state if state is None else state
            if _is_gone(held):
                raise ValueError(
                    f"{save.snapshot.left} rows of the save of step {save.step} have not"
                    " been read, and training has gone on since: call `wait(state)` with"
                    " the present state"
                )
            save.snapshot.complete(held.tables)
        assert save.thread is not None
        save.thread.join()
        self._end()

    def _end(self) -> None:
        """Takes note of a save that has ended."""
        save, self._save = self._save, None
        self._unfinished.clear()
        assert save is not None and save.ended is not None and save.thread is not None
        save.thread.join()
        if save.error is None:
            slowed = None
            if self._recent and save.seconds:
                usual = median(self._recent)
                slowed = max(sum(save.seconds) - usual * len(save.seconds), 0.0)
                slowed = self._cycle.mean("slowed", slowed)
            seconds = self._cycle.most("write", save.ended - save.started)
            self._policy.written(save.step, seconds, slowed)
            if save.snapshot is not None:
                self._increments.committed(save.step, save.snapshot)
            return
        self._policy.failed(save.step)
        self._at = save.before if self._at == save.step else self._at
        self._discard(save.step)
        raise save.error

    def restore(
        self,
        target: Any,
        step: int | None = None,
        *,
        ignore: Sequence[str] = (),
        cast: bool = False,
        on_corrupt: Literal["error", "fallback"] = "error",
    ) -> Restored:
        """Reads a step into a state that is laid out like another.

        The mesh, the ZeRO stage, the storage and the placement of tables may differ from
        those it was saved with, and so may the number of rows of a table with a
        `DeviceVocabulary`; on other devices such a table goes through the host's memory.

        If the run goes on from a step that is not the newest, later ones are of no use to
        it: the next save renames them to `left_step_N`, which nobody finds and nothing
        removes.

        Args:
          target: a new state, such as of `init_state`. Its tables are given away.
          step: which; None for the newest.
          ignore: patterns of what may differ, such as "opt_state/*", "tables/item" or
            "tables/item/row_state": there the target stays as it is.
          cast: whether floats may have another dtype, and integers where they fit.
          on_corrupt: what to do if the newest step is not what was written: "error", or
            "fallback" to the newest one that is. A step that is named must be good.

        Raises:
          FileNotFoundError: if there is no such step, or none at all.
          CorruptCheckpointError: if it is not what was written.
          TypeError: for an `ignore` that is no sequence, such as a string.
          ValueError: if something is missing, too much, or of another shape or dtype: all
            of it is listed. Or if the keys of a table find no room on the new devices.
        """
        check_sequence("ignore", ignore)
        self.wait(None)
        named = step is not None
        if step is None:
            step = self._folder.newest_valid(on_corrupt)
            if step is None:
                raise FileNotFoundError(
                    f"there is no checkpoint in {str(self.path)!r}. Train without"
                    " restoring, or give the folder of another run"
                )
        chain = chain_of(self._folder, step)
        for part in chain if named else ():  # else they have been verified
            self._folder.verify(part.step)
        found = chain[0]
        details = found.details
        tables = details["tables"]
        collection = self._collection
        dense = ignore
        if collection is not None:  # which has patterns of its own
            dense = [p for p in ignore if not p.startswith("tables/") and p != "seed"]
        arrays, fields = details["arrays"], fields_of(target)
        saved = with_tables_as_saved(fields, arrays, dense)
        wanted = target_of(saved, collection, tables, arrays, step)
        parts = restore(
            found.path / "arrays",
            arrays,
            wanted,
            ignore=dense,
            cast=cast,
            lengths=lengths_of(saved),
        )
        parts = with_model_tables(parts, fields, saved, collection)
        if collection is not None and tables is not None:
            slabs, mark = collection.snapshots.restore(
                target.tables,
                tables,
                read_chain(chain),
                read_all_counts([(p, x["counts"]) for p, x in parts_of(found)]),
                ignore=ignore,
                cast=cast,
            )
            self._increments.restored(step, len(chain), mark)
            parts["tables"] = shared_of(slabs, collection, tables, parts["tables"])
            if "metrics" in parts and tables["devices"] != collection.devices:
                parts["metrics"] = metrics_of(parts["metrics"], target.metrics)
        if self._loader is not None:
            if details["loader"] is None:
                raise ValueError(
                    f"step {step} in {str(self.path)!r} was saved without a loader, and"
                    " this Checkpointer has one: training data would be read from the"
                    " start. Restore with a Checkpointer without `loader`"
                )
            self._loader.set_state(details["loader"])
        self._at = self._back = step
        names = set(parts)
        state = parts["state"] if names == {"state"} else target.replace(**parts)
        return Restored(step, state, details["extra"])

    def close(self, state: Any = None) -> None:
        """Waits, ends the threads, and lets others write in the folder.

        Args:
          state: as of `wait`.

        Raises:
          OSError, ValueError: as of `wait`.
        """
        try:
            self.wait(state)
        finally:
            save, self._save = self._save, None
            self._unfinished.clear()
            if save is not None:  # its rows are out of reach
                save.close()
                if save.thread is not None:
                    save.thread.join()
            self._arrays.close()
            self._folder.close()
            self._peers.close()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _tell_of_lost(path: Path, unfinished: list[int]) -> None:
    """Says which save is lost with a Checkpointer that was never closed."""
    for step in unfinished:
        _log.warning(
            "the save of step %d in %s may not have ended: nobody has called `wait` or"
            " `close` of its Checkpointer. Use it in a `with`",
            step,
            path,
        )


class _Save:
    """A save in flight."""

    def __init__(self, step: int, folder: Path, started: float, before: int | None):
        self.step, self.folder, self.started = step, folder, started
        self.before = before  # the step saved or restored before it
        self.snapshot: Any = None
        self.base: int | None = None  # the step that it has the changes since
        self.thread: threading.Thread | None = None
        self.state: Any = None  # the last one seen
        self.error: BaseException | None = None
        self.ended: float | None = None
        self.seconds: list[float] = []  # of steps meanwhile

    def close(self) -> None:
        """Gives up the snapshot, or ends it."""
        if self.snapshot is not None:
            self.snapshot.close()


def _check_count(name: str, number: Any, *, none: bool) -> None:
    """Refuses what is no number of at least 1, nor None where that is allowed."""
    if number is None and none:
        return
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(
            f"`{name}` of a Checkpointer must be an integer of at least 1"
            f"{', or None' if none else ''}, got {number!r}"
        )


def _is_gone(state: Any) -> bool:
    """Whether a state has been given to a step."""
    return state is None or any(slab.rows.is_deleted() for slab in state.tables)
