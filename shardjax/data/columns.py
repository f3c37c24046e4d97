"""What each column of a table is for: given, or inferred from its name and values."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict, Unpack

import numpy as np
import pyarrow as pa

from shardjax.data.arrow_types import is_text, values_of
from shardjax.data.dense import DenseTransform, check_dense_transform
from shardjax.data.text import check_separator

Kind = Literal["label", "dense", "categorical", "bag", "weight", "drop"]

LABEL_NAMES = ("label", "click", "clicked", "is_click", "is_clicked", "target", "y")
"""Names by which a label is known, in any case of letters."""

NO_HEADER = "column_0"
"""The name of the first column of a file whose columns have no names."""

_FEW = 32
_MANY = 10
_LARGE = 1e6
_EXACT = 2**53
_ID_WORDS = {"id", "ids", "uid", "uuid", "guid", "hash", "key", "keys", "code"}
_ID_NAME = re.compile(
    r"(user|item|movie|product|video|song|article|news|page|doc|ad|adgroup|campaign"
    r"|advertiser|query|keyword|session|device|site|app|category|cate|brand|shop|seller"
    r"|customer|member)ids?"
)
_TIME_NAME = re.compile(r"(.*_)?(time|timestamp|ts|date|datetime|day|unixtime)(_.*)?")
_TIME_TEXT = re.compile(rb"\d{4}-\d\d-\d\d([ T]\d\d:\d\d.*)?")
_ROW_NAME = re.compile(r"|index|row|row_?id|row_?number|unnamed: 0|id|column_\d+")


class TableOptions(TypedDict, total=False):
    """What the columns of a table are for; each may be left out.

    Attributes:
      label: the label's column; else the one column with a name of `LABEL_NAMES`.
      dense: columns to take as numbers.
      categorical: columns to take as one key each.
      bags: columns to take as any number of keys each.
      drop: columns to leave out.
      weight: the column of example weights.
      group: the column whose keys group examples for per-group metrics, such as a user
        id; it remains a feature, unless dropped.
      label_threshold: labels become 1 where they are at least this, else 0.
      bag_separator: what separates the keys of a bag in text; "|" if not given.
      dense_transform: "log", if not given, or "none"; see `DenseTransform`.
    """

    label: str | None
    dense: Sequence[str]
    categorical: Sequence[str]
    bags: Sequence[str]
    drop: Sequence[str]
    weight: str | None
    group: str | None
    label_threshold: float | None
    bag_separator: str
    dense_transform: DenseTransform


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
      name: as in the table.
      kind: what it is for.
      values: what it holds: "integer", "number", "boolean", "text", "time", "nothing",
        "list of ..." or another type's name.
      reason: why it is of this kind, for people.
    """

    name: str
    kind: Kind
    values: str
    reason: str


