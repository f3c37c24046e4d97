"""Increments made steps with all rows, so that the steps before can go."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from shardjax.checkpoint.chain import chain_of, read_chain
from shardjax.checkpoint.rows import RowWriter
from shardjax.checkpoint.steps import StepFolder


def compact(
    folder: StepFolder, step: int, progress: Callable[[int], object] | None = None
) -> int:
    """Writes an increment anew, with all rows: it needs no other step then.

    Args:
      folder: open for writing.
      step: that is an increment; another one stays as it is.
      progress: told how many bytes have been read to check them, a part at a time.

    Returns:
      Of how many steps it is made; 1 if nothing was to be done.

    Raises:
      FileNotFoundError: if there is no such step.
      CorruptCheckpointError: if it, or one that it needs, is not what was written.
      OSError: if it cannot be written; all steps are as they were then.
    """
    chain = chain_of(folder, step)
    if len(chain) == 1:
        return 1
    for part in chain:
        folder.verify(part.step, progress)
    manifest = chain[0]
    directory = folder.begin(step, again=True)
    try:
        known = {}
        for name, size_and_crc in manifest.files.items():
            counts = name.startswith("tables/") and "counts" in name.split("/")[1:3]
            if name.startswith("arrays/") or counts:
                _link(manifest.path / name, directory / name)
                known[name] = size_and_crc
        details = manifest.details
        rows = RowWriter(directory / "tables", details["tables"]["groups"])
        for group, records in read_chain(chain):
            rows.write(group, records)
        known |= {f"tables/{name}": found for name, found in rows.finish().items()}
        own = {"base": None, "written": rows.written, "removed": None}
        if "parts" in details["rows"]:  # their counts stay where they are
            nothing = [0] * len(rows.written)
            parts = [
                {**part, "written": nothing, "removed": None}
                for part in details["rows"]["parts"]
            ]
            parts.insert(0, {**own, "folder": "", "counts": []})
            own = {"base": None, "parts": parts}
        folder.commit(step, {**details, "rows": own}, known)
    except BaseException:
        folder.discard(step)
        raise
    return len(chain)


def _link(file: Path, other: Path) -> None:
    """Lets a file that nobody changes have another name, or copies it."""
    other.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file, other)
    except OSError:  # not all file systems can
        shutil.copyfile(file, other)
