"""libsvm, libfm and libffm text: `label index:value ...`, a line an example."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Literal

import numpy as np

from shardjax.data.batch import Batch
from shardjax.data.files import (
    BLOCK_BYTES,
    Block,
    Paths,
    find_files,
    map_in_order,
    read_blocks,
)
from shardjax.data.source import OnBadLine, check_on_bad_line
from shardjax.data.tokens import (
    Faults,
    Names,
    Tokens,
    group_bags,
    label_rule,
    parse_finite,
    parse_labels,
    parse_unsigned,
    renumber,
    split_block,
)
from shardjax.embed.jagged import Jagged

FEATURE = "features"
"""The name of the one feature of a file without fields."""

Unknown = Literal["error", "drop"]
"""What to do with keys of an unknown field or slot: raise, or drop and count them."""


def libsvm(
    paths: Paths,
    *,
    fields: Sequence[int] | None = None,
    unknown_fields: Unknown = "error",
    label_threshold: float | None = None,
    on_bad_line: OnBadLine = "error",
    block_bytes: int = BLOCK_BYTES,
    threads: int = 1,
) -> "LibsvmSource":
    """Reads libsvm and libfm text, `label index:value ...`, and libffm's with fields.

    Without fields, a line makes one jagged feature called "features": the indices are
    its keys, 0 to 2**64 - 1, in any order, and the values its weights. With fields,
    `label field:index:value ...`, each field makes a jagged feature, "field_0" and so
    on. Which form it is, the first block says; all lines must be alike.

    Labels are 0 and 1, or -1 and 1, and -1 becomes 0; one file must not have both 0 and
    -1. A `qid:n` after the label becomes the group of the example; if the first line
    has one, every line must. A `#` begins a comment; blank lines are passed over.

    Args:
      paths: files, plain or gzip, as of `find_files`.
      fields: the fields to read; None for those of the first block.
      unknown_fields: what to do with a field that is not one of these: "error" raises,
        "drop" leaves it out and counts its keys in `source.dropped_keys`.
      label_threshold: labels become 1 where they are at least this, else 0.
      on_bad_line: "error" raises at the first line that is not of this form; "skip"
        leaves it out and counts it in `Batch.bad_lines`.
      block_bytes: how much text makes a chunk.
      threads: how many chunks are parsed at once.

    Returns:
      A source of batches without dense features.

    Raises:
      FileNotFoundError: if a file is missing or a glob matches none.
      ValueError: if an option is not one of those above, or if the files are empty;
        while reading, if a line is malformed or its field unknown: the error names
        file, line and what is wrong.

    Example:
      >>> import tempfile
      >>> with tempfile.NamedTemporaryFile("w") as file:
      ...     size = file.write("+1 3:1 10:0.5\\n-1 7:2  # a comment\\n")
      ...     file.flush()
      ...     batch = next(libsvm(file.name).chunks())
      >>> batch.labels.tolist(), batch.jagged["features"].values.tolist()
      ([1.0, 0.0], [3, 10, 7])
      >>> batch.jagged["features"].weights.tolist()
      [1.0, 0.5, 2.0]
    """
    check_on_bad_line(on_bad_line)
    check_unknown("unknown_fields", unknown_fields)
    files = find_files(paths)
    blocks = chain.from_iterable(read_blocks(path, block_bytes) for path in files)
    for block in blocks:
        tokens = split_block(block, comments=True)
        if tokens.n_lines:
            break
    else:
        raise ValueError(
            f"there must be a line to tell the form from, got none in {files}"
        )
    has_groups = bool(_are_groups(tokens)[1:2].any() and tokens.lines[1] == 0)
    pairs = np.flatnonzero((tokens.n_colons > 0) & ~_are_groups(tokens))
    names = None
    if fields is not None:
        names = tuple(str(f) for f in fields)
        if not names or not all(n.isdecimal() for n in names):
            raise ValueError(
                f"`fields` must be numbers of fields, at least one, got {fields!r}"
            )
        if len(set(names)) < len(names):
            raise ValueError(f"`fields` must differ, got {fields!r}")
    elif len(pairs) and tokens.n_colons[pairs[0]] == 2:
        cells = tokens.parts(0, pairs[tokens.n_colons[pairs] == 2])
        numbers, wrong = parse_unsigned(cells)
        names = tuple(str(n) for n in np.unique(numbers[~wrong]).tolist())
    return LibsvmSource(
        files,
        names,
        has_groups,
        _negative_label(tokens),
        unknown_fields,
        label_threshold,
        on_bad_line,
        block_bytes,
        threads,
    )


@dataclass(frozen=True)
class LibsvmSource:
    """A source of libsvm text; `libsvm` makes it.

    Attributes:
      files: paths.
      fields: the numbers of the fields, as text; None if there are none.
      has_groups: whether each line has a `qid`.
      negative_label: "0" or "-1", whichever comes first; None if the first block has
        neither.
      unknown_fields, label_threshold, on_bad_line, block_bytes, threads: as of
        `libsvm`.
    """

    files: tuple[str, ...]
    fields: tuple[str, ...] | None
    has_groups: bool
    negative_label: str | None
    unknown_fields: Unknown
    label_threshold: float | None
    on_bad_line: OnBadLine
    block_bytes: int
    threads: int
    _dropped: Counter[str] = field(
        default_factory=Counter, init=False, repr=False, compare=False
    )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The one feature, or one for each field."""
        if self.fields is None:
            return (FEATURE,)
        return tuple(f"field_{name}" for name in self.fields)

    @property
    def n_dense(self) -> int:
        """0."""
        return 0

    @property
    def dropped_keys(self) -> int:
        """How many keys of unknown fields were dropped, in all passes so far."""
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
        names = Names(self.fields or ())
        parsed = map_in_order(
            lambda block: self._parse(block, names),
            islice(blocks, start_chunk, None),
            self.threads,
        )
        for batch, dropped in parsed:
            self._dropped["keys"] += dropped
            yield batch

    def _parse(self, block: Block, names: Names) -> tuple[Batch, int]:
        tokens = split_block(block, comments=True)
        faults = Faults(tokens)
        labels = self._read_labels(tokens, faults)
        are_groups = _are_groups(tokens)
        are_groups[tokens.firsts] = False
        groups = self._read_groups(tokens, are_groups, faults)
        are_pairs = ~are_groups
        are_pairs[tokens.firsts] = False
        pairs = np.flatnonzero(are_pairs)
        n_colons = 1 if self.fields is None else 2
        form = "index:value" if self.fields is None else "field:index:value"
        well_formed = tokens.n_colons[pairs] == n_colons
        faults.add_words(pairs[~well_formed], f"is not {form}")
        pairs = pairs[well_formed]
        keys, wrong = parse_unsigned(tokens.parts(n_colons - 1, pairs))
        faults.add_words(pairs[wrong], f"is not {form}: no index from 0 to 2**64 - 1")
        # With one colon, all after it is the value.
        values, wrong = parse_finite(tokens.parts(n_colons, pairs))
        faults.add_words(pairs[wrong], f"is not {form}: no finite value")
        columns = np.zeros(len(pairs), np.int64)
        unknown = np.zeros(len(pairs), bool)
        if self.fields is not None:
            cells = tokens.parts(0, pairs)
            faults.add_words(
                pairs[parse_unsigned(cells)[1]], f"is not {form}: no number of a field"
            )
            columns = names.find(cells)
            unknown = columns < 0
        good = faults.settle(self.on_bad_line == "skip")
        rows, n_rows = renumber(tokens.lines[pairs], tokens.n_lines, good)
        keep = ~unknown & (rows >= 0)
        unknown &= rows >= 0
        if good is not None:
            labels = labels[good]
            groups = None if groups is None else groups[good]
        if unknown.any() and self.unknown_fields == "error":
            word = pairs[np.argmax(unknown)]
            raise ValueError(
                f"{tokens.place(int(tokens.lines[word]))}: {tokens.show(word)} is of a"
                f" field that is not one of {', '.join(self.fields or ())}. Give"
                " `fields`, or unknown_fields='drop' to leave others out and count"
                " them."
            )
        batch = Batch(
            labels,
            np.zeros((n_rows, 0), np.float32),
            np.zeros((0, n_rows), np.uint64),
            jagged=self._bags(
                columns[keep], rows[keep], n_rows, keys[keep], values[keep]
            ),
            groups=groups,
            bad_lines=tokens.n_lines - n_rows,
        )
        return batch, int(unknown.sum())

    def _bags(self, columns, rows, n_rows, keys, values) -> dict[str, Jagged]:
        weights = values.astype(np.float32)
        if self.fields is None:
            lengths = np.bincount(rows, minlength=n_rows)
            return {FEATURE: Jagged(keys, lengths, weights)}
        return group_bags(self.feature_names, columns, rows, n_rows, keys, weights)

    def _read_labels(self, tokens: Tokens, faults: Faults) -> np.ndarray:
        cells = tokens.cells(tokens.firsts)
        labels, wrong = parse_labels(cells, self.label_threshold)
        faults.add_words(tokens.firsts[wrong], label_rule(self.label_threshold))
        if self.label_threshold is None and self.negative_label is not None:
            negative = _are_negative(tokens)
            mixed = (
                negative if self.negative_label == "0" else (labels == 0) & ~negative
            )
            faults.add_words(
                tokens.firsts[mixed & ~wrong],
                f"is not a label beside 1 and {self.negative_label}, with which the"
                " files begin",
            )
        return labels

    def _read_groups(
        self, tokens: Tokens, are_groups: np.ndarray, faults: Faults
    ) -> np.ndarray | None:
        """Reads `qid:n`, which may only come second in a line."""
        at = np.flatnonzero(are_groups)
        second = np.zeros(len(are_groups), bool)
        second[np.minimum(tokens.firsts + 1, len(second) - 1)] = True
        if not self.has_groups:
            faults.add_words(at, "must be in all lines, and is not in the first one")
            return None
        faults.add_words(at[~second[at]], "must come once, and right after the label")
        at = at[second[at]]
        values, wrong = parse_unsigned(tokens.parts(1, at))
        faults.add_words(at[wrong], "is not qid:n, n from 0 to 2**64 - 1")
        groups = np.zeros(tokens.n_lines, np.uint64)
        groups[tokens.lines[at]] = values
        has_group = np.zeros(tokens.n_lines, bool)
        has_group[tokens.lines[at]] = True
        faults.add_lines(
            np.flatnonzero(~has_group), "there must be a qid, as in the first line"
        )
        return groups


