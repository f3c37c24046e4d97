"""What Arrow types hold, as far as features go."""

import pyarrow as pa


def values_of(type_: pa.DataType) -> str:
    """Names what a column of an Arrow type holds, as in `Column.values`.

    Args:
      type_: the type.

    Returns:
      The name.

    Example:
      >>> values_of(pa.uint8()), values_of(pa.list_(pa.string()))
      ('integer', 'list of text')
    """
    if isinstance(type_, pa.BaseExtensionType):
        return values_of(type_.storage_type)
    if pa.types.is_dictionary(type_):
        return values_of(type_.value_type)
    if is_list(type_):
        return f"list of {values_of(type_.value_type)}"
    kinds = {
        "integer": pa.types.is_integer,
        "number": lambda t: pa.types.is_floating(t) or pa.types.is_decimal(t),
        "boolean": pa.types.is_boolean,
        "text": is_text,
        "time": pa.types.is_temporal,
        "nothing": pa.types.is_null,
    }
    return next((name for name, holds in kinds.items() if holds(type_)), str(type_))


def is_list(type_: pa.DataType) -> bool:
    """Says whether a type is a list of any sort, but not a map.

    Args:
      type_: the type.

    Returns:
      Whether it is.
    """
    return (
        pa.types.is_list(type_)
        or pa.types.is_large_list(type_)
        or pa.types.is_fixed_size_list(type_)
        or pa.types.is_list_view(type_)
        or pa.types.is_large_list_view(type_)
    )


def is_text(type_: pa.DataType) -> bool:
    """Says whether a type holds strings or bytes.

    Args:
      type_: the type.

    Returns:
      Whether it does.
    """
    return (
        pa.types.is_string(type_)
        or pa.types.is_large_string(type_)
        or pa.types.is_string_view(type_)
        or pa.types.is_binary(type_)
        or pa.types.is_large_binary(type_)
        or pa.types.is_binary_view(type_)
        or pa.types.is_fixed_size_binary(type_)
    )
