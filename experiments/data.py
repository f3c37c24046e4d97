"""Opening click logs for a program: formats, splits, and what the features are."""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from shardjax import data as sources
from shardjax.data import InMemory, Source, Synthetic, count_rows, split_rows
from shardjax.data.files import find_files, open_bytes

Format = Literal[
    "auto", "criteo", "csv", "parquet", "arrow", "libsvm", "slots", "synthetic"
]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The examples."""

    path: str | None = None
    """Files to train on: a path or a quoted glob, plain or .gz; without it, synthetic
    clicks."""
    format: Format = "auto"
    """Of the files; auto goes by the ending and the first line."""
    label: str | None = None
    """Column of the label (csv, parquet, arrow); without it, one with a label's name."""
    label_threshold: float | None = None
    """The label is 1 where its column is at least this."""
    eval_path: str | None = None
    """Files to evaluate on; without them, the last rows of --data.path."""
    eval_fraction: float = 0.2
    """Share of the rows, the last ones in file order, to evaluate on; 0 for none."""
    shuffle: str = "0"
    """Seed of the order of the training rows, or none for the order of the files."""
    shuffle_all: bool = False
    """Any training row may come at any place of an epoch: for Parquet, Arrow, synthetic rows
    and those in memory; else rows move within windows of some 260,000."""
    balance: int | None = None
    """Blocks per process, on average, that a batch is cut into: processes get as many as they
    are fast. None for equal parts. For several processes: see docs/clusters.md."""
    in_memory: bool = False
    """Keep the rows in memory instead of reading the files in every epoch."""
    dense: tuple[str, ...] = ()
    """Columns that are numbers (csv, parquet, arrow); the others are inferred."""
    categorical: tuple[str, ...] = ()
    """Columns with one key per row."""
    bags: tuple[str, ...] = ()
    """Columns with any number of keys per row: lists, or text between separators."""
    drop: tuple[str, ...] = ()
    """Columns to leave out."""
    group: str | None = None
    """Column of the user for the per-user AUC, eval/gauc."""
    separator: str = "|"
    """Between the keys of a bag."""
    on_bad_line: Literal["error", "skip"] = "error"
    """What to do with malformed lines; skipped ones are counted."""
    rows: int = 2_000_000
    """Synthetic rows to train on."""
    eval_rows: int = 200_000
    """Synthetic rows to evaluate on."""
    vocabulary: tuple[int, ...] = Synthetic.vocabulary
    """Ids of each synthetic feature."""
    zipf: float = 1.1
    """Exponent of Zipf's law, which the synthetic ids follow."""

    def __post_init__(self):
        if not 0 <= self.eval_fraction < 1:
            raise ValueError(
                f"`eval_fraction` must lie in [0, 1), got {self.eval_fraction}"
            )
        if self.label_threshold is not None and not math.isfinite(self.label_threshold):
            raise ValueError(
                f"`label_threshold` must be finite, got {self.label_threshold}"
            )
        if self.shuffle != "none" and not self.shuffle.isdecimal():
            raise ValueError(
                f"`shuffle` must be a seed (a number) or 'none', got {self.shuffle!r}"
            )
        if self.path is None and self.format not in ("auto", "synthetic"):
            raise ValueError(f"format {self.format!r} needs a `path`")
        if self.balance is not None and self.balance < 1:
            raise ValueError(f"`balance` must be positive, got {self.balance}")
        for name in ("rows", "eval_rows"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}` must be positive, got {getattr(self, name)}"
                )

    @property
    def shuffle_seed(self) -> int | None:
        """The seed, or None for file order."""
        return None if self.shuffle == "none" else int(self.shuffle)


@dataclass(frozen=True)
class Opened:
    """Sources to train and evaluate on, and what their examples have.

    Attributes:
      train, eval: sources; `eval` may be None.
      train_rows, eval_rows: how many rows they have.
      features: names of the keyed features.
      bags: those with any number of keys per example.
      n_dense: number of dense features.
      has_groups: whether examples have a group.
      description: of the columns, for people.
      bayes: gives AUC and logloss of the planted model on the evaluation rows, by name;
        empty for real data.
    """

    train: Source
    eval: Source | None
    train_rows: int
    eval_rows: int
    features: tuple[str, ...]
    bags: tuple[str, ...]
    n_dense: int
    has_groups: bool
    description: str
    bayes: Callable[[], dict[str, float]] = field(default=dict)


def open_data(config: DataConfig, seed: int) -> Opened:
    """Opens what the config names.

    Raises:
      FileNotFoundError: for files that are not there.
      ValueError: for files that are not of their format.
    """
    if config.path is None:
        return _open_synthetic(config, seed)
    kind = guess_format(config.path) if config.format == "auto" else config.format
    source = _open(config, kind, config.path)
    if config.in_memory:
        source = InMemory(source)
    if config.eval_path is not None:
        train, evaluation = source, _open_like(config, kind, source)
    elif config.eval_fraction:
        train, evaluation = split_rows(source, config.eval_fraction)
    else:
        train, evaluation = source, None
    chunk = next(iter(train.chunks()))
    columns = getattr(source, "columns", None)
    return Opened(
        train,
        evaluation,
        count_rows(train),
        0 if evaluation is None else count_rows(evaluation),
        chunk.feature_names,
        tuple(chunk.jagged),
        source.n_dense,
        chunk.groups is not None,
        f"{kind} {config.path}" + (f"\n{columns}" if columns else ""),
    )


def _open_synthetic(config: DataConfig, seed: int) -> Opened:
    source = Synthetic(
        rows=config.rows + config.eval_rows,
        seed=seed,
        vocabulary=config.vocabulary,
        zipf=config.zipf,
    )
    train = sources.row_range(source, 0, config.rows)
    evaluation = sources.row_range(source, config.rows)
    return Opened(
        train,
        evaluation,
        config.rows,
        config.eval_rows,
        source.feature_names,
        (),
        source.n_dense,
        False,
        f"synthetic clicks, {config.rows} rows to train on",
        lambda: source.bayes(config.rows, config.rows + config.eval_rows),
    )


def _open_like(config: DataConfig, kind: str, source: Any) -> Any:
    """The files to evaluate on, read as those to train on are.

    Raises:
      ValueError: if their columns are others, or in another order.
    """
    path = str(config.eval_path)
    while isinstance(source, InMemory):
        source = source.source
    columns = getattr(source, "columns", None)
    if columns is None:
        return _open(config, kind, path)
    roles = {
        "label": columns.label,
        "dense": columns.names("dense"),
        "categorical": columns.names("categorical"),
        "bags": columns.names("bag"),
        "drop": columns.names("drop"),
    }
    opened = _open(replace(config, **roles), kind, path)
    for role in ("dense", "categorical", "bag"):
        found, wanted = opened.columns.names(role), columns.names(role)
        if found != wanted:
            raise ValueError(
                f"the {role} columns of {path!r} must be those of {config.path!r} in the"
                f" same order, got {list(found)} instead of {list(wanted)}. Reorder the"
                " columns of one of them"
            )
    return opened


def _open(config: DataConfig, kind: str, path: str) -> Any:
    if kind == "criteo":
        return sources.criteo(path, on_bad_line=config.on_bad_line)
    if kind == "libsvm":
        return sources.libsvm(path, on_bad_line=config.on_bad_line)
    if kind == "slots":
        return sources.slots(path, on_bad_line=config.on_bad_line)
    readers = {"csv": sources.csv, "parquet": sources.parquet, "arrow": sources.arrow}
    return readers[kind](
        path,
        on_bad_line=config.on_bad_line,
        label=config.label,
        label_threshold=config.label_threshold,
        dense=config.dense,
        categorical=config.categorical,
        bags=config.bags,
        drop=config.drop,
        group=config.group,
        bag_separator=config.separator,
    )


def guess_format(path: str) -> str:
    """The format of files, by ending and first line.

    Raises:
      FileNotFoundError: for files that are not there.

    Example:
      >>> import tempfile
      >>> with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
      ...     size = file.write("1 3:1 10:0.5\\n")
      ...     file.flush()
      ...     guess_format(file.name)
      'libsvm'
    """
    file = Path(find_files(path)[0])
    suffixes = [s.lower() for s in file.suffixes]
    ending = next((s for s in reversed(suffixes) if s != ".gz"), "")
    if ending in (".parquet", ".pq"):
        return "parquet"
    if ending in (".arrow", ".feather", ".ipc", ".arrows"):
        return "arrow"
    with open_bytes(str(file)) as stream:
        try:
            line = stream.readline(1 << 20).decode("utf-8", "replace").rstrip("\r\n")
        except (EOFError, OSError, zlib.error) as error:
            raise OSError(f"{file}: cannot be unpacked: {error}") from error
    fields = line.split("\t")
    if len(fields) in (40, 41) and fields[0] in ("0", "1"):
        return "criteo"
    if ending in (".csv", ".tsv"):
        return "csv"
    words = line.split()
    pairs = [w.split(":") for w in words[1:] if ":" in w]
    if pairs and len(pairs) == len(words) - 1:
        left = [p[0] for p in pairs]
        if all(x.isdecimal() for x in left):
            numbers = [int(x) for x in left]
            return "libsvm" if numbers == sorted(numbers) else "slots"
        return "libsvm"
    return "csv"
