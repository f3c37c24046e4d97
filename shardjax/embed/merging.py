"""What a new segment is made of: rows in the order of their hashes, a part at a time."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from shardjax.embed.records import HEADER_WORDS, hashes_of, keys_of, seal, write_records
from shardjax.embed.segments import Segment

# hashes, uint64 [n], in order; and records, int32 [n, words]
Part = tuple[np.ndarray, np.ndarray]
PART_BYTES = 16 << 20


def sorted_parts(keys, tables, last_step, tallies, rows) -> Iterator[Part]:
    """Rows as parts of a segment.

    Args:
      keys: uint64 [n], salted; with `tables`, int32 [n], unique.
      last_step, tallies: int32 and uint32 [n].
      rows: int32 [n, words].
    """
    hashes = hashes_of(keys)
    order = np.argsort(hashes)
    words = HEADER_WORDS + rows.shape[1]
    chunk = max(PART_BYTES // (4 * words), 1)
    for start in range(0, len(keys), chunk):
        part = order[start : start + chunk]
        records = np.empty((len(part), words), np.int32)
        write_records(part, keys, tables, last_step, tallies, rows, records)
        yield hashes[part], records


def merged_parts(
    segments: Sequence[Segment],
    dead: Sequence[np.ndarray],
    spend: Callable[[int], None] | None = None,
    most_bytes: int = PART_BYTES,
) -> Iterator[Part]:
    """What lives in some segments, as parts of one.

    Holds about `most_bytes` at a time, whatever their size.

    Args:
      segments: to be merged.
      dead: of each, uint8, which records do not count.
      spend: called with the bytes of each block that has been read, and of each part.
      most_bytes: of a part.

    Raises:
      CorruptSegmentError: for a record that is cut off or changed.
    """
    chunk = max(most_bytes // len(segments) // (4 * segments[0].words), 1)
    reading = [_read(s, d, chunk, spend) for s, d in zip(segments, dead, strict=True)]
    waiting: dict[int, Part] = {}
    while True:
        for i, parts in enumerate(reading):
            if i not in waiting:
                part = next(parts, None)
                if part is not None:
                    waiting[i] = part
        if not waiting:
            return
        # all that comes later is beyond the least of the last hashes
        limit = min(hashes[-1] for hashes, _ in waiting.values())
        taken = []
        for i, (hashes, records) in list(waiting.items()):
            n = int(np.searchsorted(hashes, limit, "right"))
            taken.append((hashes[:n], records[:n]))
            if n == len(hashes):
                del waiting[i]
            else:
                waiting[i] = hashes[n:], records[n:]
        hashes = np.concatenate([x for x, _ in taken])
        order = np.argsort(hashes, kind="stable")
        records = np.concatenate([x for _, x in taken])[order]
        if any(s.changes for s in segments):
            seal(records)
        if spend is not None:
            spend(records.nbytes)
        yield hashes[order], records


def _read(segment: Segment, dead: np.ndarray, chunk: int, spend) -> Iterator[Part]:
    for start in range(0, segment.count, chunk):
        stop = min(start + chunk, segment.count)
        _, records = segment.live_records(start, stop, dead)
        if spend is not None:
            spend((stop - start) * segment.words * 4)
        if len(records):
            keys = keys_of(records)
            hashes = hashes_of(keys)
            yield hashes, records
