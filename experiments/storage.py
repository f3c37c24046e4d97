"""Options of a program about where rows lie, who gets one and who has to leave."""

from dataclasses import dataclass
from typing import Any, Literal

from shardjax import embed


def refuse_idle(config: Any, names: tuple[str, ...], needed: str) -> None:
    """Raises for an option that has no effect without another one.

    Args:
      config: that has them.
      names: of the options, None unless given.
      needed: what they have an effect with.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None:
            raise ValueError(
                f"`{name}` has no effect without {needed}, got {value!r}. Give {needed} as"
                f" well, or leave `{name}` out"
            )


@dataclass(frozen=True, kw_only=True)
class StorageConfig:
    """Where rows lie."""

    device_rows: int | None = None
    """Rows on all devices together, per slab; the others lie in RAM. Without it, all rows
    lie on the devices."""
    lookahead: int | None = None
    """Batches whose rows are brought to the devices together, planned while those before
    them are trained on; 8 without."""
    host_bytes: str | None = None
    """RAM for the other rows, such as 8GB; rows beyond go to --storage.disk."""
    disk: str | None = None
    """Folder for the rows that RAM does not hold; emptied at the end."""
    disk_bytes: str | None = None
    """What the files there may take, such as 100GB."""
    map_bytes: str | None = None
    """How much of the files may be read as memory, faster; a tenth of host-bytes without."""
    merge_rate: str | None = None
    """Bytes per second that merging the files reads and writes at most, such as 100MB; as
    fast as it can without."""
    keep: Literal["lfu", "lru"] | None = None
    """Rows that stay when others must come: the most often (lfu, also without it) or the last
    used ones."""

    def __post_init__(self):
        if self.lookahead is not None and self.lookahead < 1:
            raise ValueError(f"`lookahead` must be positive, got {self.lookahead}")
        self.storage()

    @property
    def window(self) -> int:
        """How many batches to plan together."""
        if self.device_rows is None:
            return 1
        return 8 if self.lookahead is None else self.lookahead

    def storage(self) -> embed.Storage | None:
        """For a collection."""
        if self.device_rows is None:
            about_files = ("disk", "disk_bytes", "map_bytes", "merge_rate")
            names = ("lookahead", "host_bytes", *about_files, "keep")
            refuse_idle(self, names, "`device_rows`")
            return None
        return embed.Storage(
            device_rows=self.device_rows,
            host_bytes=self.host_bytes,
            disk=self.disk,
            disk_bytes=self.disk_bytes,
            map_bytes=self.map_bytes,
            merge_rate=self.merge_rate,
            keep=self.keep or "lfu",
        )


@dataclass(frozen=True, kw_only=True)
class AdmitConfig:
    """Which keys get a row."""

    min_count: int = 1
    """A key gets a row with this occurrence of it; until then it reads zeros."""
    false_positive_rate: float | None = None
    """Count occurrences in a Bloom filter that gives at most this share of keys a row
    early; without it, exactly."""
    most_keys: int | None = None
    """Keys without a row whose occurrences are counted at a time; 10000000 without."""
    probability: float = 1.0
    """Chance of a row with each occurrence of a key that has none."""

    def __post_init__(self):
        self.policy()

    def policy(self) -> embed.Always | embed.MinCount | embed.Probability:
        """For a table."""
        if self.min_count > 1 and self.probability != 1:
            raise ValueError(
                "`min_count` and `probability` are two ways to admit keys, got"
                f" {self.min_count} and {self.probability}. Give one of them"
            )
        if self.min_count != 1:
            most = 10_000_000 if self.most_keys is None else self.most_keys
            return embed.MinCount(self.min_count, most, self.false_positive_rate)
        needed = "a `min_count` of 2 or more"
        refuse_idle(self, ("false_positive_rate", "most_keys"), needed)
        return embed.Probability(self.probability)


@dataclass(frozen=True, kw_only=True)
class EvictConfig:
    """Which rows leave for good."""

    ttl: int | None = None
    """Rows that none of so many steps has used."""
    lru: int | None = None
    """Of more rows per table than this, those unused for the longest time."""
    lfu: int | None = None
    """Of more rows per table than this, those that the fewest steps have used."""
    show_click: float | None = None
    """Rows whose decayed score of shows and clicks is below this."""
    decay: float | None = None
    """What scores of shows and clicks are multiplied by each time; 0.98 without."""
    every: int | None = None
    """Steps from one look for such rows to the next; 1000 without."""

    def __post_init__(self):
        self.policies()

    def policies(self) -> tuple[embed.Eviction, ...]:
        """For a table."""
        found: list[embed.Eviction] = []
        every = 1000 if self.every is None else self.every
        if self.ttl is not None:
            found.append(embed.TTL(self.ttl, every))
        if self.show_click is not None:
            decay = 0.98 if self.decay is None else self.decay
            found.append(embed.ShowClick(decay, self.show_click, every=every))
        else:
            refuse_idle(self, ("decay",), "`show_click`")
        if self.lru is not None:
            found.append(embed.LRU(self.lru, every))
        if self.lfu is not None:
            found.append(embed.LFU(self.lfu, every))
        if not found:
            needed = "one of `ttl`, `lru`, `lfu` and `show_click`"
            refuse_idle(self, ("every",), needed)
        return tuple(found)
