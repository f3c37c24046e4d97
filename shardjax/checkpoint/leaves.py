"""The leaves of a tree by their paths, what there is to say of each, and what fits."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from shardjax.partition import leaf_path

_PYTHON_DTYPES = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}
# What zarr can hold; float8_e4m3, float8_e8m0fnu, uint2 and uint4 are not among it.
_DTYPES = frozenset(
    "bool int2 int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float4_e2m1fn"
    " float8_e3m4 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2"
    " float8_e5m2fnuz bfloat16 float16 float32 float64 complex64 complex128".split()
)


def flatten(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by their paths.

    Args:
      tree: of jax.Array (numbers or typed PRNG keys), numpy arrays and numbers, and
        Python's bool, int, float and complex. None has no leaves.

    Returns:
      Each leaf by its path, as `shardjax.partition.leaf_path` joins it.

    Raises:
      TypeError: for a leaf of another type or dtype.
      ValueError: for two leaves with one path, an int of more than 64 bits, or an array
        that was donated.

    Example:
      >>> list(flatten({"params": {"w": np.ones(2)}, "steps": [3, None]}))
      ['params/w', 'steps/0']
    """
    leaves = _by_path(jax.tree_util.tree_flatten_with_path(tree)[0])
    for path, x in leaves.items():
        if isinstance(x, jax.ShapeDtypeStruct):
            raise TypeError(
                f"{path or 'the tree'} must be an array or a number to be saved, got its"
                " shape alone, a ShapeDtypeStruct. Give the array"
            )
        _check_leaf(path, x)
        if is_deleted(x):
            raise ValueError(
                f"{path or 'the tree'} must hold its values, got an array that was donated"
                " to a step or deleted. Save the state that the step returned"
            )
    return leaves


def flatten_target(target: PyTree, prefix: str = "") -> dict[str, Any]:
    """The leaves of a tree to restore into, of which some may be shapes alone.

    Args:
      target: as of `flatten`, or with jax.ShapeDtypeStruct for leaves.
      prefix: of all paths.
    """
    leaves = _by_path(jax.tree_util.tree_flatten_with_path(target)[0])
    for path, x in leaves.items():
        _check_leaf(path, x)
    if not prefix:
        return leaves
    return {f"{prefix}/{path}" if path else prefix: x for path, x in leaves.items()}


def describe(tree: PyTree) -> dict[str, dict[str, Any]]:
    """What there is to say of each leaf, in values that JSON can hold.

    Args:
      tree: as of `flatten`.

    Returns:
      For each path: "kind" (jax, numpy, numpy_scalar, bool, int, float or complex),
      "shape", "dtype" (as "float32" or "key<fry>"), and where a jax.Array lies: "spec" of
      a NamedSharding, an axis, several or None per dim, and "memory", its kind. Both are
      None for other leaves.

    Raises:
      TypeError, ValueError: as of `flatten`.

    Example:
      >>> describe({"w": np.ones((2, 3), np.float32)})["w"]
      {'kind': 'numpy', 'shape': [2, 3], 'dtype': 'float32', 'spec': None, 'memory': None}
    """
    return {path: describe_leaf(x) for path, x in flatten(tree).items()}


def describe_leaf(x: Any) -> dict[str, Any]:
    """What there is to say of a leaf, of one or of its shape alone."""
    spec = memory = None
    if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
        memory = getattr(x.sharding, "memory_kind", None)
        if isinstance(x.sharding, jax.NamedSharding):
            spec = [list(e) if isinstance(e, tuple) else e for e in x.sharding.spec]
    return {
        "kind": leaf_kind(x),
        "shape": list(np.shape(x)),
        "dtype": leaf_dtype(x),
        "spec": spec,
        "memory": memory,
    }


def leaf_kind(x: Any) -> str:
    """The kind of a leaf, as of `describe`; empty for what is none."""
    if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
        return "" if isinstance(x, jax.core.Tracer) else "jax"
    if isinstance(x, np.ndarray):
        return "" if isinstance(x, np.ma.MaskedArray) else "numpy"
    if isinstance(x, np.generic):
        return "numpy_scalar"
    return type(x).__name__ if type(x) in _PYTHON_DTYPES else ""


def leaf_dtype(x: Any) -> str:
    """The name of a leaf's dtype."""
    return _PYTHON_DTYPES.get(type(x)) or str(x.dtype)


def is_key(dtype: str) -> bool:
    """Whether a dtype is that of typed PRNG keys."""
    return dtype.startswith("key<")


def is_deleted(x: Any) -> bool:
    """Whether a leaf is an array whose values are gone."""
    return isinstance(x, jax.Array) and x.is_deleted()


def is_empty(described: Mapping[str, Any]) -> bool:
    """Whether a leaf has no numbers."""
    return 0 in described["shape"]


def _by_path(leaves) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for keys, x in leaves:
        path = leaf_path(keys)
        if path in named:
            raise ValueError(
                f"every leaf must have a path of its own, got two with {path!r}."
                " Rename one: a key with a / reads like two keys"
            )
        named[path] = x
    return named


