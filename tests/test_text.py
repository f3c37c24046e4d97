"""The text of the language model: which files, which crops, what is predicted."""

import os
from pathlib import Path

import numpy as np
import pytest

from experiments import text as texts
from experiments.text import TextConfig, held_out_batches, open_text, training_batch


def write_files(folder, count=40):
    for number in range(count):
        file = folder / f"part{number % 3}" / f"{number}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"%d\n" % number * (number + 1))
    return str(folder / "**" / "*.txt")


def test_the_default_is_the_standard_library_without_its_tests():
    text = open_text(TextConfig())
    files = text.train_files + text.held_out_files
    assert len(files) == len(set(files)) > 300
    assert all(f.endswith(".py") for f in files)
    assert any(os.path.basename(f) == "argparse.py" for f in files)
    folders = {part for f in files for part in f.split(os.sep)}
    assert not folders & {"test", "site-packages", "pydoc_data"}
    assert 0.02 < len(text.held_out_files) / len(files) < 0.1
    again = open_text(TextConfig())
    np.testing.assert_array_equal(text.train, again.train)
    assert len(open_text(TextConfig(tests=True)).train) > len(text.train)


def test_streams_are_the_files_with_separators(tmp_path):
    text = open_text(TextConfig(path=write_files(tmp_path), held_out=0.3))
    for stream, files in (
        (text.train, text.train_files),
        (text.held_out, text.held_out_files),
    ):
        expected = b"\0" + b"".join(Path(f).read_bytes() + b"\0" for f in files)
        assert stream.tobytes() == expected and stream.dtype == np.uint8
    assert len(text.train_files) + len(text.held_out_files) == 40
    assert f"{len(text.train)} bytes of {len(text.train_files)} files" in str(text)


def test_the_split_depends_on_the_path_below_the_wildcard_only(tmp_path):
    names = []
    for home in ("a", "b/c"):
        folder = tmp_path / home
        folder.mkdir(parents=True)
        config = TextConfig(path=write_files(folder), held_out=0.3)
        held_out = open_text(config).held_out_files
        names.append([os.path.relpath(f, folder) for f in held_out])
    assert names[0] == names[1]


def test_files_to_evaluate_on_can_be_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc")
    (tmp_path / "b.txt").write_bytes(b"de")
    config = TextConfig(path=str(tmp_path / "a.txt"), eval_path=str(tmp_path / "b.*"))
    text = open_text(config)
    assert text.train.tobytes() == b"\0abc\0" and text.held_out.tobytes() == b"\0de\0"


def test_crops_are_a_function_of_seed_step_and_index():
    stream = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8)

    def crops(seed=3, step=5, batch_size=8):
        batch = training_batch(
            stream, seed=seed, step=step, batch_size=batch_size, seq_len=16
        )
        assert batch["weights"].shape == (batch_size, 16)
        assert (batch["weights"] == 1).all()
        return batch["tokens"]

    np.testing.assert_array_equal(crops(), crops())
    np.testing.assert_array_equal(crops(batch_size=32)[:8], crops())
    assert (crops(step=6) != crops()).any() and (crops(seed=4) != crops()).any()
    text = stream.tobytes()
    assert all(text.find(row.tobytes()) >= 0 for row in crops())
    # fixed: a run that is resumed by another version sees the same text
    assert np.random.Philox(key=[3, 5]).random_raw() % 984 == text.find(
        crops()[0].tobytes()
    )


def test_crops_are_everywhere_and_nowhere_else():
    stream = np.arange(20, dtype=np.uint8)
    batch = training_batch(stream, seed=0, step=0, batch_size=400, seq_len=16)
    assert set(batch["tokens"][:, 0]) == {0, 1, 2, 3}
    assert set(batch["tokens"][:, -1]) == {16, 17, 18, 19}


@pytest.mark.parametrize("size", [2, 3, 9, 10, 16, 17, 18, 40, 101])
@pytest.mark.parametrize("seq_len", [1, 5, 8])
def test_each_held_out_byte_is_predicted_once(size, seq_len):
    stream = np.arange(100, 100 + size, dtype=np.uint8)
    stream[0] = texts.SEPARATOR
    found = []
    for batch in held_out_batches(stream, batch_size=3, seq_len=seq_len):
        tokens, weights = batch["tokens"], batch["weights"]
        assert tokens.shape == (3, seq_len + 1) and weights.shape == (3, seq_len)
        assert tokens.dtype == np.uint8 and weights.dtype == np.float32
        for row, weight in zip(tokens, weights, strict=True):
            for place in np.flatnonzero(weight):
                target = int(row[place + 1])
                known = row[: place + 1].tolist()
                found.append(target)
                # from the bytes right before it, and enough of them
                end = target - 100
                assert known == stream[end - len(known) : end].tolist()
                assert len(known) >= min(end, seq_len // 2 + 1)
    assert found == stream[1:].tolist()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"held_out": 0.0}, r"`held_out` must lie in \(0, 1\), got 0.0"),
        ({"eval_path": "x"}, "`eval_path` needs a `path`"),
    ],
)
def test_bad_configs_say_what_is_wrong(values, message):
    with pytest.raises(ValueError, match=message):
        TextConfig(**values)


def test_files_that_are_not_there_say_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file matches .*\*\.none"):
        open_text(TextConfig(path=str(tmp_path / "*.none")))


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    path = write_files(tmp_path)

    def refuse(file, *arguments):
        raise PermissionError(13, "Permission denied", file)

    monkeypatch.setattr(texts.np, "fromfile", refuse)
    with pytest.raises(OSError, match=r"\.txt: cannot be read: Permission denied"):
        open_text(TextConfig(path=path, held_out=0.3))


@pytest.mark.parametrize(
    ("share", "split"), [(1e-9, "hold out"), (1 - 1e-9, "train on")]
)
def test_a_split_without_files_is_refused(tmp_path, share, split):
    path = write_files(tmp_path)
    with pytest.raises(ValueError, match=f"files to {split}, and of the 40 files"):
        open_text(TextConfig(path=path, held_out=share))


def test_a_library_without_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(texts.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match=r"no \.py files in .*--data\.path"):
        open_text(TextConfig())


def test_too_few_bytes_are_refused():
    stream = np.zeros(16, np.uint8)
    with pytest.raises(ValueError, match="more bytes than --seq-len 16, got 16"):
        training_batch(stream, seed=0, step=0, batch_size=1, seq_len=16)
    with pytest.raises(ValueError, match="must have a byte to predict, got 1 bytes"):
        next(held_out_batches(stream[:1], batch_size=1, seq_len=4))
