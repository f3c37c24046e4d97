"""Steps are removed whole, and not those that others need."""

import errno
import re

import pytest

from tests.checkpoint.saving import fail_at, names, save


def test_remove(folder):
    save(folder, 1)
    save(folder, 2)
    (folder.path / ".step_1.removing" / "x").mkdir(parents=True)
    folder.remove(1)
    assert folder.steps() == [2] and names(folder) == ["step_2"]
    save(folder, 1)
    assert folder.steps() == [1, 2]


@pytest.mark.parametrize("at", range(4))  # three files and the manifest
def test_a_step_is_not_listed_from_its_first_missing_file_on(folder, monkeypatch, at):
    save(folder, 1)
    save(folder, 2)
    with monkeypatch.context() as context:
        for name in ("unlink", "rmdir"):
            fail_at(context, name, errno.EIO, at)
        with pytest.raises(OSError, match="Input/output error"):
            folder.remove(1)
    assert folder.steps() == [2] and names(folder) == [".step_1.removing", "step_2"]
    save(folder, 1)
    folder.remove(1)
    assert names(folder) == ["step_2"]


def test_prune_leaves_the_newest(folder):
    for step in (1, 2, 3, 4):
        save(folder, step)
    assert folder.prune(5) == folder.prune(4) == []
    assert folder.prune(2) == [1, 2]
    assert names(folder) == ["step_3", "step_4"]
    assert folder.prune(1) == [3]


def test_prune_leaves_what_the_newest_need(folder):
    save(folder, 1)
    for step in (2, 3, 4):
        save(folder, step, needs=[step - 1])
    save(folder, 5)
    save(folder, 6, needs=[5])
    assert folder.prune(3) == []
    assert folder.prune(2) == [1, 2, 3, 4]


def test_prune_asks_what_is_needed(folder):
    for step in range(1, 8):
        save(folder, step)
    needed = {7: [6], 6: [3], 3: [1, 0]}
    assert folder.prune(1, lambda step: needed.get(step, [])) == [2, 4, 5]
    assert folder.steps() == [1, 3, 6, 7]


def test_prune_does_not_count_a_step_without_a_readable_manifest(folder, caplog):
    for step in (1, 2, 3, 4):
        save(folder, step)
    (folder.path / "step_4" / "manifest.json").write_text("{}")
    assert folder.prune(1) == [1, 2] and folder.steps() == [3, 4]
    assert "step 4 stays and does not count: step 4 in" in caplog.text
    folder.remove(4)


@pytest.mark.parametrize("keep", [0, -1, 1.0, True])
def test_prune_leaves_one_at_least(folder, keep):
    message = (
        f"`keep` of `prune` must be an integer of at least 1, got {keep!r}. Give how"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        folder.prune(keep)
