"""Dicts of arrays: every form of keys and bags, and never an empty epoch."""

from functools import partial
from itertools import repeat

import numpy as np
import pandas as pd
import pytest

from shardjax.data import (
    MISSING_KEY,
    Batch,
    InMemory,
    Loader,
    Source,
    from_dicts,
    hash_strings,
)
from shardjax.data.dense import signed_log
from shardjax.embed.jagged import Jagged

PYTHON = 2**64 - 1


def make_dicts(n=3, size=2):
    return [{"y": [1] * size, "id": np.arange(size) + 10 * i} for i in range(n)]


def read(dicts, **options):
    return Batch.concat(list(from_dicts(dicts, label="y", **options).chunks()))


def keys(value):
    return (
        read([{"y": [0] * len(value), "k": value}], categorical=["k"]).fixed[0].tolist()
    )


def bags(value, size=None):
    y = [0] * (len(value) if size is None else size)
    bag = read([{"y": y, "b": value}], bags=["b"]).jagged["b"]
    ends = bag.offsets.tolist()
    return [bag.values[a:b].tolist() for a, b in zip(ends[:-1], ends[1:], strict=True)]


def object_array(rows):
    array = np.empty(len(rows), object)
    array[:] = rows
    return array


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.array([0, 7], np.uint8), [0, 7]),
        (np.array([-1, 2**40], np.int64), [PYTHON, 2**40]),
        (np.array([2**64 - 1, 0], np.uint64), [PYTHON, 0]),
        (np.array([[3], [4]]), [3, 4]),
        (np.array([True, False]), [1, 0]),
        ([5, -1], [5, PYTHON]),
        ([2**64 - 1, 5], [PYTHON, 5]),
        ([2**64 - 1, -1], [PYTHON, PYTHON]),
        ([2**53 + 1, -(2**63)], [2**53 + 1, 2**63]),
        ([np.uint64(2**63 + 1), 3], [2**63 + 1, 3]),
        ([5, None], [5, MISSING_KEY]),
        ([None, None], [MISSING_KEY, MISSING_KEY]),
        (object_array([2**64 - 1, None]), [PYTHON, MISSING_KEY]),
        (pd.Series([4, 5], index=[9, 8]), [4, 5]),
    ],
)
def test_integers_keep_their_bits(value, expected):
    assert keys(value) == expected


@pytest.mark.parametrize(
    "value",
    [
        ["a", "", "ü"],
        np.array(["a", "", "ü"]),
        np.array(["a", "", "ü"], object),
        np.array(["a", "", "ü"], np.dtypes.StringDType()),
        np.array([b"a", b"", "ü".encode()]),
        [b"a", b"", "ü".encode()],
        ["a", None, "ü"],
        pd.Series(["a", None, "ü"]),
    ],
)
def test_strings_are_hashed(value):
    assert keys(value) == hash_strings(["a", "", "ü"]).tolist()


class Ragged:
    """As the value of tf.data's ragged tensors."""

    def __init__(self, values, row_splits):
        self.values, self.row_splits = values, row_splits


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([[1, 2], [], [3]], [[1, 2], [], [3]]),
        ([(1, 2), None, np.array([3])], [[1, 2], [], [3]]),
        ([np.array([1, 2]), np.array([], int), np.array([3])], [[1, 2], [], [3]]),
        ([np.array([-1]), np.array([2**63], np.uint64)], [[PYTHON], [2**63]]),
        ([[-1], [2**63]], [[PYTHON], [2**63]]),
        (object_array([[1, 2], None, [3]]), [[1, 2], [], [3]]),
        (object_array([np.array([1, 2]), np.array([3])]), [[1, 2], [3]]),
        (pd.Series([[1, 2], [], [3]]), [[1, 2], [], [3]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.zeros((2, 0), int), [[], []]),
        (np.array([7, 8]), [[7], [8]]),
        ([7, 8], [[7], [8]]),
        ([[], []], [[], []]),
        ([None, None], [[], []]),
        ([], []),
        ([["a", "b"], []], [hash_strings(["a", "b"]).tolist(), []]),
        (np.array([["a", "b"]]), [hash_strings(["a", "b"]).tolist()]),
        (np.array(["a", "b"]), [[k] for k in hash_strings(["a", "b"]).tolist()]),
        (
            np.array(["a", "b"], object),
            [[k] for k in hash_strings(["a", "b"]).tolist()],
        ),
        ([["a", None]], [[*hash_strings(["a"]).tolist(), MISSING_KEY]]),
    ],
)
def test_every_form_of_bags(value, expected):
    assert bags(value) == expected


