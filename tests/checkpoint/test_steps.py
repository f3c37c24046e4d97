"""Steps are whole or not there, and what has changed since is noticed."""

import errno
import io
import json
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from shardjax.checkpoint import CorruptCheckpointError, Manifest, StepFolder
from tests.checkpoint.saving import FILES, fail_at, fill, names, save

ROOT = Path(__file__).parent.parent.parent


def test_a_step_is_read_as_it_was_written(folder):
    details = {"seed": 2**63, "rate": 0.1, "names": ["ä", "\udc80"], "x": {"y": None}}
    save(folder, np.int64(7), details)
    manifest = folder.read(7)
    assert manifest == Manifest(
        7,
        details,
        (),
        {name: (len(x), zlib.crc32(x)) for name, x in FILES.items()},
        folder.path / "step_7",
    )
    assert manifest.size == 203
    for name, content in FILES.items():
        assert (manifest.path / name).read_bytes() == content
    folder.verify(7)
    assert folder.newest_valid() == 7


def test_the_manifest_is_plain_json(folder):
    save(folder, 3, {"b": 1, "a": [1.5]}, {"f": b"abc"})
    inner = {
        "format": 3,
        "step": 3,
        "details": {"a": [1.5], "b": 1},
        "needs": [],
        "files": {"f": [3, zlib.crc32(b"abc")]},
    }
    outer = json.loads((folder.path / "step_3" / "manifest.json").read_text())
    text = json.dumps(inner, sort_keys=True, separators=(",", ":"))
    assert outer == {"crc32": zlib.crc32(text.encode()), "manifest": inner}


def test_steps_are_listed_in_order_and_nothing_else_is(folder):
    for step in (10, 9, 0):
        save(folder, step)
    folder.begin(11)
    for name in ("step_12", "step_007", "step_-1", "step_x", "other"):
        (folder.path / name).mkdir()
    (folder.path / "step_007" / "manifest.json").write_text("{}")
    (folder.path / "step_13").write_text("a file")
    assert folder.steps() == [0, 9, 10]


def test_files_larger_than_a_part_are_summed_up_part_by_part(folder):
    content = np.random.default_rng(0).bytes((8 << 20) + 5)
    save(folder, 1, files={"f": content})
    assert folder.read(1).files["f"] == (len(content), zlib.crc32(content))
    seen = []
    folder.verify(1, seen.append)
    assert seen == [4 << 20, 4 << 20, 5]


def test_files_that_are_known_are_not_read(folder):
    save(folder, 1, known={"a.bin": (3, 12345)})  # a lie, which is believed
    assert folder.read(1).files["a.bin"] == (3, 12345)
    with pytest.raises(CorruptCheckpointError, match=r"bytes of 'a\.bin' have changed"):
        folder.verify(1)


@pytest.mark.parametrize(
    ("known", "what"),
    [
        ({"c": (1, 1)}, "'c', which is `known`, is missing"),
        ({"a.bin": (4, 1)}, "'a.bin' has 3 bytes, and 4 are `known` to be written"),
    ],
)
def test_files_that_are_not_as_known(folder, known, what):
    fill(folder.begin(1))
    message = f"step 1 cannot be committed: {what}. `discard` it and write it again"
    with pytest.raises(CorruptCheckpointError, match=re.escape(message)):
        folder.commit(1, {}, known)
    assert folder.steps() == []
    with pytest.raises(ValueError, match="has failed to be committed"):
        folder.commit(1, {})
    folder.discard(1)
    save(folder, 1)


# What may not be done.


def test_no_step_is_overwritten(folder):
    save(folder, 1, {"first": True})
    with pytest.raises(
        FileExistsError, match=r"step 1 in .* is committed already.*Give"
    ):
        folder.begin(1)
    folder.begin(2)
    with pytest.raises(
        FileExistsError, match=r"step 2 in .* has been begun already. `c"
    ):
        folder.begin(2)
    (folder.path / "step_3").mkdir()
    with pytest.raises(FileExistsError, match=r"step 3 needs the name .*Move it away"):
        folder.begin(3)
    assert folder.read(1).details == {"first": True}


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (-1, ValueError, "a step must not be negative, got -1. Give the number"),
        (1.0, TypeError, "a step must be an integer, got 1.0. Give the number"),
        (True, TypeError, "a step must be an integer, got True"),
        ("1", TypeError, "a step must be an integer, got '1'"),
    ],
)
def test_what_is_no_step(folder, step, error, message):
    actions = [folder.begin, folder.discard, folder.read, folder.verify, folder.remove]
    for action in [*actions, lambda step: folder.commit(step, {})]:
        with pytest.raises(error, match=re.escape(message)):
            action(step)


def test_a_step_that_has_not_been_begun(folder):
    with pytest.raises(
        ValueError, match=r"step 1 in .* has not been begun.*Call `begin`"
    ):
        folder.commit(1, {})


@pytest.mark.parametrize(
    ("details", "error", "got"),
    [
        ({"a": object}, TypeError, r"got \{'a': <class 'object'>\}: Object of type"),
        ({"a": float("nan")}, ValueError, r"got \{'a': nan\}: Out of range"),
        ({1: 2}, ValueError, r"and \{1: 2\} becomes \{'1': 2\}"),
        ({"a": (1,)}, ValueError, r"and \{'a': \(1,\)\} becomes \{'a': \[1\]\}"),
        ([1], TypeError, "got list"),
    ],
)
def test_details_that_json_changes(folder, details, error, got):
    fill(folder.begin(1))
    rule = "`details` of step 1 must be a dict that JSON gives back as it is, "
    with pytest.raises(error, match=rf"{rule}{got}.*Give dicts with string keys"):
        folder.commit(1, details)
    folder.commit(1, {})  # nothing has been lost by it


