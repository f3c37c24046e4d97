"""Slot text in its three layouts: exactly the keys of the file, every fault named."""

import gzip
import random
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from shardjax.data import Batch, Source, slots
from shardjax.data.dense import signed_log

SHARED = Path(__file__).parents[3] / "shared" / "data" / "paddlerec"


def write(tmp_path, text, name="a.txt"):
    path = tmp_path / name
    data = text.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def read(path, **options):
    return Batch.concat(list(slots(path, **options).chunks()))


def bags_of(bags):
    ends = bags.offsets.tolist()
    return [bags.values[a:b].tolist() for a, b in zip(ends[:-1], ends[1:], strict=True)]


def features_of(batch):
    return {name: bags_of(bags) for name, bags in batch.jagged.items()}


def need(path):
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return path


@pytest.mark.parametrize("block_bytes", [1 << 20, 20_000])
def test_the_demo_of_slot_dnn_to_the_key(block_bytes):
    path = need(SHARED / "slot_dnn_demo_10.txt")
    source = slots(path, block_bytes=block_bytes, slots=range(1, 302))
    batch = Batch.concat(list(source.chunks()))
    expected = [defaultdict(list) for _ in range(10)]
    for line, bag in zip(path.read_text().splitlines(), expected, strict=True):
        for word in line.split():
            key, slot = map(int, word.split(":"))
            bag[slot].append(key)
    assert batch.labels.tolist() == [bag.pop(1)[0] for bag in expected]
    for slot in range(2, 302):
        found = bags_of(batch.jagged[f"slot_{slot}"])
        assert found == [bag[slot] for bag in expected]
    keys = np.concatenate([bags.values for bags in batch.jagged.values()])
    assert len(keys) + len(batch.labels) == 4547
    assert (keys >= 2**63).sum() == 2275


def test_the_demo_finds_its_slots():
    path = need(SHARED / "slot_dnn_demo_10.txt")
    source = slots(path)
    slot = {int(word.split(":")[1]) for word in path.read_text().split()}
    assert source.layout == "key:slot"
    assert source.label == "1"
    assert source.feature_names == tuple(f"slot_{n}" for n in sorted(slot - {1}))


def test_multiview_simnet_has_slots_first_and_no_label():
    path = need(SHARED / "multiview_simnet_train.txt")
    batch = read(path, layout="slot:key", label=None)
    assert batch.size == 129
    assert batch.labels.tolist() == [0] * 129
    lines = path.read_text().splitlines()
    for slot in range(3):
        assert bags_of(batch.jagged[f"slot_{slot}"]) == [
            [int(w.split(":")[1]) for w in line.split() if w.startswith(f"{slot}:")]
            for line in lines
        ]


KEYS = [0, 1, 2**31, 2**53 + 1, 2**63, 2**64 - 1]


def make_lines(rng, layout, n=300):
    """Lines of a layout and what they hold: label, and keys of slots 2, 3 and 10."""
    lines, expected = [], []
    for _ in range(n):
        label = rng.choice([0, 1])
        bags = {
            slot: [rng.choice(KEYS) for _ in range(rng.randrange(4))]
            for slot in ("2", "3", "10")
        }
        if layout == "multi":
            words = ["1", str(label)]
            for keys in bags.values():
                words += map(str, [len(keys), *keys])
        else:
            pairs = [(slot, key) for slot, keys in bags.items() for key in keys]
            order = sorted(range(len(pairs)), key=lambda i: (rng.random(), i))
            by_slot = {slot: iter(keys) for slot, keys in bags.items()}
            pairs = [("1", label)] + [
                (pairs[i][0], next(by_slot[pairs[i][0]])) for i in order
            ]
            words = [
                f"{k}:{s}" if layout == "key:slot" else f"{s}:{k}" for s, k in pairs
            ]
        lines.append(rng.choice([" ", "\t", "  "]).join(words) + rng.choice(["", " "]))
        expected.append((label, bags))
        if rng.random() < 0.1:
            lines.append("")
    return lines, expected


@pytest.mark.parametrize("layout", ["key:slot", "slot:key", "multi"])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(("block_bytes", "threads"), [(1 << 20, 1), (500, 3)])
def test_lines_against_plain_python(tmp_path, layout, name, end, block_bytes, threads):
    lines, expected = make_lines(random.Random(0), layout)
    batch = read(
        write(tmp_path, end.join(lines), name),
        layout=layout,
        slots=["1", "2", "3", "10"],
        block_bytes=block_bytes,
        threads=threads,
    )
    assert batch.feature_names == ("slot_2", "slot_3", "slot_10")
    assert batch.labels.tolist() == [label for label, _ in expected]
    for slot in ("2", "3", "10"):
        found = bags_of(batch.jagged[f"slot_{slot}"])
        assert found == [bags[slot] for _, bags in expected]


