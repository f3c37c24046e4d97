"""Host kernels of the planner: keys to unique rows, and unique rows to their routes.

``translate`` runs once per feature and step, over all requester devices, and is where
the time goes: one index probe per key (prefetched in blocks) finds the row *and*
whether the batch has met it before. ``route`` and the rest run over unique rows only.

The threads of a planner take one table each: everything written here belongs to one
table, slots are given out afterwards in a fixed order.
"""

import numba
import numpy as np

from shardjax.embed.index import (
    EMPTY,
    NEW,
    code_of,
    home_of,
    mask_of,
    mix64,
    prefetch,
    word_of,
)
from shardjax.embed.span import DeviceSpan

# places of the counters that translate keeps, int64 [N_COUNTERS]
COUNT = 0  # keys in the table's index
UNIQUE = 1  # unique keys of this batch so far, over all requesters
LIMIT = 2  # keys that the index takes before it must grow
UNSEEN = 3  # ids without a row (evaluation)
BAD = 4  # ids outside a fixed vocabulary
FIRST_BAD = 5  # position of the first of them
PADDING = 6  # ids equal to the feature's padding id
N_COUNTERS = 7

# what stands in `raw` for an id that reads no row
NO_ROW = -1  # reads zeros, counts in a mean
DROPPED = -2  # reads zeros, does not count in a mean

_LOW = np.uint64(0xFFFFFFFF)
_1 = np.uint64(1)
_0 = np.uint64(0)
_BLOCK = 32


@numba.njit(nogil=True, cache=True)
def translate(
    keys,
    bounds,
    start,
    raw,
    table,
    homes,
    counters,
    unique_entry,
    local_position,
    local_unique,
    local_count,
    salt,
    insert,
    vocabulary,
    bad_row,
    padding_id,
    has_padding,
):
    """Maps the keys of one feature to positions among each requester's unique keys.

    Args:
      keys: uint64 [n], the requesters' keys one after the other.
      bounds: int64 [requesters + 1], where each requester's keys start.
      start: first key to look at (to go on after the index has grown).
      raw: int32 [n], out: position among the unique keys of (table, requester), or
        NO_ROW, or DROPPED.
      table: the index array. Its key is the raw key plus the table's salt.
      homes: of the index.
      counters: int64 [N_COUNTERS], in and out.
      unique_entry: int32 [..], out: entry of each unique key of the batch.
      local_position: int32 [.., requesters], out: its position per requester, or -1.
      local_unique: int32 [requesters, ..], out: the unique keys of each requester.
      local_count: int32 [requesters], in and out: how many those are.
      salt: uint64 added to each key.
      insert: whether an unknown key gets an entry (marked NEW).
      vocabulary: ids must be below this, 0 for a dynamic vocabulary.
      bad_row: what an id outside the vocabulary becomes, NO_ROW or DROPPED.
      padding_id: the key that means "nothing here", where `has_padding`.

    Returns:
      n, or the key at which the index has to grow before going on.
    """
    mask = mask_of(homes)
    home = np.empty(_BLOCK, np.uint64)
    requesters = bounds.shape[0] - 1
    unique = counters[UNIQUE]
    count = counters[COUNT]
    for r in range(requesters):
        first = max(start, bounds[r])
        for block in range(first, bounds[r + 1], _BLOCK):
            stop = min(block + _BLOCK, bounds[r + 1])
            for j in range(block, stop):
                i = home_of(keys[j] + salt, homes, mask)
                home[j - block] = i
                prefetch(table, i)  # pyright: ignore[reportCallIssue]
            for j in range(block, stop):
                if has_padding and keys[j] == padding_id:
                    raw[j] = DROPPED
                    counters[PADDING] += 1
                    continue
                if vocabulary != np.uint64(0) and keys[j] >= vocabulary:
                    if counters[BAD] == 0:
                        counters[FIRST_BAD] = j
                    counters[BAD] += 1
                    raw[j] = bad_row
                    continue
                key = keys[j] + salt
                i = home[j - block]
                while True:
                    word = table[i, 1]
                    if code_of(word) == EMPTY or table[i, 0] == key:
                        break
                    i += _1
                position = np.int64(word & _LOW)
                if code_of(word) == EMPTY:
                    if not insert:
                        counters[UNSEEN] += 1
                        raw[j] = NO_ROW
                        continue
                    if count >= counters[LIMIT]:
                        counters[UNIQUE] = unique
                        counters[COUNT] = count
                        return j
                    table[i, 0] = key
                    word = word_of(NEW, _0)
                    count += 1
                    position = unique
                    known = False
                else:
                    known = position < unique and unique_entry[position] == np.int64(i)
                if not known:
                    position = unique
                    unique_entry[position] = np.int64(i)
                    table[i, 1] = (word & ~_LOW) | np.uint64(position)
                    for q in range(requesters):
                        local_position[position, q] = -1
                    unique += 1
                local = local_position[position, r]
                if local < 0:
                    local = local_count[r]
                    local_position[position, r] = local
                    local_unique[r, local] = position
                    local_count[r] = local + 1
                raw[j] = local
    counters[UNIQUE] = unique
    counters[COUNT] = count
    return np.int64(keys.shape[0])


