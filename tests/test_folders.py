"""Folders that appear whole or not at all."""

import errno
import os
from pathlib import Path

import pytest

from shardjax.folders import whole_folder
from tests.checkpoint.saving import fail_at


def write(folder, text="new"):
    (folder / "deep").mkdir()
    (folder / "deep" / "a").write_text(text)
    (folder / "rows.json").write_text("{}")  # as every export has


def files(path):
    return sorted(
        p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()
    )


def test_it_is_there_with_all_files_at_the_end_alone(tmp_path):
    path = tmp_path / "above" / "x"
    with whole_folder(path, "a test") as folder:
        assert not path.exists() and folder.parent == path.parent
        write(folder)
        assert not path.exists()
    assert files(tmp_path) == ["above/x/deep/a", "above/x/rows.json"]
    assert os.stat(path).st_mode == os.stat(path.parent).st_mode


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "x").mkdir()
    with whole_folder(tmp_path / "x", "a test") as folder:
        write(folder)
    assert files(tmp_path) == ["x/deep/a", "x/rows.json"]


def test_what_a_killed_process_has_left_is_removed(tmp_path):
    (tmp_path / ".x.partial").mkdir()
    write(tmp_path / ".x.partial", "old")
    with whole_folder(tmp_path / "x", "a test") as folder:
        assert list(folder.iterdir()) == []
    assert files(tmp_path) == [] and (tmp_path / "x").is_dir()


@pytest.mark.parametrize("replace", [False, True])
def test_an_error_leaves_all_as_it_was(replace, tmp_path):
    (tmp_path / "x").mkdir()
    if replace:
        write(tmp_path / "x", "former")
    before = files(tmp_path)

    def interrupted():
        with whole_folder(tmp_path / "x", "a test", replace=replace) as folder:
            write(folder)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert files(tmp_path) == before and os.listdir(tmp_path) == ["x"]


def test_a_disk_that_fails_leaves_all_as_it_was(tmp_path, monkeypatch):
    fail_at(monkeypatch, "fsync", errno.ENOSPC)
    with (
        pytest.raises(OSError, match="No space left"),
        whole_folder(tmp_path / "x", "a test") as folder,
    ):
        write(folder)
    assert os.listdir(tmp_path) == []


def test_what_is_there_is_replaced_on_demand_alone(tmp_path):
    write_to = tmp_path / "x"
    write_to.mkdir()
    write(write_to, "former")
    message = (
        "a test needs a folder of its own, and '.*/x' has files in it. Give another path,"
        " or remove the folder first"
    )
    with (
        pytest.raises(FileExistsError, match=message),
        whole_folder(write_to, "a test"),
    ):
        pass
    with whole_folder(write_to, "a test", replace=True) as folder:
        assert (write_to / "deep" / "a").read_text() == "former"
        write(folder)
    assert (write_to / "deep" / "a").read_text() == "new"
    assert os.listdir(tmp_path) == ["x"]


def test_files_that_appear_meanwhile_are_kept(tmp_path):
    def late():
        with whole_folder(tmp_path / "x", "a test") as folder:
            write(folder)
            (tmp_path / "x").mkdir()
            write(tmp_path / "x", "of another")

    with pytest.raises(FileExistsError, match="has files in it"):
        late()
    assert (tmp_path / "x" / "deep" / "a").read_text() == "of another"
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("kind", ["file", "link"])
@pytest.mark.parametrize("replace", [False, True])
def test_something_else_is_never_replaced(kind, replace, tmp_path):
    if kind == "file":
        (tmp_path / "x").write_text("mine")
    else:
        (tmp_path / "there").mkdir()
        (tmp_path / "x").symlink_to(tmp_path / "there")
    with (
        pytest.raises(FileExistsError, match="'.*/x' is something else"),
        whole_folder(tmp_path / "x", "a test", replace=replace),
    ):
        pass
    assert os.path.lexists(tmp_path / "x")


def test_what_is_no_export_is_never_replaced(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("mine")
    with (
        pytest.raises(FileExistsError, match="the place of an export alone"),
        whole_folder(tmp_path / "home", "a test", replace=True),
    ):
        pass
    assert files(tmp_path) == ["home/thesis.txt"]


def test_two_at_once_are_an_error_of_the_second(tmp_path):
    with whole_folder(tmp_path / "x", "a test") as folder:
        with (
            pytest.raises(
                BlockingIOError, match="is being written to '.*partial' already"
            ),
            whole_folder(tmp_path / "x", "a test"),
        ):
            pass
        write(folder)
    assert files(tmp_path) == ["x/deep/a", "x/rows.json"]


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / ".x.partial").write_text("mine")
    with (
        pytest.raises(
            FileExistsError, match=r"'.*\.x\.partial' first, and that is no fold"
        ),
        whole_folder(tmp_path / "x", "a test"),
    ):
        pass
    assert files(tmp_path) == [".x.partial"]


def test_an_export_comes_back_if_the_new_one_cannot_have_its_name(
    tmp_path, monkeypatch
):
    (tmp_path / "x").mkdir()
    write(tmp_path / "x", "former")
    rename = Path.rename

    def failing(self, target):
        if self.name == ".x.partial":
            raise OSError(errno.EIO, "no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with (
        pytest.raises(OSError, match="no"),
        whole_folder(tmp_path / "x", "a test", replace=True) as folder,
    ):
        write(folder)
    assert (tmp_path / "x" / "deep" / "a").read_text() == "former"
    assert os.listdir(tmp_path) == ["x"]