def test_a_source_says_what_it_gives(tmp_path):
    source = slots(write(tmp_path, "click:1 user:7 D:0.5 D:2\n"), dense=["D"])
    batch = next(source.chunks())
    assert isinstance(source, Source)
    assert source.layout == "slot:key"
    assert source.feature_names == batch.feature_names == ("user",)
    assert source.n_dense == batch.n_dense == 2
    assert batch.jagged["user"].weights is None


def test_layouts_are_told_by_the_first_word(tmp_path):
    assert slots(write(tmp_path, "0:1 5:2\n")).layout == "key:slot"
    assert slots(write(tmp_path, "click:0 5:2\n")).layout == "slot:key"
    assert slots(write(tmp_path, "1 0 1 5\n")).layout == "multi"
    assert slots(write(tmp_path, "0:click 5:2\n")).layout == "key:slot"


def test_multi_without_names(tmp_path):
    source = slots(write(tmp_path, "1 0 3 7 8 9 1 5\n1 1 1 6 0\n"))
    assert source.feature_names == ("slot_1", "slot_2")
    batch = next(source.chunks())
    assert batch.labels.tolist() == [0, 1]
    assert features_of(batch) == {"slot_1": [[7, 8, 9], [6]], "slot_2": [[5], []]}


def test_multi_with_names_and_numbers(tmp_path):
    path = write(tmp_path, "2 7 8 3 0.5 -1 1e2 1 1\n0 3 1 2 3 1 0\n")
    source = slots(
        path,
        slots=["item", "dense_feature", "click"],
        label="click",
        dense=["dense_feature"],
        dense_transform="none",
    )
    batch = next(source.chunks())
    assert batch.labels.tolist() == [1, 0]
    assert features_of(batch) == {"item": [[7, 8], []]}
    assert batch.dense.tolist() == [[0.5, -1, 100], [1, 2, 3]]


def test_dense_slots_keep_their_order_within_a_slot(tmp_path):
    # The slots are mixed up in the second line; each one's numbers are not.
    path = write(tmp_path, "y:1 A:1 A:2 B:3 i:5\nB:6 A:4 i:7 y:0 A:5\n")
    batch = read(path, dense=["A", "B"], dense_transform="none")
    assert batch.dense.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert batch.labels.tolist() == [1, 0]
    assert features_of(batch) == {"i": [[5], [7]]}
    batch = read(path, dense=["B"], slots=["i", "A"])
    assert features_of(batch)["A"] == [[1, 2], [4, 5]]
    assert batch.dense[:, 0].tolist() == [signed_log(3.0), signed_log(6.0)]


def test_slots_that_come_later(tmp_path):
    path = write(tmp_path, "0:1 5:2\n" * 9 + "1:1 6:33 7:2 8:33\n")
    with pytest.raises(
        ValueError, match=r"a\.txt, line 10: '6:33' is of a slot .* 2 kn"
    ):
        read(path, block_bytes=20)
    with pytest.raises(ValueError, match="line 10"):
        read(path, block_bytes=20, on_bad_line="skip")
    source = slots(path, block_bytes=20, unknown_slots="drop")
    batch = Batch.concat(list(source.chunks()))
    assert features_of(batch) == {"slot_2": [[5]] * 9 + [[7]]}
    assert (source.dropped_keys, batch.bad_lines) == (2, 0)
    # Known from the first block, if that is large enough; or given.
    assert read(path).feature_names == ("slot_2", "slot_33")
    batch = read(path, block_bytes=20, slots=[33, 2])
    assert features_of(batch)["slot_33"] == [[]] * 9 + [[6, 8]]


def test_slots_may_be_chosen(tmp_path):
    path = write(tmp_path, "0:1 5:2 6:3\n1:1 7:3\n")
    with pytest.raises(ValueError, match="'5:2' is of a slot"):
        read(path, slots=[3])
    source = slots(path, slots=[3], unknown_slots="drop")
    batch = next(source.chunks())
    assert features_of(batch) == {"slot_3": [[6], [7]]}
    assert source.dropped_keys == 1


def test_labels_may_be_signed_or_have_a_threshold(tmp_path):
    path = write(tmp_path, "-1:1 5:2\n1:1 5:2\n")
    assert read(path).labels.tolist() == [0, 1]
    path = write(tmp_path, "3.5:1 5:2\n4:1 5:2\n")
    assert read(path, label_threshold=4).labels.tolist() == [0, 1]