@numba.njit(inline="always")
def owner_of(salted_key, single_owner, devices):
    """The device that owns a key: `single_owner`, or by its logical bucket where -1.

    The high 16 bits of the key's hash number 2**16 buckets, of which a device owns a
    contiguous range.
    """
    if single_owner >= 0:
        return np.int32(single_owner)
    bucket = mix64(salted_key) >> np.uint64(48)
    return np.int32((bucket * np.uint64(devices)) >> np.uint64(16))


@numba.njit(nogil=True, cache=True)
def _find_owners(salted_keys, single_owner, devices, first, owners):
    for i in range(salted_keys.shape[0]):
        owners[i] = owner_of(salted_keys[i], single_owner, devices) - first


def owners_of(
    salted_keys: np.ndarray, single_owner: int, span: DeviceSpan
) -> np.ndarray:
    """The owner of each of some keys, uint64 [n], of a table: int32 [n].

    Args:
      single_owner: of the table, or -1.
      span: the devices that own rows; owners are numbered from its first one.
    """
    owners = np.empty(len(salted_keys), np.int32)
    _find_owners(salted_keys, single_owner, span.total, span.first, owners)
    return owners


@numba.njit(nogil=True, cache=True)
def list_owned(slots, owners, unique, own_count, own_slots, own_position):
    """Appends one table's unique rows to the lists of the rows each owner updates.

    Args:
      slots: int32 [..]: slot of each unique key, -1 for none: then its place in the list
        is filled with a slot that is past the end of any slab.
      owners: int32 [..]: owner of each unique key.
      own_count: int32 [devices], in and out: length of each owner's list.
      own_slots: int32 [devices, ..], out: the lists.
      own_position: int32 [..], out: where each unique key is in its owner's list.
    """
    for g in range(unique):
        owner = owners[g]
        m = own_count[owner]
        own_slots[owner, m] = slots[g] if slots[g] >= 0 else 2147483647 - m
        own_position[g] = m
        own_count[owner] = m + 1


@numba.njit(nogil=True, cache=True)
def hide(hidden, local_unique, part):
    """Makes ids of hidden unique keys read no row; returns how many.

    Args:
      hidden: bool [..]: of each unique key of the table.
      local_unique: int32 [..]: the requester's unique keys.
      part: int32 [n], in and out: the requester's ids, of `translate`.
    """
    count = 0
    for j in range(part.shape[0]):
        if part[j] >= 0 and hidden[local_unique[part[j]]]:
            part[j] = NO_ROW
            count += 1
    return count


@numba.njit(nogil=True, cache=True)
def tally(local_unique, part, amounts, out):
    """Adds the amounts of a requester's ids to those of the table's unique keys.

    Args:
      local_unique: int32 [..]: the requester's unique keys.
      part: int32 [n]: the requester's ids, of `translate`.
      amounts: int64 [n].
      out: int64 [unique], in and out.
    """
    for j in range(part.shape[0]):
        if part[j] >= 0:
            out[local_unique[part[j]]] += amounts[j]


@numba.njit(nogil=True, cache=True)
def route(local_unique, count, owners, send_count, place):
    """Places one (table, requester)'s unique keys in what its owners send.

    Args:
      local_unique: int32 [..]: the requester's unique keys of the table.
      count: how many.
      owners: int32 [..]: owner of each unique key of the table.
      send_count: int32 [devices], in and out: rows each owner sends this requester.
      place: int32 [count], out: position within what the owner sends.
    """
    for u in range(count):
        owner = owners[local_unique[u]]
        place[u] = send_count[owner]
        send_count[owner] += 1


