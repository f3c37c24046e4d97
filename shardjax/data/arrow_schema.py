"""Which columns of Arrow files can be read as features."""

import pyarrow as pa

from shardjax.data.arrow_types import values_of
from shardjax.data.columns import Columns, check_names


def check_schema(path: str, schema: pa.Schema, columns: Columns) -> None:
    """Refuses columns that are not there, cannot be read, or would give other keys.

    Args:
      path: the file, for an error.
      schema: its columns.
      columns: what each is for.

    Raises:
      ValueError: if the columns are not those of the first file.
      TypeError: if a column's type does not fit its kind, or the first file's.
    """
    check_names(path, schema.names, columns)
    for column in columns.columns:
        if column.name not in columns.used:
            continue
        values = values_of(schema.field(column.name).type)
        is_bag = column.kind == "bag"
        plain = values.removeprefix("list of ") if is_bag else values
        if plain not in ("integer", "number", "boolean", "text", "nothing"):
            holds = {"bag": "lists of keys or keys", "categorical": "keys"}
            raise TypeError(
                f"{path}: column {column.name!r} is to be {column.kind}, so it must"
                f" hold {holds.get(column.kind, 'numbers')}, got {values}. Drop it or"
                " convert it."
            )
        is_keyed = (
            is_bag or column.kind == "categorical" or column.name == columns.group
        )
        if is_keyed and _key_rule(values) != _key_rule(column.values):
            if "nothing" not in values + column.values:
                raise TypeError(
                    f"{path}: column {column.name!r} must hold {column.values} as in"
                    f" the first file, got {values}: equal ids would get unequal keys"
                )


def _key_rule(values: str) -> str:
    """What decides the key of a value: its text, or the number itself."""
    return "text" if values.endswith("text") else "number"
