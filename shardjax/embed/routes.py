"""A batch's index arrays: what owners send whom, and where each id finds its row.

They have two halves. Owners say which rows they gather and which of those go to whom;
requesters say where among what they get each of their ids finds its row.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from shardjax.embed import translate as kernels
from shardjax.embed.draft import TableDraft
from shardjax.embed.groups import Group
from shardjax.embed.inputs import Input
from shardjax.embed.layout import GroupLayout, SequenceLayout
from shardjax.embed.spec import FeatureSpec

Size = Callable[[tuple, int, int], int]
"""`size(name, needed, smallest)`: a static size that is at least `needed`."""


class OwnerRoutes:
    """The owners' half of one group of a batch.

    Args:
      group: the group.
      tables: of the batch, with slots; their owners are numbered from this process's first.
      owners: devices of this process that own rows.
      requesters: devices of all processes.
      overlay: per table, int32 [n, 1 + words]: number of a unique key whose row is not on
        its device, and the row's words. For evaluation.

    Attributes:
      send_count: int32 [requesters, owners], rows each owner sends each requester; zeros
        for a replicated group.
    """

    def __init__(
        self,
        group: Group,
        tables: Sequence[TableDraft],
        owners: int,
        requesters: int,
        overlay: Sequence[np.ndarray] = (),
    ):
        self.group, self.tables = group, tables
        self._owners, self._requesters = owners, requesters
        self._overlay = overlay
        lists = 1 if group.replicated else owners
        self._own_count = np.zeros(lists, np.int32)
        self._own_slots = np.empty((lists, sum(t.unique for t in tables)), np.int32)
        for t in tables:
            kernels.list_owned(
                t.slots, t.owners, t.unique, self._own_count, self._own_slots,
                t.own_position,
            )  # fmt: skip
        self._stored = np.zeros(owners, np.int64)
        for t, part in zip(tables, overlay, strict=False):
            self._stored += np.bincount(t.owners[part[:, 0]], minlength=owners)
        self.send_count = np.zeros((requesters, owners), np.int32)
        self._places: list[np.ndarray] = []
        if not group.replicated and requesters > 1:
            self._place()

    def _place(self) -> None:
        for t in self.tables:
            for r in range(self._requesters):
                place = np.empty(t.local_count[r], np.int32)
                kernels.route(
                    t.local_unique[r], t.local_count[r], t.owners, self.send_count[r],
                    place,
                )  # fmt: skip
                self._places.append(place)

    @property
    def exchanges(self) -> bool:
        """Whether rows have to travel."""
        return not self.group.replicated and self._requesters > 1

    def needs(self) -> dict[tuple, int]:
        """The least static sizes, by the names that `write` asks for them."""
        return {
            ("rows",): int(self._own_count.max()),
            ("stored",): int(self._stored.max()),
            ("send",): int(self.send_count.max()),
        }

    def write(
        self, arrays: dict[str, np.ndarray], size: Size
    ) -> tuple[int, int, int, np.ndarray, np.ndarray]:
        """Adds the arrays of the owners, [owners, ...], to `arrays`, by field name.

        Returns:
          rows, stored, send of the layout; where each table's unique keys start in what
          follows, int32 [tables, requesters]; and where requesters find the row of each of
          their unique keys, int32 [requesters, ..].
        """
        p, group = self._owners, self.group
        lists = len(self._own_count)
        rows = size(("rows",), int(self._own_count.max()), 64)
        slots = np.empty((p, rows), np.int32)
        slots[:] = np.iinfo(np.int32).max - np.arange(rows, dtype=np.int32)
        for o in range(p):
            n = self._own_count[o % lists]
            slots[o, :n] = self._own_slots[o % lists, :n]
        arrays[f"{group.name}/slots"] = slots
        stored = self._write_stored(arrays, size)
        base, where = self._start()
        if not self.exchanges:
            for t, s in enumerate(self.tables):
                for r in range(self._requesters):
                    n, at = s.local_count[r], base[t, r]
                    where[r, at : at + n] = s.own_position[s.local_unique[r]]
            return rows, stored, 0, base, where
        send = size(("send",), int(self.send_count.max()), 16)
        merge = np.full((p, self._requesters, send), np.iinfo(np.int32).max, np.int32)
        for t, s in enumerate(self.tables):
            for r in range(self._requesters):
                kernels.fill_routes(
                    s.local_unique[r], s.local_count[r], s.owners, s.own_position,
                    self._places[t * self._requesters + r], send, merge[:, r],
                    where[r, base[t, r] :],
                )  # fmt: skip
        arrays[f"{group.name}/merge"] = merge
        return rows, stored, send, base, where

    def _start(self) -> tuple[np.ndarray, np.ndarray]:
        """Where each table's unique keys start, and room for all of them."""
        counts = [t.local_count for t in self.tables]
        base = np.zeros((len(counts), self._requesters), np.int32)
        base[1:] = np.cumsum(counts, 0)[:-1]
        total = int((base[-1] + counts[-1]).max())
        return base, np.empty((self._requesters, max(total, 1)), np.int32)

    def _write_stored(self, arrays, size: Size) -> int:
        """Rows that are not on their devices, for the step to put over what it gathers."""
        words = max((part.shape[1] - 1 for part in self._overlay), default=0)
        if not self._overlay:
            return 0
        n = size(("stored",), int(self._stored.max()), 0)
        if not n:
            return 0
        at = np.full((self._owners, n), np.iinfo(np.int32).max, np.int32)
        at -= np.arange(n, dtype=np.int32)
        records = np.zeros((self._owners, n, words), np.int32)
        used = np.zeros(self._owners, np.int64)
        for t, part in zip(self.tables, self._overlay, strict=True):
            owners = t.owners[part[:, 0]]
            for o in range(self._owners):
                own = part[owners == o]
                end = used[o] + len(own)
                at[o, used[o] : end] = t.own_position[own[:, 0]]
                records[o, used[o] : end] = own[:, 1:]
                used[o] = end
        arrays[f"{self.group.name}/stored_at"] = at
        arrays[f"{self.group.name}/stored"] = records
        return n