def test_jagged_and_ragged_bags():
    jagged = Jagged(np.array([1, 2, 3]), np.array([2, 0, 1]), np.array([0.5, 1, 2]))
    batch = read([{"y": [0, 0, 0], "b": jagged}], bags=["b"])
    assert batch.jagged["b"].weights.tolist() == [0.5, 1, 2]
    ragged = Ragged(np.array([1, 2, 3]), np.array([0, 2, 2, 3]))
    assert bags(ragged, 3) == [[1, 2], [], [3]]
    ragged = Ragged(np.array([b"a"], object), np.array([0, 1]))
    assert bags(ragged, 1) == [hash_strings(["a"]).tolist()]


def test_dense_entries():
    entries = {"y": [0, 1], "a": [1, 2], "b": np.array([[3.5, np.nan], [-5, 6]])}
    batch = read([entries], dense=["b", "a"])
    assert batch.dense.tolist() == [[3.5, 0, 1], [-5, 6, 2]]
    batch = read([entries], dense=["b"], dense_transform="log")
    assert batch.dense[1].tolist() == [signed_log(-5.0), signed_log(6.0)]


def test_labels_weights_and_groups():
    entries = {"y": np.array([[True], [False]]), "w": [0.5, 2], "u": ["a", "b"]}
    batch = read([entries], weight="w", group="u", categorical=["u"])
    assert batch.labels.tolist() == [1, 0]
    assert batch.weights.tolist() == [0.5, 2]
    assert batch.groups.tolist() == batch.fixed[0].tolist()


def test_a_source_says_what_it_gives():
    source = from_dicts(
        [{"y": [1], "d": [[1, 2]], "id": [3], "b": [[4]], "unused": object()}],
        label="y",
        dense=["d"],
        categorical=["id"],
        bags=["b"],
    )
    batch = next(source.chunks())
    assert isinstance(source, Source)
    assert source.feature_names == batch.feature_names == ("id", "b")
    assert source.n_dense == batch.n_dense == 2


def test_dicts_of_any_size_are_chunks():
    dicts = [{"y": [0] * n, "id": np.arange(n)} for n in (3, 0, 2)]
    source = from_dicts(dicts, label="y", categorical=["id"])
    assert [chunk.size for chunk in source.chunks()] == [3, 0, 2]
    assert [chunk.size for chunk in source.chunks(start_chunk=2)] == [2]
    assert list(source.chunks(start_chunk=3)) == []


class Again:
    """An iterable that starts anew at each pass."""

    def __iter__(self):
        return iter(make_dicts())


@pytest.mark.parametrize(
    "dicts",
    [
        make_dicts(),
        tuple(make_dicts()),
        Again(),
        make_dicts,
        lambda: iter(make_dicts()),
    ],
)
def test_what_can_be_read_again(dicts):
    loader = Loader(from_dicts(dicts, label="y", categorical=["id"]), 4)
    epochs = [[batch.fixed[0].tolist() for batch in loader] for _ in range(3)]
    assert epochs == [[[0, 1, 10, 11], [20, 21]]] * 3


class Same:
    """An iterable that hands out one iterator, as some data loaders do."""

    def __init__(self):
        self.iterator = iter(make_dicts())

    def __iter__(self):
        return self.iterator


SAME = iter(make_dicts())


def exhausted_anew():
    dicts = iter(make_dicts())
    return lambda: (d for d in dicts)


@pytest.mark.parametrize(
    ("dicts", "message"),
    [
        (iter(make_dicts()), "this list_iterator can only be read once"),
        ((d for d in make_dicts()), "this generator can only be read once"),
        (Same(), "this list_iterator can only be read once"),
        (partial(next, repeat(SAME)), "this list_iterator can only be read once"),
        (exhausted_anew(), "this function gave none"),
    ],
    ids=["iterator", "generator", "same", "function", "exhausted"],
)
def test_a_second_pass_is_never_empty(dicts, message):
    source = from_dicts(dicts, label="y", categorical=["id"])
    loader = Loader(source, 4)
    assert sum(batch.size for batch in loader) == 6
    with pytest.raises(RuntimeError, match=message):
        list(loader)
    with pytest.raises(RuntimeError, match="must be given again for a second pass"):
        list(source.chunks())


def test_an_iterator_that_is_read_once_may_be_kept_in_memory():
    source = InMemory(from_dicts(iter(make_dicts()), label="y", categorical=["id"]))
    loader = Loader(source, 4)
    assert [sum(batch.size for batch in loader) for _ in range(2)] == [6, 6]


def test_an_endless_iterable_is_read_as_needed():
    def forever():
        while True:
            yield from make_dicts()

    loader = Loader(from_dicts(forever, label="y", categorical=["id"]), 4)
    for _ in loader:
        if loader.batches == 100:
            break
    assert loader.batches == 100


