"""Counting the occurrences of keys that have no row yet."""

import logging
import math
from collections.abc import Mapping, Sequence

import numba
import numpy as np

from shardjax.embed.eviction import TALLY, lowest
from shardjax.embed.index import Index, mix64
from shardjax.embed.policies import Always, MinCount, Probability
from shardjax.embed.records import hashes_of

_log = logging.getLogger(__name__)


@numba.njit(nogil=True, cache=True)
def _estimate(counters, hashes, keys, out):
    """Writes how often each key seems to have been counted, int64 [n]."""
    size = np.uint64(counters.shape[0])
    for i in range(keys.shape[0]):
        h = mix64(keys[i])
        step = mix64(h) | np.uint64(1)
        least = 255
        for _ in range(hashes):
            least = min(least, np.int64(counters[h % size]))
            h += step
        out[i] = least


@numba.njit(nogil=True, cache=True)
def _raise_to(counters, hashes, keys, counts):
    """Raises the counters of keys to at least their counts, int64 [n]."""
    size = np.uint64(counters.shape[0])
    for i in range(keys.shape[0]):
        h = mix64(keys[i])
        step = mix64(h) | np.uint64(1)
        count = min(counts[i], 255)
        for _ in range(hashes):
            at = h % size
            if counters[at] < count:
                counters[at] = count
            h += step


