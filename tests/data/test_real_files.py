"""Real click logs, where they are at hand: read with no more than the label named."""

import csv as python_csv
from pathlib import Path

import numpy as np
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from shardjax.data import Batch, csv, hash_strings, parquet

FOLDER = Path(__file__).parents[3] / "shared" / "data"


def path_of(name):
    """Finds a file of the shared data, or skips the test."""
    if not FOLDER.is_dir():
        pytest.skip(f"no shared data at {FOLDER}")
    return FOLDER / name


def rows_of(path):
    """The rows of a CSV file, as Python reads them, by column."""
    with open(path, newline="", encoding="utf-8") as file:
        header, *rows = python_csv.reader(file)
    return dict(zip(header, map(list, zip(*rows, strict=True)), strict=True))


def keys_of(texts):
    hashed = hash_strings(texts)
    is_key = [text.isdigit() and text == str(int(text)) for text in texts]
    for at in np.flatnonzero(is_key):
        hashed[at] = int(texts[at])
    return hashed


def read(source):
    return Batch.concat(list(source.chunks()))


def test_kdd_cup_clicks():
    path = path_of("kdd12_click_small/Click_prediction_small.csv")
    source = csv(path, block_bytes=1 << 19)
    expected = rows_of(path)
    assert source.columns.label == "click"
    assert source.columns.names("dense") == ("impression",)
    assert set(source.feature_names) == set(expected) - {"click", "impression"}
    batch = read(source)
    assert batch.size == 39_948
    assert round(float(batch.labels.mean()), 3) == 0.168
    impressions = np.array(expected["impression"], np.float64)
    np.testing.assert_array_equal(
        batch.dense[:, 0], np.log1p(impressions).astype(np.float32)
    )
    for name, keys in zip(batch.fixed_names, batch.fixed, strict=True):
        np.testing.assert_array_equal(keys, keys_of(expected[name]), err_msg=name)


def test_movie_ratings_and_genres():
    path = path_of("ml_latest_small/ratings.csv")
    source = csv(path, label="rating", label_threshold=4)
    batch = read(source)
    expected = rows_of(path)
    assert source.feature_names == ("userId", "movieId")
    assert source.columns.names("drop") == ("timestamp",)
    ratings = np.array(expected["rating"], np.float32)
    np.testing.assert_array_equal(batch.labels, ratings >= 4)
    np.testing.assert_array_equal(batch.fixed[1], keys_of(expected["movieId"]))

    path = path_of("ml_latest_small/movies.csv")
    batch = read(csv(path, label="movieId", block_bytes=1 << 16))
    expected = rows_of(path)
    # Quoted titles have commas in them.
    assert any("," in title for title in expected["title"])
    np.testing.assert_array_equal(batch.fixed[0], keys_of(expected["title"]))
    genres = [row.split("|") for row in expected["genres"]]
    bags = batch.jagged["genres"]
    assert bags.lengths.tolist() == [len(bag) for bag in genres]
    flat = [genre for bag in genres for genre in bag]
    np.testing.assert_array_equal(bags.values, hash_strings(flat))


def test_open_bandit_logs():
    batch_of = {}
    for policy in ("random", "bts"):
        source = csv(path_of(f"obd/{policy}/men/men.csv"))
        assert source.columns.label == "click"
        assert source.columns.names("drop") == ("", "timestamp")
        assert source.feature_names[:2] == ("item_id", "position")
        assert source.n_dense == 35
        batch_of[policy] = read(source)
        assert batch_of[policy].size == 10_000
    both = read(csv(FOLDER / "obd/*/men/men.csv"))
    # Files come in the order of their names.
    np.testing.assert_array_equal(
        both.fixed, np.hstack([batch_of["bts"].fixed, batch_of["random"].fixed])
    )


def test_paddlerec_tags_are_a_bag_between_spaces():
    source = csv(path_of("paddlerec/tagspace_small_train.csv"), bag_separator=" ")
    assert not source.header
    batch = read(source)
    assert batch.size == 1000
    assert batch.jagged["column_1"].values[:4].tolist() == [17, 3034, 3611, 641]


def test_the_same_from_parquet(tmp_path):
    path = path_of("ml_latest_small/ratings.csv")
    table = pa_csv.read_csv(path)
    pq.write_table(table, tmp_path / "ratings.parquet")
    ours = parquet(tmp_path / "ratings.parquet", label="rating", label_threshold=4)
    theirs = csv(path, label="rating", label_threshold=4)
    assert [c.kind for c in ours.columns.columns] == [
        c.kind for c in theirs.columns.columns
    ]
    a, b = read(ours), read(theirs)
    np.testing.assert_array_equal(a.fixed, b.fixed)
    np.testing.assert_array_equal(a.labels, b.labels)