@pytest.mark.parametrize(
    ("entries", "options", "error", "message"),
    [
        ([1], {}, TypeError, "must give dicts of arrays, got list as number 1"),
        ({"x": [1]}, {}, ValueError, "dict 1 must have the entry 'y', got only: 'x'"),
        ({"y": ["a"]}, {}, TypeError, "'y' of dict 1 must be numbers, got dtype <U1"),
        ({"y": [np.nan]}, {}, ValueError, "must be finite, got nan in row 0"),
        ({"y": [1e39]}, {}, ValueError, "must be finite, got inf in row 0"),
        ({"y": 1}, {}, ValueError, r"must have shape \[batch\], got \(\)"),
        ({"y": [[1, 2]]}, {}, ValueError, r"must have shape \[batch\], got \(1, 2\)"),
    ],
)
def test_malformed_dicts(entries, options, error, message):
    source = from_dicts([{"y": [0]}, entries], label="y", **options)
    with pytest.raises(error, match=message):
        list(source.chunks())


@pytest.mark.parametrize(
    ("role", "value", "error", "message"),
    [
        ("categorical", [1.5, 2], TypeError, "must be integers or strings, got float"),
        ("categorical", np.array([1.0, 2]), TypeError, "strings, got dtype float64"),
        ("categorical", [1, "a"], TypeError, "strings, got int and str"),
        ("categorical", ["a", b"a"], TypeError, "strings, got bytes and str"),
        ("categorical", ["a", 1.5], TypeError, "strings, got float and str"),
        (
            "categorical",
            [2**64, 1],
            ValueError,
            "fit 64 bits, got 18446744073709551616",
        ),
        ("categorical", [-(2**63) - 1, 1], ValueError, "must fit 64 bits, got -92233"),
        (
            "categorical",
            [1],
            ValueError,
            r"shape \[2\], as there are 2 labels, got \(1,",
        ),
        ("categorical", np.arange(3), ValueError, r"must have shape \[2\], .* \(3,\)"),
        ("categorical", np.ones((2, 2), int), ValueError, r"\[2\], .* got \(2, 2\)"),
        ("categorical", [[1], [2, 3]], ValueError, "got lists. Name it in `bags`"),
        ("bags", [[1], [2.5]], TypeError, "integers or strings, got float and int"),
        ("bags", [[1], 5], TypeError, "must be sequences of keys, got 5 in row 1"),
        ("bags", ["a|b", ["c"]], TypeError, "sequences of keys, got 'a.b' in row 0"),
        ("bags", [[1]], ValueError, "must have 2 bags, as there are 2 labels, got 1"),
        ("bags", np.ones((2, 2, 2), int), ValueError, r"\[2, n\], .* got \(2, 2, 2\)"),
        ("bags", np.ones((2, 2)), TypeError, "got dtype float64"),
        ("dense", ["a", "b"], TypeError, "must be numbers, got dtype <U1"),
        ("dense", [1, 2, 3], ValueError, r"shape \[2\] or \[2, n\], .* got \(3, 1\)"),
        ("dense", [1, np.inf], ValueError, r"finite in float32, got \[inf\] in row 1"),
        ("weight", [1, -1], ValueError, "'x' of dict 0 must not be negative, got -1.0"),
        ("weight", [1], ValueError, r"must have shape \[2\], as there are 2 labels"),
        ("group", [1.5, 2.5], TypeError, "'x' of dict 0 must be integers or strings"),
    ],
)
def test_malformed_entries(role, value, error, message):
    names = "x" if role in ("weight", "group") else ["x"]
    with pytest.raises(error, match=message):
        from_dicts([{"y": [0, 1], "x": value}], label="y", **{role: names})


def test_dense_features_must_stay_as_many():
    dicts = [{"y": [0], "d": [[1, 2]]}, {"y": [0], "d": [[1]]}]
    source = from_dicts(dicts, label="y", dense=["d"])
    with pytest.raises(ValueError, match="dict 1 must have 2 dense .* got 1"):
        list(source.chunks())


def test_bad_options():
    with pytest.raises(
        TypeError, match="`dicts` must be an iterable of dicts, .* got int"
    ):
        from_dicts(5, label="y")  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError, match="`dicts` must give at least one dict, got none"
    ):
        from_dicts([], label="y")
    with pytest.raises(TypeError, match=r"`dense` must be a list .* Give \['d'\]"):
        from_dicts(make_dicts(), label="y", dense="d")
    with pytest.raises(ValueError, match="the entry 'y' must have one role, got two"):
        from_dicts(make_dicts(), label="y", dense=["y"])
    with pytest.raises(ValueError, match="`dense_transform` must be"):
        from_dicts(make_dicts(), label="y", dense_transform="x")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "given", [{"y": np.zeros(2)}, pd.DataFrame({"y": [0, 1]})], ids=["dict", "frame"]
)
def test_one_dict_is_not_a_series_of_them(given):
    with pytest.raises(
        TypeError, match=r"got one (dict|DataFrame). Put it into a list"
    ):
        from_dicts(given, label="y")
    [batch] = from_dicts([dict(given.items())], label="y").chunks()
    assert len(batch.labels) == 2