class ExactCounts:
    """Occurrences of up to `most_keys` keys."""

    def __init__(self, most_keys: int):
        self.most_keys = most_keys
        self._counts = Index()

    def __len__(self) -> int:
        return len(self._counts)

    def before(self, keys: np.ndarray) -> np.ndarray:
        """How often each key has occurred, int64 [n]."""
        return np.maximum(self._counts.lookup(keys), 0).astype(np.int64)

    def set(self, keys: np.ndarray, counts: np.ndarray) -> int:
        """Sets counts of keys; returns how many other keys were forgotten for it."""
        self._counts.insert(keys, np.minimum(counts, 2**31 - 1))
        forgotten = 0
        if len(self._counts) > self.most_keys:
            known, scores = self._counts.items()
            facts = known, np.zeros(0, np.int32), scores
            test = lowest(lambda: [facts], TALLY, self.most_keys // 2)
            assert test is not None, "there are more than most_keys"
            gone = known[test(facts)]
            self._counts.remove(gone)
            forgotten = len(gone)
        return forgotten

    def forget(self, keys: np.ndarray) -> None:
        """Forgets keys, which have a row now."""
        self._counts.remove(keys)

    def get(self) -> dict[str, np.ndarray]:
        """Keys, uint64 [n], and how often each has occurred, int32 [n]."""
        keys, counts = self._counts.items()
        return {"keys": keys, "counts": counts}

    def put(self, counts: Mapping[str, np.ndarray]) -> None:
        """Takes over what `get` gave."""
        self._counts = Index(len(counts["keys"]))
        self._counts.insert(counts["keys"], counts["counts"])


class FilterCounts:
    """Occurrences in a counting Bloom filter: never too few, at times too many."""

    def __init__(self, most_keys: int, rate: float):
        size = math.ceil(-most_keys * math.log(rate) / math.log(2) ** 2)
        self.most_keys = most_keys
        self._counters = np.zeros(max(size, 64), np.uint8)
        self._hashes = max(round(-math.log2(rate)), 1)
        self._seen = 0

    def __len__(self) -> int:
        return self._seen

    def before(self, keys: np.ndarray) -> np.ndarray:
        """How often each key seems to have occurred, int64 [n]."""
        out = np.empty(len(keys), np.int64)
        _estimate(self._counters, self._hashes, keys, out)
        return out

    def set(self, keys: np.ndarray, counts: np.ndarray) -> int:
        """Raises the counts of keys; forgets none."""
        was = self._seen
        self._seen += int((self.before(keys) == 0).sum())
        _raise_to(self._counters, self._hashes, keys, counts)
        if was <= self.most_keys < self._seen:
            _log.warning(
                "a counting Bloom filter made for most_keys=%d has seen more: from now on"
                " more keys than its false_positive_rate says get a row early. Give a"
                " larger most_keys",
                self.most_keys,
            )
        return 0

    def forget(self, keys: np.ndarray) -> None:
        """Nothing: others may share the counters."""

    def get(self) -> dict[str, np.ndarray]:
        """The counters, uint8, and how many keys they have seen, int64 [1]."""
        return {"counters": self._counters.copy(), "seen": np.array([self._seen])}

    def put(self, counts: Mapping[str, np.ndarray]) -> None:
        """Takes over what `get` gave."""
        self._counters[:] = counts["counters"]
        self._seen = int(counts["seen"][0])


def merge_counts(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """What several processes have counted (`Gate.counts`), of other keys each, as one.

    Example:
      >>> parts = [{"keys": np.array([7], np.uint64), "counts": np.array([2], np.int32)}] * 2
      >>> merge_counts(parts)["counts"].tolist()
      [2, 2]
    """
    if len(parts) == 1:
        return dict(parts[0])
    if "counters" not in parts[0]:
        return {name: np.concatenate([x[name] for x in parts]) for name in parts[0]}
    counters = np.sum([x["counters"] for x in parts], 0, dtype=np.int64)
    seen = np.sum([x["seen"] for x in parts], 0)
    return {"counters": np.minimum(counters, 255).astype(np.uint8), "seen": seen}


class Gate:
    """Decides which keys without a row get one, for one table.

    Deciding changes nothing; what a batch has been is told by `passed` once it is sure to
    be trained on, so that a batch that is looked up twice counts once.

    Args:
      policy: of the table.
      seed: for chance.
    """

    def __init__(self, policy: Always | MinCount | Probability, seed: np.uint64):
        self.policy = policy
        self._seed = seed
        self._counts: ExactCounts | FilterCounts | None = None
        if isinstance(policy, MinCount) and policy.count > 1:
            rate = policy.false_positive_rate
            self._counts = (
                ExactCounts(policy.most_keys)
                if rate is None
                else FilterCounts(policy.most_keys, rate)
            )

    @property
    def is_open(self) -> bool:
        """Whether every key gets a row."""
        return self._counts is None and not isinstance(self.policy, Probability)

    @property
    def has_memory(self) -> bool:
        """Whether it decides by what it has seen before."""
        return self._counts is not None

    @property
    def candidates(self) -> int:
        """Keys without a row that are being counted."""
        return 0 if self._counts is None else len(self._counts)

    def counts(self) -> dict[str, np.ndarray]:
        """What has been counted, for `set_counts`: copies."""
        return {} if self._counts is None else self._counts.get()

    def set_counts(self, counts: Mapping[str, np.ndarray]) -> None:
        """Goes on from what another gate of the same policy has counted."""
        if self._counts is not None:
            self._counts.put(counts)

    def admits(self, keys: np.ndarray, counts: np.ndarray, step: int) -> np.ndarray:
        """Which keys, uint64 [n] with their occurrences, get a row: bool [n]."""
        if self._counts is not None and isinstance(self.policy, MinCount):
            return self._counts.before(keys) + counts >= self.policy.count
        if isinstance(self.policy, Probability):
            moment = np.uint64(mix64(np.uint64(step)) ^ self._seed)
            chance = (hashes_of(keys ^ moment) >> np.uint64(11)) / 2.0**53  # in [0, 1)
            return chance < 1 - (1 - self.policy.p) ** counts
        return np.ones(len(keys), bool)

    def passed(self, keys: np.ndarray, counts: np.ndarray, admitted: np.ndarray) -> int:
        """Counts what a batch had; returns how many candidates were forgotten for it."""
        if self._counts is None:
            return 0
        self._counts.forget(keys[admitted])
        keys, counts = keys[~admitted], counts[~admitted]
        return self._counts.set(keys, self._counts.before(keys) + counts)