def check_unknown(name: str, value: str) -> None:
    """Refuses a choice that is not an `Unknown`.

    Args:
      name: what to call it in an error.
      value: the choice.

    Raises:
      ValueError: if it is neither "error" nor "drop".

    Example:
      >>> check_unknown("unknown_fields", "drop")
    """
    if value not in ("error", "drop"):
        raise ValueError(f"`{name}` must be 'error' or 'drop', got {value!r}")


def _are_groups(tokens: Tokens) -> np.ndarray:
    """Says which words are `qid:...`."""
    data = tokens.block.data
    found = (tokens.n_colons == 1) & (tokens.colons[:, 0] - tokens.starts == 3)
    at = np.flatnonzero(found)
    starts = tokens.starts[at]
    for i, letter in enumerate(b"qid"):
        found[at] &= data[starts + i] == letter
    return found


def _are_negative(tokens: Tokens) -> np.ndarray:
    """Says which lines begin with a minus."""
    return tokens.block.data[tokens.starts[tokens.firsts]] == ord("-")


def _negative_label(tokens: Tokens) -> str | None:
    """Finds which of 0 and -1 is the first label that is not 1."""
    labels, wrong = parse_labels(tokens.cells(tokens.firsts), None)
    at = np.flatnonzero((labels == 0) & ~wrong)
    if not len(at):
        return None
    return "-1" if _are_negative(tokens)[at[0]] else "0"
