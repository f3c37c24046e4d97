"""What has changed since a step was written is noticed, and passed over."""

import errno
import json
import os
import re
import shutil

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from shardjax.checkpoint import CorruptCheckpointError
from shardjax.checkpoint.manifest import _dump, _with_checksum
from tests.checkpoint.saving import FILES, save


def test_any_flipped_bit_is_noticed(folder):
    save(
        folder, 1, {"seed": 1, "text": "ü", "rate": 1e-7}, {"a": b"abc", "d/b": b"xyz"}
    )
    for name in ("a", "d/b", "manifest.json"):
        file = folder.path / "step_1" / name
        before = file.read_bytes()
        for place in range(len(before)):
            for bit in range(8):
                changed = bytearray(before)
                changed[place] ^= 1 << bit
                file.write_bytes(changed)
                with pytest.raises(CorruptCheckpointError, match=f"{name}' ha|{name}'"):
                    folder.verify(1)
        file.write_bytes(before)
    folder.verify(1)


@given(st.integers(0, 2**31), st.binary(min_size=1, max_size=8), st.booleans())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_other_bytes_are_noticed(folder, place, replacement, manifest):
    if not folder.steps():
        save(folder, 1, {"seed": 1})
    file = folder.path / "step_1" / ("manifest.json" if manifest else "deep/er/b.bin")
    before = file.read_bytes()
    changed = bytearray(before)
    place %= len(before)
    changed[place : place + len(replacement)] = replacement
    file.write_bytes(changed)
    try:
        if changed == before:
            folder.verify(1)
        else:
            with pytest.raises(CorruptCheckpointError):
                folder.verify(1)
    finally:
        file.write_bytes(before)


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_any_other_length_is_noticed(folder, name):
    save(folder, 1)
    file = folder.path / "step_1" / name
    before = file.read_bytes()
    for size in [*range(len(before)), len(before) + 1]:
        file.write_bytes((before + b"0")[:size])
        written = f"has {size} bytes, and {len(before)} were written"
        what = f"{name!r} {'has changed' if name == 'manifest.json' else written}"
        with pytest.raises(CorruptCheckpointError, match=re.escape(what)):
            folder.verify(1)


def damage(kind, step):
    """Damages a step, and says what `verify` must say."""
    file = step / "deep" / "er" / "b.bin"
    if kind == "missing":
        file.unlink()
        return "'deep/er/b.bin' is missing"
    if kind == "directory missing":
        shutil.rmtree(step / "deep")
        return "'deep/empty' is missing"
    if kind == "too many":
        (step / "deep" / "more").write_bytes(b"")
        return "'deep/more' does not belong to it"
    if kind == "link":
        content = file.rename(step.parent / "elsewhere")
        file.symlink_to(content)
        return "'deep/er/b.bin' is not a regular file any more"
    if kind == "directory":
        file.unlink()
        file.mkdir()
        return "'deep/er/b.bin' is missing"
    if kind == "no JSON":
        (step / "manifest.json").write_bytes(b"\xff\x00")
        return "'manifest.json' has changed"
    if kind == "other JSON":
        (step / "manifest.json").write_text("[1]")
        return "'manifest.json' has changed"
    assert kind == "spaces"
    text = json.dumps(json.loads((step / "manifest.json").read_text()), indent=1)
    (step / "manifest.json").write_text(text)
    return "'manifest.json' has changed"


DAMAGES = ["missing", "directory missing", "too many", "link", "directory"]
DAMAGES += ["no JSON", "other JSON", "spaces"]


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_named(folder, kind):
    save(folder, 1)
    what = damage(kind, folder.path / "step_1")
    message = f"step 1 in {str(folder.path)!r} is not what was written: {what}. Go back"
    with pytest.raises(CorruptCheckpointError, match=re.escape(message)):
        folder.verify(1)


def test_a_renamed_step_is_noticed(folder):
    save(folder, 1)
    (folder.path / "step_1").rename(folder.path / "step_2")
    with pytest.raises(
        CorruptCheckpointError, match=r"'step_2' has the files of step 1"
    ):
        folder.read(2)


def test_a_newer_format_is_no_damage(folder):
    save(folder, 1)
    save(folder, 2)
    file = folder.path / "step_2" / "manifest.json"
    inner = json.loads(file.read_bytes())["manifest"] | {"format": 4, "news": 1}
    file.write_bytes(_with_checksum(inner))
    message = (
        "step 2 in .* has format 4, and this version of shardjax reads format 3. Use"
    )
    for action in (lambda: folder.read(2), lambda: folder.newest_valid("fallback")):
        with pytest.raises(ValueError, match=message):
            action()
    assert json.loads(_dump(inner)) == inner


def test_a_disk_that_cannot_be_read(folder, monkeypatch):
    save(folder, 1)
    for code in (errno.EIO, errno.EACCES):
        with monkeypatch.context() as context:

            def fail(*_, code=code, **__):
                raise OSError(code, os.strerror(code))

            context.setattr("shardjax.checkpoint.files.checksum", fail)
            with pytest.raises(OSError, match="error|denied") as caught:
                folder.verify(1)
        told = "'a.bin' cannot be read (Input/output error)" in str(caught.value)
        assert told == (code == errno.EIO)
        assert isinstance(caught.value, CorruptCheckpointError) == told


# Which step to go on from.


def test_the_newest_valid_step(folder, caplog):
    assert folder.newest_valid() is None
    for step in (1, 2, 3):
        save(folder, step)
    assert folder.newest_valid() == folder.newest_valid("fallback") == 3
    (folder.path / "step_3" / "a.bin").write_bytes(b"abd")
    with pytest.raises(CorruptCheckpointError, match=r"step 3 .*on_corrupt='fallback'"):
        folder.newest_valid()
    (folder.path / "step_2" / "manifest.json").write_bytes(b"abd")
    assert folder.newest_valid("fallback") == 1
    assert [r.getMessage().split(":")[0] for r in caplog.records] == [
        "step 3 is passed over",
        "step 2 is passed over",
    ]
    (folder.path / "step_1" / "a.bin").unlink()
    message = (
        r"none of the steps in .* is what was written: are 1, 2, 3\. .*newest: step 3"
    )
    with pytest.raises(CorruptCheckpointError, match=message):
        folder.newest_valid("fallback")
    with pytest.raises(ValueError, match=r"`on_corrupt` of .* or 'fallback', got 'no'"):
        folder.newest_valid("no")


def test_a_step_is_no_better_than_those_it_needs(folder):
    save(folder, 1)
    save(folder, 2)
    save(folder, 3, needs=[2])
    save(folder, 4, needs=[3])
    assert folder.newest_valid() == 4 and folder.read(4).needs == (3,)
    (folder.path / "step_2" / "a.bin").unlink()
    assert folder.newest_valid("fallback") == 1
    with pytest.raises(CorruptCheckpointError, match=r"step 2 .*'a.bin' is missing"):
        folder.newest_valid()
    folder.remove(2)
    folder.verify(4)
    with pytest.raises(
        CorruptCheckpointError, match="step 2, which it needs, is missing"
    ):
        folder.verify(3)
    assert folder.newest_valid("fallback") == 1
