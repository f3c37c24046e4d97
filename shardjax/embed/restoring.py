"""Rows of a snapshot, made those of a collection that may be laid out otherwise."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardjax.embed.groups import Group
from shardjax.embed.moves import record_leaves, to_words, unpack_leaves
from shardjax.embed.outline import FACT_WORDS, Outline
from shardjax.embed.records import keys_of
from shardjax.embed.table_rows import facts_of


@dataclass(frozen=True, eq=False)
class TableRecords:
    """Rows of one group of a collection, out of a snapshot.

    Attributes:
      group: number of the group.
      keys, tables: uint64 (salted) and int32 [n].
      last_steps, tallies: int32 and uint32 [n].
      words: int32 [n, words], the rows.
    """

    group: int
    keys: np.ndarray
    tables: np.ndarray
    last_steps: np.ndarray
    tallies: np.ndarray
    words: np.ndarray


def describe(
    groups: Sequence[Group], outline: Outline, seed: int, devices: int
) -> dict[str, Any]:
    """What a snapshot is of, as JSON has it."""
    return {
        "sequence": outline.sequence,
        "evicted_before": outline.evicted_before,
        "seed": seed,
        "devices": devices,
        "sizes": [[_as_lists(key), int(n)] for key, n in outline.sizes.items()],
        "groups": [
            {
                **layout,
                "rows": tier.count,
                "words": FACT_WORDS + tier.words,
                "facts": [
                    list(facts_of(t.spec, tier.device.last_steps is not None))
                    for t in group.tables
                ],
            }
            for layout, group, tier in zip(
                layout_of(groups), groups, outline.tiers, strict=True
            )
        ],
    }


def layout_of(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """What numbers and words in table records mean, per group, as JSON has it."""
    return [
        {
            "name": group.name,
            "tables": [t.spec.name for t in group.tables],
            "leaves": _leaves(group),
        }
        for group in groups
    ]


def _as_lists(x):
    return [_as_lists(y) for y in x] if isinstance(x, tuple) else x


def _leaves(group: Group) -> list[list]:
    return [
        [list(shape), np.dtype(dtype).name] for shape, dtype in record_leaves(group)
    ]


def sizes_of(described: Mapping[str, Any]) -> dict[tuple, int]:
    """The static sizes of plans that a description has."""

    def as_key(x):
        return tuple(map(as_key, x)) if isinstance(x, list | tuple) else x

    return {as_key(key): n for key, n in described["sizes"]}


class Restoring:
    """Takes rows of a snapshot to the groups that their tables have in a collection.

    Args:
      groups: of the collection.
      described: of `describe`.
      seed: of the collection.
      ignore: patterns of what may differ: "tables/NAME" for a table that only one side
        has, "tables/NAME/row_state" for optimizer state that is to start anew, "seed".
      cast: whether numbers may have another dtype.

    Raises:
      ValueError: for a snapshot of other tables; all differences are listed.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        described: Mapping[str, Any],
        seed: int,
        ignore: Sequence[str] = (),
        cast: bool = False,
    ):
        self._groups = groups
        self._saved = described["groups"]
        self._ignore = ignore
        here = {
            t.spec.name: (g, n)
            for g, group in enumerate(groups)
            for n, t in enumerate(group.tables)
        }
        self._fresh_state: set[str] = set()
        problems = [
            *self._compare_names(here),
            *(p for saved in self._saved for p in self._compare(saved, here, cast)),
        ]
        if described["seed"] != seed and not self._may("seed"):
            problems.append(
                f"its tables have seed {described['seed']}, this collection {seed}: new rows"
                ' would get other first values (ignore "seed" if they may)'
            )
        if problems:
            raise ValueError(
                "the tables of the checkpoint are not those of the collection:\n- "
                + "\n- ".join(problems)
            )
        self._here = here

    def _may(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._ignore)

    def _compare_names(self, here: Mapping[str, Any]) -> Iterator[str]:
        names = [name for saved in self._saved for name in saved["tables"]]
        for name in names:
            if name not in here and not self._may(f"tables/{name}"):
                yield (
                    f"table {name!r} is in the checkpoint alone (ignore"
                    f' "tables/{name}" to leave it out)'
                )
        for name in here:
            if name not in names and not self._may(f"tables/{name}"):
                yield (
                    f"table {name!r} is not in the checkpoint (ignore"
                    f' "tables/{name}" to start it empty)'
                )

    def _compare(self, saved, here, cast: bool) -> Iterator[str]:
        for name in saved["tables"]:
            if name not in here:
                continue
            [rows, *state] = saved["leaves"]
            [own_rows, *own_state] = _leaves(self._groups[here[name][0]])
            if not _alike(rows, own_rows, cast):
                yield (
                    f"rows of table {name!r} are {_text(rows)} in the checkpoint and"
                    f" {_text(own_rows)} here"
                )
            if len(state) == len(own_state) and all(
                _alike(a, b, cast) for a, b in zip(state, own_state, strict=True)
            ):
                continue
            if self._may(f"tables/{name}/row_state"):
                self._fresh_state.add(name)
                continue
            yield (
                f"optimizer state per row of table {name!r} is"
                f" [{', '.join(map(_text, state))}] in the checkpoint and"
                f" [{', '.join(map(_text, own_state))}] here (ignore"
                f' "tables/{name}/row_state" to start it anew)'
            )

    def records(self, number: int, records: np.ndarray) -> Iterator[TableRecords]:
        """Table records, int32 [n, 5 + words], of a group of the snapshot."""
        saved = self._saved[number]
        keys = keys_of(records)
        for n, name in enumerate(saved["tables"]):
            own = np.flatnonzero(records[:, 2] == n)
            if not len(own) or name not in self._here:
                continue
            g, table = self._here[name]
            group = self._groups[g]
            words = records[own, FACT_WORDS:]
            if saved["leaves"] != _leaves(group) or name in self._fresh_state:
                words = self._converted(saved, group, words, name)
            yield TableRecords(
                g,
                keys[own] + group.tables[table].salt,
                np.full(len(own), table, np.int32),
                records[own, 3],
                records[own, 4].view(np.uint32),
                words,
            )

    def _converted(self, saved, group: Group, words, name: str) -> np.ndarray:
        """Rows with other dtypes, or new state."""
        leaves = [(tuple(shape), jnp.dtype(dtype)) for shape, dtype in saved["leaves"]]
        rows, *state = unpack_leaves(leaves, jnp.asarray(words))
        rows = rows.astype(group.dtype)
        if name in self._fresh_state:
            state, _ = group.optimizer.init(rows)
        state = [
            x.astype(leaf.dtype)
            for x, leaf in zip(state, group.optimizer.row_leaves, strict=True)
        ]
        return np.concatenate([np.asarray(to_words(x)) for x in [rows, *state]], 1)


def _text(leaf: Sequence) -> str:
    return f"{leaf[1]}{leaf[0]}"


def _alike(a: Sequence, b: Sequence, cast: bool) -> bool:
    same_kind = jnp.issubdtype(a[1], jnp.floating) == jnp.issubdtype(b[1], jnp.floating)
    return a[0] == b[0] and (a[1] == b[1] or (cast and same_kind))