PAIRS = [
    ("1:1 7", "'7' is not key:slot"),
    ("1:1 7:2:3", "'7:2:3' is not key:slot"),
    ("1:1 x:2", "'x:2' has no key from 0 to 2\\*\\*64 - 1"),
    ("1:1 :2", "':2' has no key"),
    ("1:1 -5:2", "'-5:2' has no key"),
    ("1:1 1.5:2", "'1.5:2' has no key"),
    ("1:1 18446744073709551616:2", "has no key"),
    ("5:2", "the label, slot '1', must come once in a line"),
    ("1:1 5:2 0:1", "the label, slot '1', must come once in a line"),
    ("3:1 5:2", "'3:1' is not a label, 0 or 1 or -1"),
    ("x:1 5:2", "'x:1' is not a label"),
]
MULTI = [
    ("1 1 x 7", "each be `n key ... key`, and there is no number n where one must be"),
    ("1 1 -1 7", "there is no number n where one must be"),
    ("1 1 2 7", "each be `n key ... key`, and the line ends before"),
    ("1 1", "the line ends before"),
    ("1 1 18446744073709551615 7", "the line ends before"),
    ("1 1 1 7 8", "the line goes on after"),
    ("1 1 1 x", "'x' has no key from 0 to 2\\*\\*64 - 1"),
    ("0 1 7", "the label, slot '0', must come once in a line"),
    ("2 0 0 1 7", "the label, slot '0', must come once in a line"),
    ("1 9 1 7", "'9' is not a label"),
]


@pytest.mark.parametrize(
    ("good", "line", "message"),
    [("0:1 5:2", *case) for case in PAIRS] + [("1 0 1 5", *case) for case in MULTI],
)
def test_malformed_lines(tmp_path, good, line, message):
    path = write(tmp_path, f"{good}\n\n{line}\n{good}\n{line}\n{good}\n")
    with pytest.raises(ValueError, match=rf"a\.txt, line 3: .*{message}") as caught:
        read(path)
    assert "on_bad_line='skip'" in str(caught.value)
    batch = read(path, on_bad_line="skip")
    assert batch.bad_lines == 2
    assert batch.labels.tolist() == [0, 0, 0]
    assert list(features_of(batch).values()) == [[[5]] * 3]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("y:0 D:1", "the dense slot 'D' must have 2 numbers in a line"),
        ("y:0 D:1 D:2 D:3", "the dense slot 'D' must have 2 numbers in a line"),
        ("y:0 D:1 D:x", "'D:x' has no finite number"),
        ("y:0 D:1 D:nan", "'D:nan' has no finite number"),
    ],
)
def test_malformed_numbers(tmp_path, line, message):
    path = write(tmp_path, f"y:1 D:1 D:2\n{line}\ny:0 D:3 D:4\n")
    with pytest.raises(ValueError, match=f"line 2: {message}"):
        read(path, dense=["D"])
    batch = read(path, dense=["D"], dense_transform="none", on_bad_line="skip")
    assert batch.dense.tolist() == [[1, 2], [3, 4]]
    assert (batch.bad_lines, batch.labels.tolist()) == (1, [1, 0])


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("0:1\n", {"layout": "x"}, "`layout` must be 'auto', 'key:slot'"),
        ("0:1\n", {"on_bad_line": "x"}, "`on_bad_line` must be"),
        ("0:1\n", {"unknown_slots": "x"}, "`unknown_slots` must be 'error' or 'drop'"),
        ("0:1\n", {"dense_transform": "x"}, "`dense_transform` must be"),
        ("0:1 5:2\n", {"slots": [2, 2]}, "`slots` must be different slots"),
        ("0:1 5:2\n", {"dense": [2, 2]}, "`dense` must be different slots"),
        ("0:1 5:2\n", {"label": 7}, "`label` must be one of the slots 1, 2, got '7'"),
        ("0:1 5:2\n", {"dense": [7]}, "`dense` must be one of the slots 1, 2, got '7'"),
        ("0:1 5:2\n", {"dense": [1]}, "'1' must not be both `label` and `dense`"),
        (
            "0:1\n1:1 5:2\n",
            {"dense": [2]},
            "line 1: the first line must .* none of '2'",
        ),
        ("\n \n", {}, "there must be a line to tell the slots from, got none"),
        ("5 6\n", {"layout": "key:slot"}, "line 1: words must be key:slot, got '5'"),
        ("1 0 x\n", {}, "line 1: a line must .* slot 1 is not: 'x' is no number of"),
        ("1 0 5 7\n", {}, "slot 1 is not: '5' is no number of keys that follow"),
        ("1 0\n", {"slots": []}, "`slots` must name at least one slot"),
    ],
)
def test_bad_options(tmp_path, text, options, message):
    with pytest.raises(ValueError, match=message):
        slots(write(tmp_path, text), **options)


def test_many_slots_are_listed_in_part(tmp_path):
    words = " ".join(f"1:{slot}" for slot in range(100))
    with pytest.raises(ValueError, match=r"slots 0, 1, .*, 19, \.\.\., got 'x'"):
        slots(write(tmp_path, words), label="x")


def test_chunks_can_be_passed_over(tmp_path):
    path = write(tmp_path, "".join(f"{i % 2}:1 {i}:2\n" for i in range(100)))
    source = slots(path, block_bytes=60)
    sizes = [chunk.size for chunk in source.chunks()]
    rest = Batch.concat(list(source.chunks(start_chunk=3)))
    assert rest.jagged["slot_2"].values[0] == sum(sizes[:3])