@pytest.mark.parametrize("kind", ["link", "link_to_directory", "pipe"])
def test_only_regular_files_can_be_kept(folder, kind):
    partial = folder.begin(1)
    fill(partial)
    if kind == "pipe":
        os.mkfifo(partial / "deep" / "x")
    else:
        target = partial / ("a.bin" if kind == "link" else "deep")
        (partial / "deep" / "x").symlink_to(target)
    with pytest.raises(
        ValueError, match=r"step 1 may have regular files only, and .*/x"
    ):
        folder.commit(1, {})
    (partial / "deep" / "x").unlink()
    folder.commit(1, {})
    folder.verify(1)


def test_the_name_of_the_manifest_is_taken(folder):
    fill(folder.begin(1), {"manifest.json": b"mine"})
    with pytest.raises(ValueError, match=r"step 1 has a file 'manifest.json'.*another"):
        folder.commit(1, {})
    folder.discard(1)
    save(folder, 1, files={"deep/manifest.json": b"mine"})
    folder.verify(1)


@pytest.mark.parametrize("action", ["read", "verify", "remove"])
def test_an_unknown_step(folder, action):
    message = "there is no step 4 in .*; there are none. Give one of them"
    with pytest.raises(FileNotFoundError, match=message):
        getattr(folder, action)(4)
    for step in range(0, 50, 2):
        save(folder, step, files={})
    message = (
        "there is no step 3 in .*; there are 5 older ones and 10, 12, .*, 48. Give"
    )
    with pytest.raises(FileNotFoundError, match=message):
        getattr(folder, action)(3)


def test_steps_that_are_needed_must_be_there_and_before(folder):
    fill(folder.begin(5))
    message = "step 5 needs step 4, and there is no step 4 in .*; there are none"
    with pytest.raises(FileNotFoundError, match=message):
        folder.commit(5, {}, needs=[4])
    save(folder, 6)
    with pytest.raises(
        ValueError, match=r"step 5 may need steps before it only, got 6"
    ):
        folder.commit(5, {}, needs=[6])
    folder.commit(5, {})


def test_reading_changes_nothing(folder, tmp_path):
    save(folder, 1)
    left = folder.begin(2)
    reader = StepFolder(folder.path, write=False)
    assert left.exists() and reader.steps() == [1] and reader.newest_valid() == 1
    message = "this StepFolder of .* only reads. Open it with `write=True`"
    for action in (reader.begin, reader.discard, reader.remove, reader.prune):
        with pytest.raises(io.UnsupportedOperation, match=message):
            action(1)
    with pytest.raises(io.UnsupportedOperation, match=message):
        reader.commit(1, {})
    with pytest.raises(
        FileNotFoundError, match=r"read from a folder, and .*gone' is none"
    ):
        StepFolder(tmp_path / "gone", write=False)
    assert not (tmp_path / "gone").exists()


def test_a_closed_folder_writes_nothing(folder):
    folder.close()
    folder.close()
    with pytest.raises(
        ValueError, match=r"this StepFolder of .* is closed. Open another"
    ):
        folder.begin(1)


def test_two_writers(folder):
    with pytest.raises(BlockingIOError, match="this very process: a StepFolder that"):
        StepFolder(folder.path, write=True)
    program = f"""
from shardjax.checkpoint import StepFolder
try:
    StepFolder({str(folder.path)!r}, write=True)
except OSError as error:
    print(error)
"""
    done = run(program)
    message = f"of checkpointing is in use by process {os.getpid()}. Give each process"
    assert message in done.stdout, done.stderr
    folder.close()
    StepFolder(folder.path, write=True).close()


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        OSError, match="checkpointing needs a folder that it can write to"
    ):
        StepFolder(tmp_path / "file", write=True)


# Full disks.


@pytest.mark.parametrize("at", range(9))
def test_a_full_disk_leaves_the_steps_before(folder, monkeypatch, at):
    """At each of the calls that put a step on the disk."""
    save(folder, 1)
    fill(folder.begin(2))
    with monkeypatch.context() as context:
        calls = fail_at(context, "fsync", errno.ENOSPC, at)
        if at == 8:  # three files, three directories, the manifest, the folder
            folder.commit(2, {})
            assert len(calls) == 8
            return
        message = (
            f"step 2 cannot be committed to {str(folder.path)!r}: No space left on device."
            " The steps before are intact. `discard` this one, free space or"
        )
        with pytest.raises(OSError, match=re.escape(message)) as caught:
            folder.commit(2, {})
    assert caught.value.errno == errno.ENOSPC
    assert folder.steps() == [1] and names(folder) == [".step_2.partial", "step_1"]
    folder.verify(1)
    with pytest.raises(FileExistsError, match="has been begun already"):
        folder.begin(2)
    folder.discard(2)
    folder.discard(2)
    save(folder, 2)
    folder.verify(2)


def test_a_real_limit_is_a_clear_error(tmp_path):
    """A file-size limit of the process, as a full disk would."""
    program = f"""
import resource, signal
from shardjax.checkpoint import StepFolder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = StepFolder({str(tmp_path / "run")!r}, write=True)
folder.begin(1)
folder.commit(1, {{}})
folder.begin(2)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    folder.commit(2, {{"long": "x" * 20_000}})
except OSError as error:
    print(error)
folder.discard(2)
print(folder.newest_valid(), folder.steps())
"""
    done = run(program)
    assert "step 2 cannot be committed to" in done.stdout, done.stderr
    assert "File too large. The steps before are intact" in done.stdout
    assert done.stdout.endswith("1 [1]\n")


def run(program):
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