@numba.njit(nogil=True, cache=True)
def fill_routes(
    local_unique, count, owners, own_position, place, capacity, merge, where
):
    """Writes the send lists of the owners and where the requester finds each row.

    Args:
      capacity: rows per (owner, requester), padding included.
      merge: int32 [owners, capacity], out: position in the owner's list of rows.
      where: int32 [count], out: position among the rows the requester receives.
    """
    for u in range(count):
        g = local_unique[u]
        owner = owners[g]
        merge[owner, place[u]] = own_position[g]
        where[u] = owner * capacity + place[u]


@numba.njit(nogil=True, cache=True)
def scatter_column(raw, bounds, base, where, missing, column, per_example, out):
    """Writes one fixed feature's column of the inverse index of every requester.

    Args:
      raw: int32 [n] of `translate`, examples of all requesters in order.
      bounds: int64 [requesters + 1]: where each requester's examples start.
      base: int32 [requesters]: where the table's unique keys start in `where`.
      where: int32 [requesters, ..]: position of each unique key's row.
      missing: the position that reads zeros.
      column: the feature's column.
      per_example: number of columns.
      out: int32 [requesters, examples * per_example].
    """
    for r in range(bounds.shape[0] - 1):
        first = base[r]
        at = column
        for j in range(bounds[r], bounds[r + 1]):
            u = raw[j]
            out[r, at] = where[r, first + u] if u >= 0 else missing
            at += per_example


@numba.njit(nogil=True, cache=True)
def scatter_values(
    raw, lengths, bounds, example_bounds, base, where, missing, segment_base,
    used, inverse, segments, weights, out_weights, has_weights,
):  # fmt: skip
    """Writes one jagged, pooled feature's ids and bags for every requester.

    Dropped ids (padding) take no entry.

    Args:
      raw: int32 [n] of `translate`.
      lengths: int32 [batch]: ids per example.
      bounds: int64 [requesters + 1]: where each requester's ids start.
      example_bounds: int64 [requesters + 1]: where its examples start.
      segment_base: number of the feature's first bag within a requester.
      used: int64 [requesters], in and out: entries already written.
      inverse: int32 [requesters, ..], out: position of each id's row.
      segments: int32 [requesters, ..], out: bag of each id.
      weights: float32 [n], copied to `out_weights` where `has_weights`, else ones are.
      out_weights: float32 [requesters, ..], out; may have no columns: nothing written.
    """
    weighted = out_weights.shape[1] > 0
    for r in range(bounds.shape[0] - 1):
        k = bounds[r]
        at = used[r]
        first = base[r]
        for e in range(example_bounds[r], example_bounds[r + 1]):
            bag = np.int32(segment_base + e - example_bounds[r])
            for _ in range(lengths[e]):
                u = raw[k]
                if u != DROPPED:
                    inverse[r, at] = where[r, first + u] if u >= 0 else missing
                    segments[r, at] = bag
                    if weighted:
                        out_weights[r, at] = weights[k] if has_weights else 1.0
                    at += 1
                k += 1
        used[r] = at


@numba.njit(nogil=True, cache=True)
def scatter_sequence(
    raw, lengths, bounds, example_bounds, base, where, missing, masked, length, out
):
    """Writes one sequence feature: positions, padded to `length` per example.

    Args:
      masked: what stands for "no id here" (the mask is false there).
      out: int32 [requesters, examples * length], out.
    """
    for r in range(bounds.shape[0] - 1):
        k = bounds[r]
        first = base[r]
        for e in range(example_bounds[r], example_bounds[r + 1]):
            at = (e - example_bounds[r]) * length
            end = at + length
            for _ in range(lengths[e]):
                u = raw[k]
                if u != DROPPED:
                    out[r, at] = where[r, first + u] if u >= 0 else missing
                    at += 1
                k += 1
            out[r, at:end] = masked
        out[r, (example_bounds[r + 1] - example_bounds[r]) * length :] = masked


@numba.njit(nogil=True, cache=True)
def truncate(values, lengths, limit, keep_last, out, out_lengths):
    """Keeps the first (or last) `limit` values of every example; returns how many."""
    k = 0
    at = 0
    for e in range(lengths.shape[0]):
        n = lengths[e]
        keep = min(n, limit)
        skip = n - keep if keep_last else 0
        for j in range(keep):
            out[at + j] = values[k + skip + j]
        out_lengths[e] = keep
        at += keep
        k += n
    return at
