"""Slot text, as PaddlePaddle's fleet reads it: keys of numbered or named slots."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Literal

import numba
import numpy as np

from shardjax.data.batch import Batch
from shardjax.data.dense import DenseTransform, check_dense_transform
from shardjax.data.files import (
    BLOCK_BYTES,
    Block,
    Paths,
    find_files,
    map_in_order,
    read_blocks,
)
from shardjax.data.libsvm_files import Unknown, check_unknown
from shardjax.data.source import OnBadLine, check_on_bad_line
from shardjax.data.tokens import (
    Faults,
    Names,
    Tokens,
    dense_matrix,
    group_bags,
    label_rule,
    parse_finite,
    parse_labels,
    parse_unsigned,
    renumber,
    split_block,
)

Layout = Literal["auto", "key:slot", "slot:key", "multi"]
"""How lines are written: as pairs, or per slot in a fixed order `n key ... key`."""

_COUNT, _NOT_A_COUNT, _TOO_FEW, _TOO_MANY = -2, 1, 2, 3


def slots(
    paths: Paths,
    *,
    layout: Layout = "auto",
    slots: Sequence[str | int] | None = None,
    label: str | int | None = "auto",
    dense: Sequence[str | int] = (),
    dense_transform: DenseTransform = "log",
    unknown_slots: Unknown = "error",
    label_threshold: float | None = None,
    on_bad_line: OnBadLine = "error",
    block_bytes: int = BLOCK_BYTES,
    threads: int = 1,
) -> "SlotSource":
    """Reads slot text, a line an example, with words between blanks.

    There are three layouts:

    - "key:slot": `0:1 4351255118977467729:3 9206016659941245237:29 ...`, pairs in any
      order, any number of a slot, as of PaddleRec's slot_dnn;
    - "slot:key": `click:0 user:77 item:5 item:6 ...`, the same the other way round;
    - "multi": `1 0 1 77 2 5 6`, for each slot in a fixed order how many keys it has,
      then the keys, as of MultiSlotDataGenerator.

    "auto" goes by the first word: without a colon it is "multi", with anything but a
    number before the colon it is "slot:key", else "key:slot".

    Keys are 0 to 2**64 - 1. A slot makes a jagged feature, which has a slot's name,
    or is "slot_3" if that is a number; a line without the slot has an empty bag. (Where
    Paddle puts a key 0 there, here a key is what is in the file.)

    Args:
      paths: files, plain or gzip, as of `find_files`.
      layout: see above.
      slots: the slots to take as features; None for all of the first block, by number
        or else by name. With "multi", the names of all slots in their order, those of
        label and dense as well; None for as many as the first line has, 0, 1, ...
      label: the slot of the label; "auto" for the first of the first line; None if
        there is none, then labels are 0. It must come once in a line, and be 0 or -1
        (which becomes 0), or 1.
      dense: slots of numbers. Each makes as many dense features as it has numbers in
        the first line, and must have so many in all.
      dense_transform: "log" or "none".
      unknown_slots: what to do with a slot that is none of these: "error" raises,
        "drop" leaves it out and counts its keys in `source.dropped_keys`.
      label_threshold: labels become 1 where they are at least this, else 0.
      on_bad_line: "error" raises at the first line that is not of this form; "skip"
        leaves it out and counts it in `Batch.bad_lines`.
      block_bytes: how much text makes a chunk.
      threads: how many chunks are parsed at once.

    Returns:
      A source of batches.

    Raises:
      FileNotFoundError: if a file is missing or a glob matches none.
      ValueError: if an option is not one of those above or does not fit the files;
        while reading, if a line is malformed or a slot unknown: the error names file,
        line and what is wrong.

    Example:
      >>> import tempfile
      >>> with tempfile.NamedTemporaryFile("w") as file:
      ...     size = file.write("0:1 77:3 5:4 6:4\\n1:1 78:3\\n")
      ...     file.flush()
      ...     batch = next(slots(file.name).chunks())
      >>> batch.labels.tolist(), batch.feature_names
      ([0.0, 1.0], ('slot_3', 'slot_4'))
      >>> bags = batch.jagged["slot_4"]
      >>> bags.values.tolist(), bags.lengths.tolist()
      ([5, 6], [2, 0])
    """
    check_on_bad_line(on_bad_line)
    check_dense_transform(dense_transform)
    check_unknown("unknown_slots", unknown_slots)
    if layout not in ("auto", "key:slot", "slot:key", "multi"):
        raise ValueError(
            "`layout` must be 'auto', 'key:slot', 'slot:key' or 'multi', got"
            f" {layout!r}"
        )
    files = find_files(paths)
    tokens = _first_tokens(files, block_bytes)
    if layout == "auto":
        layout = _guess_layout(tokens)
    given = None if slots is None else tuple(map(str, slots))
    dense_slots = tuple(map(str, dense))
    if layout == "multi":
        order = _multi_slots(tokens) if given is None else given
        if not order:
            raise ValueError(f"`slots` must name at least one slot, got {slots!r}")
        found, first = order, order[0]
    else:
        part = 1 if layout == "key:slot" else 0
        pairs = np.flatnonzero(tokens.n_colons == 1)
        if not len(pairs):
            raise ValueError(
                f"{tokens.place(0)}: words must be {layout}, got {tokens.show(0)}"
            )
        order, found = (), _names(tokens, pairs, part)
        first = tokens.parts(part, pairs[:1])[0]
    label = first if label == "auto" else None if label is None else str(label)
    for option, names in (("slots", given or ()), ("dense", dense_slots)):
        if len(set(names)) < len(names):
            raise ValueError(f"`{option}` must be different slots, got {names}")
    for option, name in (("label", label), *(("dense", name) for name in dense_slots)):
        if name is not None and name not in found:
            shown = ", ".join([*found[:20], *["..."] * (len(found) > 20)])
            raise ValueError(
                f"`{option}` must be one of the slots {shown}, got {name!r}"
            )
    if label in dense_slots:
        raise ValueError(f"the slot {label!r} must not be both `label` and `dense`")
    features = found if given is None else given
    features = tuple(n for n in features if n != label and n not in dense_slots)
    known = (*features, *dense_slots, *(() if label is None else (label,)))
    widths = _first_widths(tokens, layout, order, dense_slots)
    if 0 in widths:
        raise ValueError(
            f"{tokens.place(0)}: the first line must have numbers of each of the"
            f" `dense` slots, got none of {dense_slots[widths.index(0)]!r}"
        )
    return SlotSource(
        files,
        layout,
        features,
        label,
        dense_slots,
        widths,
        tuple(known.index(name) for name in order),
        dense_transform,
        unknown_slots,
        label_threshold,
        on_bad_line,
        block_bytes,
        threads,
    )


@dataclass(frozen=True)
class SlotSource:
    """A source of slot text; `slots` makes it.

    Attributes:
      files: paths.
      layout: how lines are written; not "auto".
      slots: the slots that are features, as written.
      label: the slot of the label, or None.
      dense: the slots of numbers.
      widths: how many numbers each of these has.
      order: with "multi", the number of each slot of a line among `slots`, `dense` and
        `label`, as they follow each other.
      dense_transform, unknown_slots, label_threshold, on_bad_line, block_bytes,
        threads: as of `slots`.
    """

    files: tuple[str, ...]
    layout: Layout
    slots: tuple[str, ...]
    label: str | None
    dense: tuple[str, ...]
    widths: tuple[int, ...]
    order: tuple[int, ...]
    dense_transform: DenseTransform
    unknown_slots: Unknown
    label_threshold: float | None
    on_bad_line: OnBadLine
    block_bytes: int
    threads: int
    _dropped: Counter[str] = field(
        default_factory=Counter, init=False, repr=False, compare=False
    )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """A feature for each slot."""
        return tuple(f"slot_{n}" if n.isdecimal() else n for n in self.slots)

    @property
    def n_dense(self) -> int:
        """How many numbers the dense slots have together."""
        return sum(self.widths)

    @property
    def dropped_keys(self) -> int:
        """How many keys of unknown slots were dropped, in all passes so far."""
        return self._dropped.total()

    def chunks(self, start_chunk: int = 0) -> Iterator[Batch]:
        """Starts a fresh pass over the files.

        Args:
          start_chunk: how many chunks to pass over without parsing them.

        Yields:
          One chunk for each block of lines.
        """
        blocks = chain.from_iterable(
            read_blocks(path, self.block_bytes) for path in self.files
        )
        names = Names(self._known)
        parsed = map_in_order(
            lambda block: self._parse(block, names),
            islice(blocks, start_chunk, None),
            self.threads,
        )
        for batch, dropped in parsed:
            self._dropped["keys"] += dropped
            yield batch

    @property
    def _known(self) -> tuple[str, ...]:
        label = () if self.label is None else (self.label,)
        return (*self.slots, *self.dense, *label)

    def _parse(self, block: Block, names: Names) -> tuple[Batch, int]:
        tokens = split_block(block)
        faults = Faults(tokens)
        if self.layout == "multi":
            words, columns = self._walk(tokens, faults)
            values_of = tokens.cells
        else:
            words = np.flatnonzero(tokens.n_colons == 1)
            faults.add_words(
                np.flatnonzero(tokens.n_colons != 1), f"is not {self.layout}"
            )
            part = 1 if self.layout == "key:slot" else 0
            columns = names.find(tokens.parts(part, words))
            values_of = partial(tokens.parts, 1 - part)
        n_slots, n_dense = len(self.slots), len(self.dense)
        lines = tokens.lines[words]

        keys, wrong = parse_unsigned(values_of(words))
        wrong &= columns < n_slots
        faults.add_words(words[wrong], "has no key from 0 to 2**64 - 1")

        labels = np.zeros(tokens.n_lines)
        if self.label is not None:
            at = np.flatnonzero(columns == n_slots + n_dense)
            found, wrong = parse_labels(values_of(words[at]), self.label_threshold)
            faults.add_words(words[at[wrong]], label_rule(self.label_threshold))
            count = np.bincount(lines[at], minlength=tokens.n_lines)
            faults.add_lines(
                np.flatnonzero(count != 1),
                f"the label, slot {self.label!r}, must come once in a line",
            )
            labels[lines[at]] = found

        at = np.flatnonzero((columns >= n_slots) & (columns < n_slots + n_dense))
        numbers, wrong = parse_finite(values_of(words[at]))
        faults.add_words(words[at[wrong]], "has no finite number")
        cell = lines[at] * n_dense + columns[at] - n_slots
        count = np.bincount(cell, minlength=tokens.n_lines * n_dense)
        count = count.reshape(tokens.n_lines, n_dense)
        for i, (name, width) in enumerate(zip(self.dense, self.widths, strict=True)):
            faults.add_lines(
                np.flatnonzero(count[:, i] != width),
                f"the dense slot {name!r} must have {width} numbers in a line",
            )

        good = faults.settle(self.on_bad_line == "skip")
        rows, n_rows = renumber(lines, tokens.n_lines, good)
        unknown = (columns == -1) & (rows >= 0)
        if unknown.any() and self.unknown_slots == "error":
            word = words[np.argmax(unknown)]
            raise ValueError(
                f"{tokens.place(int(tokens.lines[word]))}: {tokens.show(word)} is of a"
                f" slot that is not one of the {len(self._known)} known ones, those of"
                " the first block or those given. Give `slots`, or unknown_slots='drop'"
                " to leave others out and count them."
            )
        # By row and dense slot; the numbers of one slot stay in their order.
        order = np.argsort(cell, kind="stable")
        order = order[rows[at][order] >= 0]
        keep = np.flatnonzero((columns >= 0) & (columns < n_slots) & (rows >= 0))
        batch = Batch(
            labels if good is None else labels[good],
            dense_matrix(
                numbers[order], n_rows, self.n_dense, self.dense_transform == "log"
            ),
            np.zeros((0, n_rows), np.uint64),
            jagged=group_bags(
                self.feature_names, columns[keep], rows[keep], n_rows, keys[keep]
            ),
            bad_lines=tokens.n_lines - n_rows,
        )
        return batch, int(unknown.sum())

    def _walk(self, tokens: Tokens, faults: Faults) -> tuple[np.ndarray, np.ndarray]:
        """Follows the counts of "multi": the words that are values, and their slots."""
        counts, wrong = parse_unsigned(tokens.cells())
        columns, faulty = _walk_lines(
            counts, wrong, tokens.firsts, np.array(self.order, np.int64)
        )
        count = f"the {len(self.order)} slots must each be `n key ... key`"
        for fault, rule in (
            (_NOT_A_COUNT, f"{count}, and there is no number n where one must be"),
            (_TOO_FEW, f"{count}, and the line ends before"),
            (_TOO_MANY, f"{count}, and the line goes on after"),
        ):
            faults.add_lines(np.flatnonzero(faulty == fault), rule)
        words = np.flatnonzero(columns != _COUNT)
        return words, columns[words]


@numba.njit(nogil=True, cache=True)
def _walk_lines(counts, wrong, firsts, order):
    """Gives each word the column of its slot, and each line its fault, 0 if none."""
    columns = np.full(len(counts), _COUNT, np.int64)
    faulty = np.zeros(len(firsts), np.int8)
    for line in range(len(firsts)):
        at = firsts[line]
        stop = firsts[line + 1] if line + 1 < len(firsts) else len(counts)
        for column in order:
            if at == stop:
                faulty[line] = _TOO_FEW
                break
            if wrong[at]:
                faulty[line] = _NOT_A_COUNT
                break
            if counts[at] > np.uint64(stop - at - 1):
                faulty[line] = _TOO_FEW
                break
            n = np.int64(counts[at])
            columns[at + 1 : at + 1 + n] = column
            at += 1 + n
        if faulty[line] == 0 and at < stop:
            faulty[line] = _TOO_MANY
        if faulty[line]:
            columns[firsts[line] : stop] = _COUNT
    return columns, faulty


def _first_tokens(files: Sequence[str], block_bytes: int) -> Tokens:
    for block in chain.from_iterable(read_blocks(path, block_bytes) for path in files):
        tokens = split_block(block)
        if tokens.n_lines:
            return tokens
    raise ValueError(
        f"there must be a line to tell the slots from, got none in {files}"
    )


def _guess_layout(tokens: Tokens) -> Layout:
    if tokens.n_colons[0] == 0:
        return "multi"
    _, is_name = parse_finite(tokens.parts(0, np.arange(1)))
    return "slot:key" if is_name[0] else "key:slot"


def _names(tokens: Tokens, pairs: np.ndarray, part: int) -> tuple[str, ...]:
    """Lists the slots of pairs, those that are numbers by number, then by name."""
    cells = tokens.parts(part, pairs)
    numbers, wrong = parse_unsigned(cells)
    by_number = np.unique(numbers[~wrong], return_index=True)[1]
    plain = np.flatnonzero(~wrong)[by_number]
    named = sorted({cells[at] for at in np.flatnonzero(wrong).tolist()})
    return (*(cells[at] for at in plain.tolist()), *named)


def _multi_slots(tokens: Tokens) -> tuple[str, ...]:
    """Numbers the slots of the first line."""
    counts, wrong = parse_unsigned(tokens.cells())
    stop = int(tokens.firsts[1]) if tokens.n_lines > 1 else len(counts)
    at = n = 0
    while at < stop:
        if wrong[at] or counts[at] > stop - at - 1:
            raise ValueError(
                f"{tokens.place(0)}: a line must be `n key ... key` for each slot, and"
                f" slot {n} is not: {tokens.show(at)} is no number of keys that follow"
            )
        at += 1 + int(counts[at])
        n += 1
    return tuple(map(str, range(n)))


def _first_widths(
    tokens: Tokens, layout: Layout, order: Sequence[str], dense: Sequence[str]
) -> tuple[int, ...]:
    """Counts the numbers of dense slots in the first line."""
    first = np.flatnonzero(tokens.lines == 0)
    if layout != "multi":
        pairs = first[tokens.n_colons[first] == 1]
        cells = tokens.parts(1 if layout == "key:slot" else 0, pairs)
        found = Names(dense).find(cells)
        return tuple(int((found == i).sum()) for i in range(len(dense)))
    counts, wrong = parse_unsigned(tokens.cells(first))
    columns, _ = _walk_lines(
        counts, wrong, tokens.firsts[:1], np.arange(len(order), dtype=np.int64)
    )
    return tuple(int((columns == order.index(name)).sum()) for name in dense)