class RequesterRoutes:
    """The requesters' half of one group of a batch.

    Args:
      group: the group.
      features: of the collection.
      inputs: features of the batch, by name.
      raws: by feature, position of each id among its requester's unique keys.
      requesters, examples: of this process, and examples of each, padding included.
    """

    def __init__(
        self,
        group: Group,
        features: Mapping[str, FeatureSpec],
        inputs: Mapping[str, Input],
        raws: Mapping[str, np.ndarray],
        requesters: int,
        examples: int,
    ):
        self.group = group
        self.inputs, self.raws = inputs, raws
        self.requesters, self.examples = requesters, examples
        self._fixed: list[str] = []
        self._pooled: list[tuple[str, str]] = []
        self._sequences: list[tuple[str, FeatureSpec]] = []
        self._values = np.zeros(requesters, np.int64)
        self._weighted = False
        for name, spec in features.items():
            if not any(name in t.features for t in group.tables):
                continue
            x = inputs[name]
            if spec.combiner == "none":
                self._sequences.append((name, spec))
            elif x.lengths is None:
                self._fixed.append(name)
            else:
                self._pooled.append((name, spec.combiner))
                self._values += np.diff(x.bounds)
                self._weighted = self._weighted or x.weights is not None

    @property
    def kinds(self) -> dict[str, str]:
        """How each feature comes: with one key per example, or with any number."""
        return (
            dict.fromkeys(self._fixed, "one key per example")
            | {name: "a bag of keys" for name, _ in self._pooled}
            | {name: "a sequence of keys" for name, _ in self._sequences}
        )

    def needs(self) -> dict[tuple, int]:
        """The least static sizes, by the names that `layout` asks for them."""
        return {
            ("values",): int(self._values.max()),
            self._weights_name: int(self._weighted),
        } | {
            (name, "length"): self.inputs[name].longest
            for name, spec in self._sequences
            if not spec.max_length
        }

    @property
    def _weights_name(self) -> tuple:
        return "weighted", tuple(self._pooled)

    def layout(self, rows: int, stored: int, send: int, size: Size) -> GroupLayout:
        """The static half of the plan, of these sizes of the owners' half."""
        sequences = [
            SequenceLayout(
                name,
                spec.max_length or size((name, "length"), self.inputs[name].longest, 1),
            )
            for name, spec in self._sequences
        ]
        weighted, values = False, 0
        if self._pooled:
            weighted = bool(size(self._weights_name, int(self._weighted), 0))
            values = size(("values",), int(self._values.max()), 64)
        return GroupLayout(
            self.group.name, self.group.replicated, rows, send, tuple(self._fixed),
            tuple(self._pooled), values, weighted, tuple(sequences), stored,
        )  # fmt: skip

    def write(
        self,
        layout: GroupLayout,
        missing: int,
        base: np.ndarray,
        where: np.ndarray,
        arrays: dict[str, np.ndarray],
    ) -> None:
        """Adds the arrays of the requesters, [requesters, ...], to `arrays`.

        Args:
          layout: of `layout`.
          missing: the position that reads zeros.
          base, where: of `OwnerRoutes.write`, of these requesters.
          arrays: by field name.
        """
        p, name, examples = self.requesters, layout.name, self.examples
        inputs, raws = self.inputs, self.raws
        table_of = {
            f: t for t, table in enumerate(self.group.tables) for f in table.features
        }
        if layout.fixed:
            columns = len(layout.fixed)
            out = np.empty((p, examples * columns), np.int32)
            for c, f in enumerate(layout.fixed):
                kernels.scatter_column(
                    raws[f], inputs[f].bounds, base[table_of[f]], where, missing, c,
                    columns, out,
                )  # fmt: skip
            for r in range(p):
                used = int(np.diff(inputs[layout.fixed[0]].bounds)[r])
                out[r, used * columns :] = missing
            arrays[f"{name}/fixed"] = out
        if layout.pooled:
            index = np.full((p, layout.values), missing, np.int32)
            segments = np.full(
                (p, layout.values), len(layout.pooled) * examples, np.int32
            )
            weights = np.zeros((p, layout.values if layout.weighted else 0), np.float32)
            used = np.zeros(p, np.int64)
            for i, (f, _) in enumerate(layout.pooled):
                x = inputs[f]
                has_weights = x.weights is not None
                kernels.scatter_values(
                    raws[f], x.lengths, x.bounds, x.example_bounds, base[table_of[f]],
                    where, missing, i * examples, used, index, segments,
                    x.weights if has_weights else np.zeros(0, np.float32), weights,
                    has_weights,
                )  # fmt: skip
            arrays[f"{name}/values"] = index
            arrays[f"{name}/segments"] = segments
            if layout.weighted:
                arrays[f"{name}/weights"] = weights
        for s in layout.sequences:
            x = inputs[s.name]
            out = np.empty((p, examples * s.length), np.int32)
            kernels.scatter_sequence(
                raws[s.name], x.lengths, x.bounds, x.example_bounds,
                base[table_of[s.name]], where, missing, missing + 1, s.length, out,
            )  # fmt: skip
            arrays[f"{name}/sequence/{s.name}"] = out
