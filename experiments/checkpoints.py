"""Options of a program about saving its run and going on with it."""

import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.config import to_dict
from experiments.storage import refuse_idle
from shardjax.checkpoint import Checkpointer, StepFolder, parse_interval
from shardjax.processes import process_count

log = logging.getLogger("experiments.checkpoints")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving the run."""

    dir: Path | None = None
    """Folder for the checkpoints of this run. The same command again goes on from the newest
    one. On SIGTERM the run saves, and ends with exit code 75."""
    interval: str | None = None
    """When to save: auto (as often as is expected to cost 3.5 % of the time, also without it),
    a number of steps, a time such as 10m, or none; the last step is saved in any case."""
    keep: int | None = None
    """How many of the newest checkpoints stay, besides those that they need; 3 without."""
    full_every: int | None = None
    """Of so many checkpoints in a row one has all rows of the tables, the others those that
    have changed since the one before; 1, all rows each time, without."""

    def __post_init__(self):
        if self.dir is None:
            refuse_idle(self, ("interval", "keep", "full_every"), "`dir`")
        parse_interval(self.interval or "auto")
        for name in ("keep", "full_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}")


def check_resume(resume: str, config: CheckpointConfig) -> None:
    """Raises unless `resume` is "auto", "none" or the number of a step."""
    if resume not in ("auto", "none") and not (resume.isascii() and resume.isdecimal()):
        raise ValueError(
            f"`resume` must be auto, none or the number of a step, got {resume!r}"
        )
    if config.dir is None and resume != "auto":
        raise ValueError(
            f"`resume` {resume} has no effect without `checkpoint.dir`. Give the folder of"
            " the checkpoints as well, or leave `resume` out"
        )


def resumes(config: Any) -> bool:
    """Whether the run of a config goes on with an earlier one."""
    folder = config.checkpoint.dir
    if folder is None or config.resume == "none":
        return False
    there = folder.is_dir() and bool(StepFolder(folder, write=False).steps())
    return there or config.resume != "auto"


def _changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple]:
    """Options that differ between two configurations, by name; None for none.

    Example:
      >>> _changes({"seed": 1, "data": {"path": "a"}}, {"seed": 1, "data": {"path": "b"}})
      {'data.path': ('a', 'b')}
    """
    found = {}
    for name in {*before, *now} - {"resume"}:
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            inner = _changes(old, new)
            found |= {f"{name}.{k}": v for k, v in inner.items()}
        elif old != new:
            found[name] = old, new
    return found


class Checkpoints:
    """The checkpoints of a program's run; without a folder it does nothing.

    Args:
      config: with `checkpoint` and `resume`.
      last: step of the run.
      collection, loader: as of `Checkpointer`.
    """

    def __init__(self, config: Any, last: int, *, collection=None, loader=None):
        self._checkpointer: Checkpointer | None = None
        self.failures = 0
        own: CheckpointConfig = config.checkpoint
        self._resume, self._last = config.resume, last
        self._resumes = resumes(config)
        if own.dir is None:
            return
        settings = json.loads(json.dumps(to_dict(config), default=str))
        self._settings = settings
        self._checkpointer = Checkpointer(
            own.dir,
            interval=own.interval or "auto",
            keep=own.keep or 3,
            full_every=own.full_every or 1,
            collection=collection,
            loader=loader,
            config=settings,
            last=last,
        )
        steps = self._checkpointer.steps()
        if self._resume == "none" and steps:
            self._checkpointer.close()
            raise FileExistsError(
                f"`checkpoint.dir` {str(own.dir)!r} has the steps {steps} of a run, and"
                " `resume` none begins anew. Give another folder, or remove it"
            )

    def begin(self, state: Any) -> tuple[int, Any, dict[str, Any]]:
        """The step, state and `extra` to go on from; 0, the state and nothing if none."""
        step, extra = 0, {}
        if self._checkpointer is not None:
            if self._resumes:
                auto = self._resume == "auto"
                found = self._checkpointer.restore(
                    state,
                    None if auto else int(self._resume),
                    on_corrupt="fallback" if auto else "error",
                )
                step, state, extra = found.step, found.state, found.extra
                self._check_run(step)
                log.info("goes on after step %d of %s", step, self._checkpointer.path)
            self._checkpointer.maybe_save(step, state, extra)
        return step, state, extra

    def _check_run(self, step: int) -> None:
        """Refuses a run that is longer than it is to be; tells how its options differ."""
        assert self._checkpointer is not None
        if step > self._last:
            raise ValueError(
                f"`steps` and epochs ask for {self._last} steps, and the run in"
                f" {str(self._checkpointer.path)!r} has taken {step}. Ask for more, give"
                " the folder of another run, or `resume` one of its steps"
            )
        before = self._checkpointer.inspect(step).details["config"] or {}
        for name, (old, new) in sorted(_changes(before, self._settings).items()):
            log.warning(
                "`%s` was %r when step %d was saved, now %r", name, old, step, new
            )

    def after(self, step: int, state: Any, extra: Callable[[], dict[str, Any]]) -> None:
        """Saves after a step if it is time to; a save that fails is logged.

        Raises:
          OSError: of several processes, if it failed: some of them may wait in it.
        """
        if self._checkpointer is None:
            return
        try:
            self._checkpointer.maybe_save(step, state, extra)
        except OSError as error:
            if process_count() > 1:
                raise
            self.failures += 1
            log.error("a save has failed, and training goes on: %s", error)

    def figures(self) -> dict[str, float]:
        """What saving costs, for the metrics."""
        if self._checkpointer is None:
            return {}
        figures = self._checkpointer.policy.figures()
        names = ("stall_s", "slowed_s", "write_s", "interval", "overhead")
        return {f"checkpoint/{name}": figures[name] for name in names} | {
            "checkpoint/failures": self.failures
        }

    def catch_sigterm(self) -> AbstractContextManager[None]:
        """See `Checkpointer.catch_sigterm`."""
        if self._checkpointer is None:
            return nullcontext()
        return self._checkpointer.catch_sigterm()

    def end(self, state: Any) -> None:
        """Waits for the last save.

        Raises:
          OSError: if it failed.
        """
        if self._checkpointer is not None:
            self._checkpointer.close(state)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, *_) -> None:
        if self._checkpointer is not None and kind is not None:
            if (
                process_count() > 1
            ):  # the others do not come to end a save with this one
                log.error("the save in flight is lost, if there was one")
                return
            try:
                self._checkpointer.close()
            except (OSError, ValueError) as error:
                log.error("the save in flight is lost: %s", error)
