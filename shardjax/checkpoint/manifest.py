"""The manifest of a step: what was written, in a file that notices changes of itself."""

import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_FORMAT = 3


class CorruptCheckpointError(OSError):
    """A step is not what was written."""


@dataclass(frozen=True)
class Manifest:
    """What is known of a committed step.

    Attributes:
      step: its number.
      details: what the writer wanted to be kept with it.
      needs: other steps that it takes to read this one.
      files: size and CRC-32 of each file, by its path in the step.
      path: of the step's directory.
    """

    step: int
    details: dict[str, Any]
    needs: tuple[int, ...]
    files: dict[str, tuple[int, int]]
    path: Path

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(size for size, _ in self.files.values())


def write_manifest(directory: Path, step: int, details, needs, files) -> None:
    """Writes the manifest of a step into its directory, and to the disk."""
    inner = {
        "format": _FORMAT,
        "step": step,
        "details": details,
        "needs": needs,
        "files": files,
    }
    with (directory / MANIFEST).open("xb", buffering=0) as file:
        left = memoryview(_with_checksum(inner))
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())


def check_details(step: int, details: dict[str, Any]) -> None:
    """Raises unless JSON gives details back as they are."""
    rule = f"`details` of step {step} must be a dict that JSON gives back as it is"
    fix = "Give dicts with string keys, lists, strings, numbers, bools and None"
    if not isinstance(details, dict):
        raise TypeError(f"{rule}, got {type(details).__name__}. {fix}")
    try:
        back = json.loads(_dump(details))
    except (TypeError, ValueError, RecursionError) as error:
        raise type(error)(f"{rule}, got {details!r:.200}: {error}. {fix}") from error
    if back != details:
        raise ValueError(f"{rule}, and {details!r:.200} becomes {back!r:.200}. {fix}")


def read_manifest(directory: Path, step: int) -> Manifest:
    """Reads the manifest of a step.

    Raises:
      CorruptCheckpointError: if it is not what was written.
      ValueError: if it is of a format that this version does not know.
      FileNotFoundError: if there is none.
    """
    text = (directory / MANIFEST).read_bytes()
    try:
        inner = json.loads(text)["manifest"]
        intact = _with_checksum(inner) == text
    except (ValueError, TypeError, KeyError, RecursionError):
        intact = False
    if not intact:
        raise corrupt(directory, step, f"{MANIFEST!r} has changed")
    if inner["format"] != _FORMAT:
        raise ValueError(
            f"step {step} in {str(directory.parent)!r} has format {inner['format']}, and"
            f" this version of shardjax reads format {_FORMAT}. Use the version that"
            " wrote it, or a newer one"
        )
    if inner["step"] != step:
        raise corrupt(
            directory,
            step,
            f"its directory {directory.name!r} has the files of step {inner['step']}",
        )
    files = {path: (size, crc) for path, (size, crc) in inner["files"].items()}
    return Manifest(step, inner["details"], tuple(inner["needs"]), files, directory)


def corrupt(directory: Path, step: int, what: str) -> CorruptCheckpointError:
    """The error for a step of which something is wrong."""
    return CorruptCheckpointError(
        f"step {step} in {str(directory.parent)!r} is not what was written: {what}. Go"
        " back to a step before (`newest_valid` with on_corrupt='fallback' finds one), or"
        " restore the file from a copy"
    )


def _dump(value) -> bytes:
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), allow_nan=False
    ).encode()


def _with_checksum(inner: dict[str, Any]) -> bytes:
    """All bytes of a manifest: each of them counts, so that any change is noticed."""
    return _dump({"crc32": zlib.crc32(_dump(inner)), "manifest": inner})