@dataclass(frozen=True)
class Columns:
    """The columns of a table and how to read them; print it to see them.

    Attributes:
      columns: in the order of the table.
      group, label_threshold, bag_separator, dense_transform: as in `TableOptions`.
    """

    columns: tuple[Column, ...]
    group: str | None = None
    label_threshold: float | None = None
    bag_separator: str = "|"
    dense_transform: DenseTransform = "log"

    def names(self, kind: Kind) -> tuple[str, ...]:
        """Lists the columns of a kind, in the order of the table.

        Args:
          kind: which.

        Returns:
          Their names.
        """
        return tuple(c.name for c in self.columns if c.kind == kind)

    @property
    def label(self) -> str:
        """The label's column."""
        return self.names("label")[0]

    @property
    def weight(self) -> str | None:
        """The column of example weights, if there is one."""
        return next(iter(self.names("weight")), None)

    @property
    def used(self) -> tuple[str, ...]:
        """The columns that are read."""
        return tuple(
            c.name for c in self.columns if c.kind != "drop" or c.name == self.group
        )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The categorical columns, then the bags: the features of a batch."""
        return self.names("categorical") + self.names("bag")

    def __str__(self) -> str:
        rows = [("column", "kind", "values", "why")]
        for column in self.columns:
            group = " + group" if column.name == self.group else ""
            rows.append(
                (column.name, column.kind + group, column.values, column.reason)
            )
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join(
            "  ".join([*map(str.ljust, row[:3], widths), row[3]]) for row in rows
        )


def infer_columns(
    sample: pa.Table | pa.RecordBatch, **options: Unpack[TableOptions]
) -> Columns:
    """Settles what each column is for; those the options name are as they say.

    Of the others, the first rule that fits decides:

    1. The label, if not named, is the one column with a name of `LABEL_NAMES`.
    2. Lists are bags; true and false are categorical; dates and times, and types that
       are neither numbers nor text, are dropped.
    3. Integers that go up by one from row to row, and have no id's name as of rule 5,
       number the rows: dropped. So is a column called just id, index or the like, in
       which every value is another.
    4. Text is a bag if the bag separator is in it, dropped if it is all dates, else
       categorical.
    5. Names that end in id, hash, key or code, and C1, C2, ...: categorical. I1, I2,
       ...: dense.
    6. Numbers with a fraction are dense, unless most are too large to be exact (2**53):
       those are ids, categorical.
    7. Integers with at most 32 different values are categorical. Others are dense if
       their median is below a million (counts), else dropped if the name speaks of time
       (seconds since 1970), else categorical (ids).

    Args:
      sample: the first rows of the table.
      **options: see `TableOptions`.

    Returns:
      The columns.

    Raises:
      ValueError: if an option names a column that is not there or in two roles, or if
        there is no label or no telling which.

    Example:
      >>> table = pa.table({"click": [0, 1], "user_id": [7, 8], "price": [0.5, 2.0]})
      >>> print(infer_columns(table))
      column   kind         values   why
      click    label        integer  a label's name
      user_id  categorical  integer  an id's name
      price    dense        number   numbers
    """
    names = list(sample.schema.names)
    unknown = sorted(options.keys() - TableOptions.__annotations__.keys())
    if unknown:
        raise TypeError(
            f"there is no option {unknown[0]!r} for columns, only: "
            + ", ".join(TableOptions.__annotations__)
        )
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"column names must differ, got {twice[0]!r} twice")
    separator = options.get("bag_separator", "|")
    check_separator(separator, "bag_separator")
    transform = options.get("dense_transform", "log")
    check_dense_transform(transform)
    group = options.get("group")
    if group is not None and group not in names:
        raise ValueError(_not_there("group", group, names))
    given = _given_kinds(names, options)
    if "label" not in given.values():
        given[_infer_label(names, given)] = "label"
    columns = []
    for name in names:
        column = sample.column(name)
        values = values_of(column.type)
        if name in given:
            kind, reason = given[name], "as given"
            if kind == "label" and not options.get("label"):
                reason = "the first column" if name == NO_HEADER else "a label's name"
        else:
            kind, reason = _infer_kind(name, values, column, separator)
        columns.append(Column(name, kind, values, reason))
    return Columns(
        tuple(columns), group, options.get("label_threshold"), separator, transform
    )


def check_names(path: str, names: Sequence[str], columns: Columns) -> None:
    """Refuses a file whose columns are not those of the first one.

    Args:
      path: the file.
      names: its columns, in any order.
      columns: what was settled by the first file; those that are not used may lack.

    Raises:
      ValueError: if one lacks or comes twice, or there is one more.

    Example:
      >>> columns = infer_columns(pa.table({"click": [0], "price": [0.5]}))
      >>> check_names("day_2.csv", ["price", "click"], columns)
    """
    known = [column.name for column in columns.columns]
    lacking = [name for name in columns.used if name not in names]
    more = [name for name in names if name not in known]
    if lacking or more or len(set(names)) < len(names):
        raise ValueError(
            f"{path}: columns must be those of the first file, {known}, got"
            f" {list(names)}"
        )


def _given_kinds(names: Sequence[str], options: TableOptions) -> dict[str, Kind]:
    """Turns the options round: column to kind."""
    label, weight = options.get("label"), options.get("weight")
    roles: dict[Kind, tuple[str, Sequence[str]]] = {
        "label": ("label", [] if label is None else [label]),
        "dense": ("dense", options.get("dense", ())),
        "categorical": ("categorical", options.get("categorical", ())),
        "bag": ("bags", options.get("bags", ())),
        "drop": ("drop", options.get("drop", ())),
        "weight": ("weight", [] if weight is None else [weight]),
    }
    given: dict[str, Kind] = {}
    for kind, (option, members) in roles.items():
        if isinstance(members, str):
            raise TypeError(
                f"`{option}` must be a list of column names, got the string"
                f" {members!r}. Give [{members!r}]."
            )
        for name in members:
            if name not in names:
                raise ValueError(_not_there(option, name, names))
            if name in given:
                raise ValueError(
                    f"column {name!r} must have one role, got `{roles[given[name]][0]}`"
                    f" and `{option}`"
                )
            given[name] = kind
    return given


def _not_there(option: str, name: str, names: Sequence[str]) -> str:
    return f"`{option}` names a column {name!r} that is not there, only: " + ", ".join(
        map(repr, names)
    )


def _infer_label(names: Sequence[str], given: dict[str, Kind]) -> str:
    free = [name for name in names if name not in given]
    found = [name for name in free if name.lower() in LABEL_NAMES]
    if not found and NO_HEADER in free:
        found = [NO_HEADER]
    if len(found) != 1:
        which = f"several could be: {found}" if found else "none has a label's name"
        raise ValueError(
            f"the label's column must be named: {which}. Give `label`, one of "
            + ", ".join(map(repr, free))
        )
    return found[0]


def _infer_kind(
    name: str, values: str, column: pa.ChunkedArray | pa.Array, separator: str
) -> tuple[Kind, str]:
    """Rules 2 to 7 of `infer_columns`."""
    if values in ("list of integer", "list of text"):
        return "bag", "lists"
    if values == "boolean":
        return "categorical", "true or false"
    if values not in ("integer", "number", "text"):
        return "drop", "neither numbers nor text; convert it to use it"
    column = column.drop_null()
    if len(column) == 0:
        return ("dense" if values == "number" else "categorical"), "no values yet"
    column = _plain(column)
    different = len(column.unique())
    if len(column) >= _MANY and different == len(column):
        if _ROW_NAME.fullmatch(name.lower()):
            return "drop", "every row has another value"
        if values == "integer" and not _is_id(name):
            integers = column.to_numpy()
            if (integers[1:] - integers[:-1] == 1).all():
                return "drop", "numbers the rows"
    if values == "text":
        return _infer_text(column, separator)
    if _is_id(name) or re.fullmatch(r"[cC]\d+", name):
        return "categorical", "an id's name"
    if re.fullmatch(r"[iI]\d+", name):
        return "dense", "a count's name"
    numbers = np.abs(column.to_numpy().astype(np.float64))
    median = np.median(numbers)
    if values == "number":
        if median >= _EXACT:
            return "categorical", "numbers too large for anything but ids"
        return "dense", "numbers"
    if different <= _FEW:
        return "categorical", f"{different} different values"
    if median >= _LARGE and _TIME_NAME.fullmatch(name.lower()):
        return "drop", "times; convert them to use them"
    if median >= _LARGE:
        return "categorical", f"{different} different values, too large for counts"
    return "dense", f"counts: {different} different values"


def _infer_text(column, separator: str) -> tuple[Kind, str]:
    texts = column.unique().to_pylist()
    if any(separator.encode() in text for text in texts):
        return "bag", f"text with {separator!r} in it"
    if all(map(_TIME_TEXT.fullmatch, texts)):
        return "drop", "dates; convert them to use them"
    return "categorical", "text"


def _plain(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """One array without dictionary or extension type; text as bytes, and so on."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    if is_text(column.type):
        column = column.cast(pa.large_binary())
    return column


def _is_id(name: str) -> bool:
    words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower()
    last = re.split(r"[^a-z0-9]+", words)[-1]
    return last in _ID_WORDS or _ID_NAME.fullmatch(last) is not None
