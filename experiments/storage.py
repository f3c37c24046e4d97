"""Options of a program about where rows lie, who gets one and who has to leave."""

from dataclasses import dataclass
from typing import Literal

from shardjax import embed


@dataclass(frozen=True, kw_only=True)
class StorageConfig:
    """Where rows lie."""

    device_rows: int | None = None
    """Rows on all devices together, per slab; the others lie in RAM. Without it, all rows
    lie on the devices."""
    lookahead: int = 8
    """Batches whose rows are brought to the devices together, planned while those before
    them are trained on."""
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
    keep: Literal["lfu", "lru"] = "lfu"
    """Rows that stay when others must come: the most often or the last used ones."""

    def __post_init__(self):
        if self.lookahead < 1:
            raise ValueError(f"`lookahead` must be positive, got {self.lookahead}")
        self.storage()

    def storage(self) -> embed.Storage | None:
        """For a collection."""
        if self.device_rows is None:
            for name in ("host_bytes", "disk", "disk_bytes", "map_bytes", "merge_rate"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"`{name}` is for rows that are not on the devices, got"
                        f" {getattr(self, name)!r} and no `device_rows`"
                    )
            return None
        return embed.Storage(
            device_rows=self.device_rows,
            host_bytes=self.host_bytes,
            disk=self.disk,
            disk_bytes=self.disk_bytes,
            map_bytes=self.map_bytes,
            merge_rate=self.merge_rate,
            keep=self.keep,
        )


@dataclass(frozen=True, kw_only=True)
class AdmitConfig:
    """Which keys get a row."""

    min_count: int = 1
    """A key gets a row with this occurrence of it; until then it reads zeros."""
    false_positive_rate: float | None = None
    """Count occurrences in a Bloom filter that gives at most this share of keys a row
    early; without it, exactly."""
    most_keys: int = 10_000_000
    """Keys without a row whose occurrences are counted at a time."""
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
            return embed.MinCount(
                self.min_count, self.most_keys, self.false_positive_rate
            )
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
    decay: float = 0.98
    """What scores of shows and clicks are multiplied by each time."""
    every: int = 1000
    """Steps from one look for such rows to the next."""

    def __post_init__(self):
        self.policies()

    def policies(self) -> tuple[embed.Eviction, ...]:
        """For a table."""
        found: list[embed.Eviction] = []
        if self.ttl is not None:
            found.append(embed.TTL(self.ttl, self.every))
        if self.show_click is not None:
            policy = embed.ShowClick(self.decay, self.show_click, every=self.every)
            found.append(policy)
        if self.lru is not None:
            found.append(embed.LRU(self.lru, self.every))
        if self.lfu is not None:
            found.append(embed.LFU(self.lfu, self.every))
        return tuple(found)