def _check_leaf(path: str, x: Any) -> None:
    path = path or "the tree"
    if not leaf_kind(x):
        raise TypeError(
            f"{path} must be a jax.Array, a numpy array or number, or a bool, int, float"
            f" or complex, got {type(x).__module__}.{type(x).__qualname__}. Make it an"
            " array, or keep it out of the state"
        )
    if isinstance(x, int) and not -(2**63) <= x < 2**63:
        raise ValueError(f"{path} must fit into 64 bits, got {x}. Keep it in two parts")
    dtype = leaf_dtype(x)
    native = not isinstance(x, np.ndarray) or x.dtype.isnative
    if not is_key(dtype) and (dtype not in _DTYPES or not native):
        raise TypeError(
            f"{path} must be of numbers in the byte order of the machine, of a dtype that"
            f" a checkpoint can hold, got {dtype}. Store it as {_nearest(dtype)}"
        )


def _nearest(dtype: str) -> str:
    for start, other in (("float8", "float8_e4m3fn"), ("uint", "uint8")):
        if dtype.startswith(start):
            return other
    return "one of numpy's or JAX's numbers, such as float32"


def can_cast(stored: str, wanted: str) -> bool:
    """Whether `cast=True` allows this change of dtype: among floats, or among integers.

    Example:
      >>> can_cast("float32", "bfloat16"), can_cast("int32", "float32")
      (True, False)
    """
    if is_key(stored) or is_key(wanted):
        return False
    return any(
        jnp.issubdtype(jnp.dtype(stored), kind)
        and jnp.issubdtype(jnp.dtype(wanted), kind)
        for kind in (jnp.floating, jnp.integer)
    )


def is_ignored(path: str, ignore: Sequence[str]) -> bool:
    """Whether a pattern matches the path."""
    return any(fnmatchcase(path, pattern) for pattern in ignore)


def check_fit(
    where: str,
    described: Mapping[str, Mapping[str, Any]],
    wanted: Mapping[str, Any],
    ignore: Sequence[str],
    cast: bool,
    lengths: Mapping[str, int],
) -> None:
    """Raises one error that lists all in which a checkpoint and a target differ.

    Args:
      where: the checkpoint lies, for the message.
      described: its leaves, of `describe`.
      wanted: the target's, of `flatten_target`.
      ignore, cast, lengths: as of `shardjax.checkpoint.arrays.restore`.

    Raises:
      ValueError: if they do.
    """
    lines, casts, missing = [], [], []
    for path, x in wanted.items():
        new, old = describe_leaf(x), described.get(path)
        if path in lengths:
            new["shape"][0] = lengths[path]
        abstract = isinstance(x, jax.ShapeDtypeStruct)
        if is_ignored(path, ignore):
            if abstract or is_deleted(x):
                lines.append(
                    f"{path}: ignored, so it keeps the target's value, but the target"
                    " has its shape alone. Give it as an array"
                )
            continue
        if old is None:
            lines.append(f"{path}: {_text(new)} in the target, not in the checkpoint")
            missing.append(path)
            continue
        if abstract and x.sharding is None:
            lines.append(
                f"{path}: the target does not say where it is to lie. Give its"
                " ShapeDtypeStruct a `sharding`"
            )
        if list(old["shape"]) != new["shape"] or old["dtype"] != new["dtype"]:
            same_shape = list(old["shape"]) == new["shape"]
            castable = can_cast(old["dtype"], new["dtype"])
            if not (same_shape and cast and castable):
                what = "dtype" if same_shape else "shape"
                lines.append(
                    f"{path}: another {what}, {_text(old)} in the checkpoint,"
                    f" {_text(new)} in the target"
                )
                casts += [castable] if same_shape else []
        if new["kind"] == "jax" and not is_key(new["dtype"]):
            own = jax.dtypes.canonicalize_dtype(new["dtype"])
            if own != new["dtype"]:
                lines.append(
                    f"{path}: {new['dtype']} in the target, which JAX makes {own} of."
                    ' Set jax.config.update("jax_enable_x64", True)'
                )
    for path, old in described.items():
        if path not in wanted and not is_ignored(path, ignore):
            lines.append(f"{path}: {_text(old)} in the checkpoint, not in the target")
            missing.append(path)
    if lines:
        raise ValueError(
            f"the target must have the leaves of the checkpoint {where}, but they differ:"
            + "".join(f"\n  - {line}" for line in lines)
            + f"\n{_fix(missing, casts, cast)}"
        )


def _fix(missing: list[str], casts: list[bool], cast: bool) -> str:
    fix = "Restore into the state that was saved"
    some = sorted(
        {path.split("/")[0] + "/*" if "/" in path else path for path in missing}
    )
    pattern = some[0] if some else "opt_state/*"
    fix += f", or leave leaves as the target has them with ignore=[{pattern!r}]"
    if casts and not cast and any(casts):
        fix += ", or change dtypes with cast=True"
    if casts and not all(casts):
        fix += " (cast=True only makes floats of floats and integers of integers)"
    return fix


def _text(described: Mapping[str, Any]) -> str:
    text = f"{described['dtype']}{list(described['shape'])}"
    kind = described.get("kind", "jax")
    return text if kind in ("jax", "numpy", "numpy_scalar") else f"{text} ({kind})"
