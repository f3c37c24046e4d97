"""Which dim of which array lies on which mesh axis.

A tree of arrays is laid out by *rules*: ordered pairs of a pattern for the path of a
leaf and the `PartitionSpec` of the leaves it matches::

    rules = [
        ("embedding", P(("data", "model"))),   # rows over all devices
        ("layers/[0-9]+/kernel", P(None, "model")),
    ]
    specs = match_specs(params, rules)         # everything else is replicated
    check_specs(params, specs, mesh)           # every problem at once
    params = jax.device_put(params, named_shardings(specs, mesh))

The path of a leaf joins its keys by `/`, for example ``bottom/layers/0/kernel/value``.
"""

import re
from collections.abc import Iterable, Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

Rules = Sequence[tuple[str, PartitionSpec]]


def match_specs(
    tree: PyTree, rules: Rules, default: PartitionSpec = PartitionSpec()
) -> PyTree[PartitionSpec]:
    """Gives each leaf of a tree the spec of the first rule that matches its path.

    Args:
      tree: any tree of arrays, or of shapes from `jax.eval_shape`.
      rules: pairs of a regular expression, searched for anywhere in the path of a leaf
        (anchor it with ^ and $ if need be), and a spec.
      default: the spec of leaves that no rule matches; replicated by default.

    Returns:
      A tree of the same structure with a `PartitionSpec` per leaf.

    Raises:
      TypeError: if the rules are no sequence of pairs, or a rule or the default does not
        end in a `PartitionSpec`.
      ValueError: if a pattern is not a valid regular expression.

    Example:
      >>> import numpy as np
      >>> from jax.sharding import PartitionSpec as P
      >>> params = {"dense": {"kernel": np.ones((4, 8)), "bias": np.ones(8)}}
      >>> match_specs(params, [("kernel$", P(None, "model"))])["dense"]["kernel"]
      P(None, 'model')
    """
    check_sequence("rules", rules)
    patterns = []
    for rule in rules:
        if not isinstance(rule, tuple | list) or len(rule) != 2:
            raise TypeError(
                "each of `rules` must be a pair of a pattern and a PartitionSpec, got"
                f" {rule!r}. Write for example ('kernel$', P(None, 'model'))"
            )
        _require_spec(f"the rule {rule[0]!r}", rule[1])
        patterns.append((_compile(rule[0], "rules"), rule[1]))
    _require_spec("`default`", default)

    def first_match(path, _) -> PartitionSpec:
        name = leaf_path(path)
        return next((spec for p, spec in patterns if p.search(name)), default)

    return jax.tree_util.tree_map_with_path(first_match, tree)


def check_sequence(name: str, given) -> None:
    """Refuses what is no sequence, and a string, which would be read letter by letter.

    Raises:
      TypeError: naming the argument.
    """
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        instead = f"({given!r},)" if isinstance(given, str) else "a tuple or a list"
        raise TypeError(
            f"`{name}` must be a sequence, got the {type(given).__name__} {given!r:.200}."
            f" Give {instead}"
        )


def check_patterns(name: str, patterns: Sequence[str], paths: Sequence[str]) -> None:
    """Refuses patterns that are none, or that are found in no path of a leaf.

    Args:
      name: of the argument that they are, for messages.
      patterns: regular expressions.
      paths: of all leaves, as of `leaf_path`.

    Raises:
      TypeError, ValueError: naming the pattern.
    """
    check_sequence(name, patterns)
    for pattern in patterns:
        found = _compile(pattern, name)
        if not any(found.search(path) for path in paths):
            some = ", ".join(paths[:8])
            more = f" and {len(paths) - 8} more" if len(paths) > 8 else ""
            raise ValueError(
                f"the pattern {pattern!r} of `{name}` matches no parameter; their paths are"
                f" {some}{more}"
            )


def named_shardings(specs: PyTree[PartitionSpec], mesh: Mesh) -> PyTree[NamedSharding]:
    """Binds a tree of specs to a mesh.

    Args:
      specs: a tree of `PartitionSpec`.
      mesh: the mesh whose axes the specs name.

    Returns:
      A tree of the same structure with a `NamedSharding` per spec.

    Raises:
      ValueError: if a spec names an axis that the mesh has not, or names one twice.

    Example:
      >>> import shardjax as sj
      >>> from jax.sharding import PartitionSpec as P
      >>> named_shardings({"w": P("data")}, sj.make_mesh("1x1"))["w"].spec
      P('data',)
    """
    problems = []
    for path, spec in jax.tree_util.tree_leaves_with_path(specs):
        problems += _axis_problems(leaf_path(path), spec, mesh)
    _raise_all(problems, mesh)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def check_specs(tree: PyTree, specs: PyTree[PartitionSpec], mesh: Mesh) -> None:
    """Raises one error that lists every leaf its spec does not fit.

    Args:
      tree: a tree of arrays, or of shapes from `jax.eval_shape`.
      specs: a spec for each leaf, in the same structure.
      mesh: the mesh to split over.

    Raises:
      ValueError: if any leaf has fewer dims than its spec, a dim that its axes do not
        divide, or a spec with an unknown or repeated axis.

    Example:
      >>> import numpy as np, shardjax as sj
      >>> from jax.sharding import PartitionSpec as P
      >>> check_specs({"w": np.ones(3)}, {"w": P("data")}, sj.make_mesh("1x1"))
    """
    _raise_all(spec_problems(tree, specs, mesh), mesh)


