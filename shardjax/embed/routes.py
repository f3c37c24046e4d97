"""A batch's index arrays: what owners send whom, and where each id finds its row."""

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


class Routes:
    """Writes the arrays of one group of a batch.

    Args:
      group: the group.
      tables: of the batch, with slots.
      inputs: features of the batch, by name.
      raws: by feature, position of each id among its requester's unique keys.
      devices, examples: requesters, and examples of each, padding included.
      size: gives static sizes.
    """

    def __init__(
        self,
        group: Group,
        tables: Sequence[TableDraft],
        inputs: Mapping[str, Input],
        raws: Mapping[str, np.ndarray],
        devices: int,
        examples: int,
        size: Size,
    ):
        self.group, self.tables = group, tables
        self.inputs, self.raws = inputs, raws
        self.devices, self.examples = devices, examples
        self.size = size

    def write(
        self,
        features: Mapping[str, FeatureSpec],
        arrays: dict[str, np.ndarray],
        loads: np.ndarray,
        overlay: Sequence[np.ndarray] = (),
    ) -> GroupLayout:
        """Adds the group's arrays to `arrays`; returns the static half.

        Args:
          features: of the collection.
          arrays: by field name, [devices, ...].
          loads: float [devices], in and out: rows that each owner sends.
          overlay: per table, int32 [n, 1 + words]: number of a unique key whose row is
            not on its device, and the row's words. For evaluation.
        """
        p, group = self.devices, self.group
        owners = 1 if group.replicated else p
        own_count = np.zeros(owners, np.int32)
        own_slots = np.empty((owners, sum(t.unique for t in self.tables)), np.int32)
        for t in self.tables:
            kernels.list_owned(
                t.slots, t.owners, t.unique, own_count, own_slots, t.own_position
            )
        rows = self.size(("rows",), int(own_count.max()), 64)
        slots = np.empty((p, rows), np.int32)
        slots[:] = np.iinfo(np.int32).max - np.arange(rows, dtype=np.int32)
        for o in range(p):
            n = own_count[o % owners]
            slots[o, :n] = own_slots[o % owners, :n]
        arrays[f"{group.name}/slots"] = slots
        stored = self._overlay(overlay, arrays)
        exchange = not group.replicated and p > 1
        send, base, where = self._routes(exchange, arrays, loads)
        layout = self._layout(features, rows, send, stored)
        self._scatter(layout, base, where, arrays)
        return layout

    def _overlay(self, overlay, arrays) -> int:
        """Rows that are not on their devices, for the step to put over what it gathers."""
        count = np.zeros(self.devices, np.int64)
        for t, part in zip(self.tables, overlay, strict=False):
            count += np.bincount(t.owners[part[:, 0]], minlength=self.devices)
        words = max((part.shape[1] - 1 for part in overlay), default=0)
        if not overlay:
            return 0
        n = self.size(("stored",), int(count.max()), 0)
        if not n:
            return 0
        at = np.full((self.devices, n), np.iinfo(np.int32).max, np.int32)
        at -= np.arange(n, dtype=np.int32)
        records = np.zeros((self.devices, n, words), np.int32)
        used = np.zeros(self.devices, np.int64)
        for t, part in zip(self.tables, overlay, strict=True):
            owners = t.owners[part[:, 0]]
            for o in range(self.devices):
                own = part[owners == o]
                end = used[o] + len(own)
                at[o, used[o] : end] = t.own_position[own[:, 0]]
                records[o, used[o] : end] = own[:, 1:]
                used[o] = end
        arrays[f"{self.group.name}/stored_at"] = at
        arrays[f"{self.group.name}/stored"] = records
        return n

    def _routes(self, exchange, arrays, loads):
        """What owners send whom, and where requesters find their rows."""
        group, states, p = self.group, self.tables, self.devices
        base = np.zeros((len(states), p), np.int32)
        base[1:] = np.cumsum([s.local_count for s in states], 0)[:-1]
        total = int((base[-1] + states[-1].local_count).max())
        where = np.empty((p, max(total, 1)), np.int32)
        if not exchange:
            for t, s in enumerate(states):
                for r in range(p):
                    n, at = s.local_count[r], base[t, r]
                    where[r, at : at + n] = s.own_position[s.local_unique[r]]
            return 0, base, where
        send_count = np.zeros((p, p), np.int32)  # requester, owner
        places = []
        for s in states:
            for r in range(p):
                place = np.empty(s.local_count[r], np.int32)
                kernels.route(
                    s.local_unique[r], s.local_count[r], s.owners, send_count[r], place
                )
                places.append(place)
        loads += send_count.sum(0)
        send = self.size(("send",), int(send_count.max()), 16)
        merge = np.full((p, p, send), np.iinfo(np.int32).max, np.int32)
        for t, s in enumerate(states):
            for r in range(p):
                kernels.fill_routes(
                    s.local_unique[r], s.local_count[r], s.owners, s.own_position,
                    places[t * p + r], send, merge[:, r], where[r, base[t, r] :],
                )  # fmt: skip
        arrays[f"{group.name}/merge"] = merge
        return send, base, where

    def _layout(self, features, rows, send, stored) -> GroupLayout:
        group, inputs = self.group, self.inputs
        fixed, pooled, sequences = [], [], []
        values = np.zeros(self.devices, np.int64)
        weighted = False
        for name, spec in features.items():
            if not any(name in t.features for t in group.tables):
                continue
            x = inputs[name]
            if spec.combiner == "none":
                length = spec.max_length or self.size((name, "length"), x.longest, 1)
                sequences.append(SequenceLayout(name, length))
            elif x.lengths is None:
                fixed.append(name)
            else:
                pooled.append((name, spec.combiner))
                values += np.diff(x.bounds)
                weighted = weighted or x.weights is not None
        key = ("weighted", tuple(pooled))
        weighted = bool(self.size(key, int(weighted), 0)) if pooled else False
        size = self.size(("values",), int(values.max()), 64) if pooled else 0
        return GroupLayout(
            group.name, group.replicated, rows, send, tuple(fixed), tuple(pooled),
            size, weighted, tuple(sequences), stored,
        )  # fmt: skip

    def _scatter(self, layout, base, where, arrays) -> None:
        """Writes the requesters' index arrays."""
        p, name, examples = self.devices, layout.name, self.examples
        inputs, raws = self.inputs, self.raws
        missing = layout.received(p)
        table_of = {f: t for t, s in enumerate(self.tables) for f in s.table.features}
        if layout.fixed:
            columns = len(layout.fixed)
            out = np.empty((p, examples * columns), np.int32)
            for c, f in enumerate(layout.fixed):
                x = inputs[f]
                kernels.scatter_column(
                    raws[f],
                    x.bounds,
                    base[table_of[f]],
                    where,
                    missing,
                    c,
                    columns,
                    out,
                )
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
