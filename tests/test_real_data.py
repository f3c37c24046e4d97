"""The click-through program on real data, where it is at hand: is it good enough?

Beyond the files and their columns, a run may differ from the defaults in learning rates,
dim and epochs alone.
"""

import csv
from pathlib import Path

import numpy as np
import pytest

from experiments import ctr

FOLDER = Path(__file__).parents[2] / "shared" / "data"


def path_of(name):
    """Finds a file of the shared data, or skips the test."""
    if not FOLDER.is_dir():
        pytest.skip(f"no shared data at {FOLDER}")
    return str(FOLDER / name)


def run(data, **changes):
    data = {"in_memory": True, **data}
    return ctr.main(ctr.from_anything({"data": data, **changes}))


@pytest.mark.slow
def test_kdd12_clicks_are_ranked_better_than_by_logistic_regression():
    path = path_of("kdd12_click_small/Click_prediction_small.csv")
    result = run({"path": path, "label": "click"}, epochs=2, model={"dim": 4})
    assert result["eval/examples"] == 7990
    assert result["eval/auc"] >= 0.700
    assert result["eval/logloss"] <= 0.412


@pytest.mark.slow
def test_movielens_ratings_of_four_and_more_are_ranked_with_a_bag_of_genres(tmp_path):
    with open(path_of("ml_latest_small/movies.csv"), encoding="utf-8") as file:
        genres = {row["movieId"]: row["genres"] for row in csv.DictReader(file)}
    with open(path_of("ml_latest_small/ratings.csv"), encoding="utf-8") as file:
        ratings = list(csv.DictReader(file))
    path = tmp_path / "ratings.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["userId", "movieId", "genres", "rating"])
        # the order of pandas' .sample(frac=1, random_state=0)
        for i in np.random.RandomState(0).permutation(len(ratings)):
            row = ratings[i]
            movie = row["movieId"]
            writer.writerow([row["userId"], movie, genres[movie], row["rating"]])
    data = {"path": str(path), "label": "rating", "label_threshold": 4}
    result = run(data, epochs=2, optim={"rows_lr": 0.3})
    assert result["eval/examples"] == 20001
    assert result["eval/auc"] >= 0.790


@pytest.mark.slow
def test_agaricus_mushrooms_are_told_apart():
    train = path_of("agaricus/agaricus_train.txt")
    test = path_of("agaricus/agaricus_test.txt")
    result = run({"path": train, "eval_path": test}, epochs=5)
    assert result["eval/examples"] == 1611
    assert result["eval/auc"] >= 0.999
