"""The planted model: reproducible row by row, and its scores are what it says."""

import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from shardjax.data import Batch, Source, Synthetic

SMALL = Synthetic(rows=20_000, vocabulary=(30, 1000), n_dense=3, chunk_rows=3000)


def read_all(source):
    return Batch.concat(list(source.chunks()))


def assert_same(a, b):
    for name in ("labels", "dense", "fixed"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_rows_do_not_depend_on_chunks():
    whole = SMALL.read(0, SMALL.rows)
    assert_same(read_all(SMALL), whole)
    assert_same(read_all(replace(SMALL, chunk_rows=7777)), whole)
    assert_same(SMALL.read(12_345, 12_400), whole.slice(12_345, 12_400))
    assert_same(next(SMALL.chunks(start_chunk=4)), whole.slice(12_000, 15_000))
    assert list(SMALL.chunks(start_chunk=7)) == []
    # More rows are more of the same.
    assert_same(replace(SMALL, rows=10**6).read(0, SMALL.rows), whole)
    np.testing.assert_array_equal(
        SMALL.logits(0, 20_000)[500:900], SMALL.logits(500, 900)
    )


def test_seeds_draw_other_rows_of_the_same_model():
    other = replace(SMALL, seed=1)
    assert (SMALL.read(0, 100).dense != other.read(0, 100).dense).all()
    assert set(SMALL.read(0, 5000).fixed[0]) == set(other.read(0, 5000).fixed[0])
    # Another model has other keys.
    model = replace(SMALL, model_seed=1)
    assert not set(SMALL.read(0, 5000).fixed[0]) & set(model.read(0, 5000).fixed[0])
    # The bits are fixed, whatever the version and the platform.
    assert SMALL.read(0, 1).fixed[:, 0].tolist() == [
        339903169644266132,
        3452531968990563419,
    ]


def test_another_process_draws_the_same():
    program = (
        "from shardjax.data import Synthetic; b = Synthetic(rows=1000).read(0, 1000);"
        "print(int(b.fixed.sum()), float(b.dense.sum()), float(b.labels.sum()))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    batch = Synthetic(rows=1000).read(0, 1000)
    sums = int(batch.fixed.sum()), float(batch.dense.sum()), float(batch.labels.sum())
    assert run.stdout.split() == [str(x) for x in sums]


def test_bayes_scores_are_those_of_scikit_learn():
    batch = SMALL.read(5000, 15_000)
    logits = SMALL.logits(5000, 15_000)
    scores = SMALL.bayes(5000, 15_000)
    assert scores["auc"] == pytest.approx(
        roc_auc_score(batch.labels, logits), abs=1e-12
    )
    p = 1 / (1 + np.exp(-logits))
    assert scores["logloss"] == pytest.approx(log_loss(batch.labels, p), abs=1e-12)


def test_bayes_scores_count_ties_half():
    # One id and no dense features: every row has the same logit.
    source = Synthetic(rows=1000, vocabulary=(2,), n_dense=0, auc=0.6)
    auc = source.bayes(0, 1000)["auc"]
    labels, logits = source.read(0, 1000).labels, source.logits(0, 1000)
    assert len(np.unique(logits)) == 2
    assert auc == pytest.approx(roc_auc_score(labels, logits), abs=1e-12)


def test_bayes_scores_of_one_label():
    source = Synthetic(rows=100)
    assert np.isnan(source.bayes(0, 1)["auc"])
    assert source.bayes(0, 1)["logloss"] > 0


@pytest.mark.parametrize(("click_rate", "auc"), [(0.25, 0.8), (0.05, 0.7), (0.5, 0.9)])
def test_click_rate_and_auc_are_as_asked(click_rate, auc):
    source = Synthetic(rows=200_000, click_rate=click_rate, auc=auc)
    assert source.bayes(0, 200_000)["auc"] == pytest.approx(auc, abs=0.01)
    labels = read_all(source).labels
    assert labels.mean() == pytest.approx(click_rate, abs=0.005)


def test_labels_are_drawn_with_the_true_probability():
    source = Synthetic(rows=200_000)
    p = 1 / (1 + np.exp(-source.logits(0, source.rows)))
    labels = read_all(source).labels
    for low in np.arange(0, 0.9, 0.1):
        rows = (p >= low) & (p < low + 0.1)
        error = 5 * np.sqrt((p[rows] * (1 - p[rows])).sum()) / rows.sum()
        assert labels[rows].mean() == pytest.approx(p[rows].mean(), abs=error)


def test_ids_follow_zipf():
    source = Synthetic(
        rows=300_000, vocabulary=(10, 5000), n_dense=0, hashed_keys=False
    )
    keys = read_all(source).fixed
    for ids, size in zip(keys, (10, 5000), strict=True):
        assert ids.max() == size - 1
        counts = np.bincount(ids.astype(int))
        assert (counts[:8] > counts[1:9]).all()
    ranks = np.array([20, 50, 100, 200])
    around = [counts[rank - 5 : rank + 6].mean() for rank in ranks]
    slope = np.polyfit(np.log(ranks + 1.5), np.log(around), 1)[0]
    assert slope == pytest.approx(-1.1, abs=0.05)


def test_hashed_keys_are_spread_and_differ_between_features():
    source = Synthetic(rows=50_000, vocabulary=(1000, 1000))
    ids = read_all(replace(source, hashed_keys=False)).fixed
    batch = read_all(source)
    assert not set(batch.fixed[0]) & set(batch.fixed[1])
    assert (batch.fixed >> np.uint64(63)).mean() == pytest.approx(0.5, abs=0.15)
    pairs = set(zip(ids[0].tolist(), batch.fixed[0].tolist(), strict=True))
    assert len(pairs) == len(set(ids[0].tolist())) == len(set(batch.fixed[0].tolist()))


def test_dense_features_are_standard_normal():
    dense = Synthetic(rows=200_000).read(0, 200_000).dense
    np.testing.assert_allclose(dense.mean(0), 0, atol=0.015)
    np.testing.assert_allclose(dense.std(0), 1, atol=0.015)
    np.testing.assert_allclose(np.corrcoef(dense.T) - np.eye(4), 0, atol=0.015)


def test_interactions_are_more_than_effects_of_single_ids():
    # The best additive model of two ids falls short of the Bayes score.
    source = Synthetic(
        rows=200_000, vocabulary=(5, 5), n_dense=0, hashed_keys=False, zipf=0.0
    )
    a, b = read_all(source).fixed.astype(int)
    logits = source.logits(0, source.rows)
    cells = np.zeros((5, 5))
    cells[a, b] = logits
    additive = cells.mean(1)[:, None] + cells.mean(0)[None] - cells.mean()
    assert np.abs(cells - additive).max() > 0.1


def test_a_synthetic_source_is_a_source():
    assert isinstance(SMALL, Source)
    assert SMALL.feature_names == next(SMALL.chunks()).feature_names == ("id_0", "id_1")
    assert SMALL.n_dense == next(SMALL.chunks()).n_dense == 3
    assert list(Synthetic(rows=0).chunks()) == []
    assert next(Synthetic(rows=5, vocabulary=()).chunks()).fixed.shape == (0, 5)
    assert next(Synthetic(rows=5, n_dense=0).chunks()).dense.shape == (5, 0)


def test_reading_is_fast():
    source = Synthetic(rows=300_000)
    source.read(0, 10)
    began = time.process_time()
    read_all(source)
    assert 300_000 / (time.process_time() - began) > 300_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": -1}, "`rows` must be at least 0, got -1"),
        ({"n_dense": -1}, "`n_dense` must be at least 0"),
        ({"seed": -1}, "`seed` must be at least 0"),
        ({"seed": 2**64}, r"`seed` must be below 2\*\*64, got 18446744073709551616"),
        ({"chunk_rows": 0}, "`chunk_rows` must be at least 1"),
        ({"vocabulary": (5, 0)}, "`vocabulary` must be at least 1, got 0"),
        ({"vocabulary": (), "n_dense": 0}, "must have features"),
        ({"zipf": 1}, "`zipf` must be at least 0 and other than 1, got 1"),
        ({"zipf": -0.5}, "`zipf` must be at least 0"),
        ({"click_rate": 0}, "`click_rate` must lie between 0 and 1, got 0"),
        ({"auc": 0.5}, "`auc` must lie between 0.5 and 0.99, got 0.5"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        Synthetic(**arguments)


def test_rows_that_are_not_there():
    for start, stop in ((-1, 5), (5, 4), (0, 101)):
        with pytest.raises(ValueError, match="rows must satisfy 0 <= start <= stop"):
            Synthetic(rows=100).read(start, stop)
    with pytest.raises(
        ValueError, match="rows to score must satisfy 0 <= start < stop"
    ):
        Synthetic(rows=100).bayes(5, 5)
    with pytest.raises(TypeError, match="`rows` must be an integer, got 1.5"):
        Synthetic(rows=1.5)