def spec_problems(tree: PyTree, specs: PyTree[PartitionSpec], mesh: Mesh) -> list[str]:
    """Reports every leaf its spec does not fit, one line each.

    Args:
      tree: a tree of arrays, or of shapes from `jax.eval_shape`.
      specs: a spec for each leaf, in the same structure.
      mesh: the mesh to split over.

    Returns:
      One sentence per problem, with the path of the leaf and both numbers; empty if
      all fits.

    Example:
      >>> import numpy as np, shardjax as sj
      >>> from jax.sharding import PartitionSpec as P
      >>> spec_problems({"b": np.ones(3)}, {"b": P(None, "data")}, sj.make_mesh("1x1"))
      ["b: P(None, 'data') has 2 entries for shape (3,) of 1 dim"]
    """
    problems = []

    def check(path, leaf, spec):
        name = leaf_path(path)
        shape = tuple(getattr(leaf, "shape", ()))
        wrong_axes = _axis_problems(name, spec, mesh)
        problems.extend(wrong_axes)
        if len(spec) > len(shape):
            dims = "1 dim" if len(shape) == 1 else f"{len(shape)} dims"
            entries = "1 entry" if len(spec) == 1 else f"{len(spec)} entries"
            problems.append(f"{name}: {spec} has {entries} for shape {shape} of {dims}")
        elif not wrong_axes:
            for dim, entry in enumerate(spec):
                parts = 1
                for axis in entry_axes(entry):
                    parts *= mesh.shape[axis]
                if shape[dim] % parts:
                    problems.append(
                        f"{name}: dim {dim} of shape {shape} is {shape[dim]}, not"
                        f" divisible by {parts} ({'x'.join(entry_axes(entry))})"
                    )

    jax.tree_util.tree_map_with_path(check, tree, specs)
    return problems


def leaf_path(path: Sequence) -> str:
    """Joins the keys of a leaf by `/`, as the patterns of rules see them.

    Args:
      path: the path of a leaf, from `jax.tree_util.tree_leaves_with_path`.

    Returns:
      For example ``layers/0/kernel``; empty for a tree that is itself a leaf.

    Example:
      >>> import jax
      >>> [leaf_path(p) for p, _ in jax.tree_util.tree_leaves_with_path({"a": [1, 2]})]
      ['a/0', 'a/1']
    """
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def make_spec(entries: Iterable) -> PartitionSpec:
    """A spec of these entries, without the trailing None that compilers leave out too.

    Example:
      >>> make_spec([None, "data", None]), make_spec([None, None])
      (P(None, 'data'), P())
    """
    entries = list(entries)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def entry_axes(entry) -> tuple[str, ...]:
    """Mesh axes in one entry of a spec.

    Example:
      >>> entry_axes(("data", "model")), entry_axes("data"), entry_axes(None)
      (('data', 'model'), ('data',), ())
    """
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _axis_problems(name: str, spec: PartitionSpec, mesh: Mesh) -> list[str]:
    problems = []
    seen = set()
    for axis in (axis for entry in spec for axis in entry_axes(entry)):
        if axis not in mesh.shape:
            problems.append(f"{name}: {spec} names the axis {axis!r}")
        elif axis in seen:
            problems.append(f"{name}: {spec} names the axis {axis!r} twice")
        seen.add(axis)
    return problems


def _compile(pattern, name: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"the pattern {pattern!r} of `{name}` must be a regular expression, got one"
            f" with the fault: {error}. Escape special characters with a backslash"
        ) from None


def _require_spec(thing: str, spec) -> None:
    if not isinstance(spec, PartitionSpec):
        raise TypeError(
            f"{thing} must give a PartitionSpec, got {type(spec).__name__} {spec!r}."
            " Write for example P(None, 'model')."
        )


def _raise_all(problems: list[str], mesh: Mesh) -> None:
    if problems:
        axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
        raise ValueError(
            f"specs must fit their arrays and the mesh ({axes}), but:\n  - "
            + "\n  - ".join(problems)
            + "\nPad the dim, name other axes, or leave the leaf replicated with P()."
        )
