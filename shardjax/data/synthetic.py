"""Click logs drawn from a planted model, whose best possible scores are known.

Each row is a pure function of (seed, row number) and the planted model, so any range of
rows can be drawn by itself, in chunks of any size.

The planted model: the ids of a categorical feature follow Zipf's law. Each id has a
trait, about standard normal, which is hashed from the id and a salt of the feature, so
there is no table. Dense features are standard normal. With `f` over categorical
features, `(f, g)` over a few pairs of them and `j` over dense features::

    logit = bias + scale * ( sum_f w_f trait(id_f)
                           + sum_(f,g) v trait(id_f) trait(id_g)
                           + sum_j a_j x_j + q_j (x_j^2 - 1) )

The weights w_f are smaller for larger vocabularies, whose ids are seen less often.
`bias` and `scale` are set such that the click rate and the Bayes AUC are as asked for.
The label is 1 with probability sigmoid(logit): this is the only noise.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numba
import numpy as np

from shardjax.data.batch import Batch
from shardjax.data.permutation import check_rows
from shardjax.data.shuffling import check_count
from shardjax.data.source import ROWS_AT_ONCE

_VOCABULARY = (50, 100, 100, 200, 500, 1000, 2000, 5000)
_CALIBRATION_ROWS = 65_536
_CALIBRATION_SEED = 0xCA1B
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class _Planted:
    """Constants of a planted model, one entry per feature or pair."""

    sizes: np.ndarray  # float64 [n_categorical]
    salts: np.ndarray  # uint64 [n_categorical]
    effects: np.ndarray  # float64 [n_categorical], w of the model
    pairs: np.ndarray  # int64 [n_pairs, 2]
    interaction: float  # v
    linear: np.ndarray  # float64 [n_dense], a
    square: np.ndarray  # float64 [n_dense], q
    bias: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True)
class Synthetic:
    """Rows of clicks drawn from a planted model; an `Indexable` source.

    The features are named `id_0`, `id_1`, ... and have one key per row.

    Attributes:
      rows: how many rows there are.
      vocabulary: how many ids each categorical feature has.
      n_dense: how many dense features there are.
      zipf: exponent of Zipf's law; the probability of the r-th id is about r ** -zipf.
      seed: draws the rows.
      model_seed: draws the planted model.
      click_rate: the share of rows with label 1, in expectation.
      auc: the Bayes AUC, in expectation: no model does better.
      hashed_keys: keys are spread over all of [0, 2**64); False for the ids themselves,
        from 0 (the most frequent) to the vocabulary size - 1.
      chunk_rows: how many rows a chunk has. The rows do not depend on it.

    Raises:
      TypeError: if a number is not of its kind.
      ValueError: if a number is out of range.

    Example:
      >>> source = Synthetic(rows=1000, vocabulary=(10, 100), n_dense=3)
      >>> batch = next(source.chunks())
      >>> batch.feature_names, batch.fixed.shape, batch.dense.shape
      (('id_0', 'id_1'), (2, 1000), (1000, 3))
    """

    rows: int = 2_000_000
    vocabulary: tuple[int, ...] = _VOCABULARY
    n_dense: int = 4
    zipf: float = 1.1
    seed: int = 0
    model_seed: int = 0
    click_rate: float = 0.25
    auc: float = 0.8
    hashed_keys: bool = True
    chunk_rows: int = 65_536

    def __post_init__(self):
        object.__setattr__(self, "vocabulary", tuple(self.vocabulary))
        for name in ("rows", "n_dense", "seed", "model_seed"):
            check_count(name, getattr(self, name), least=0)
        check_count("chunk_rows", self.chunk_rows)
        for size in self.vocabulary:
            check_count("vocabulary", size)
        for name in ("seed", "model_seed"):
            if getattr(self, name) >= 2**64:
                raise ValueError(
                    f"`{name}` must be below 2**64, got {getattr(self, name)}"
                )
        if not self.vocabulary and not self.n_dense:
            raise ValueError(
                "a synthetic source must have features, got an empty `vocabulary` and"
                " n_dense=0"
            )
        if not 0 <= self.zipf or self.zipf == 1:
            raise ValueError(
                f"`zipf` must be at least 0 and other than 1, got {self.zipf}. Take"
                " 1.001 for 1."
            )
        if not 0 < self.click_rate < 1:
            raise ValueError(
                f"`click_rate` must lie between 0 and 1, got {self.click_rate}"
            )
        if not 0.5 < self.auc < 0.99:
            raise ValueError(f"`auc` must lie between 0.5 and 0.99, got {self.auc}")

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the categorical features."""
        return tuple(f"id_{i}" for i in range(len(self.vocabulary)))

    def chunks(self, start_chunk: int = 0) -> Iterator[Batch]:
        """Draws all rows from the beginning of a chunk on.

        Args:
          start_chunk: number of the first chunk.

        Yields:
          Batches of `chunk_rows` rows; the last may have fewer.

        Example:
          >>> source = Synthetic(rows=100, chunk_rows=40)
          >>> [batch.size for batch in source.chunks(start_chunk=1)]
          [40, 20]
        """
        for start in range(start_chunk * self.chunk_rows, self.rows, self.chunk_rows):
            yield self.read(start, min(start + self.chunk_rows, self.rows))

    def chunk_sizes(self) -> Iterator[int]:
        """Gives the number of rows of each chunk, without drawing any.

        Yields:
          `chunk_rows`, and at the end what remains.

        Example:
          >>> list(Synthetic(rows=100, chunk_rows=40).chunk_sizes())
          [40, 40, 20]
        """
        for start in range(0, self.rows, self.chunk_rows):
            yield min(self.chunk_rows, self.rows - start)

    def read(self, start: int, stop: int) -> Batch:
        """Draws rows start to stop.

        Args:
          start: first row, at least 0.
          stop: one past the last row, at most `rows`.

        Returns:
          A batch of the rows.

        Raises:
          ValueError: if the rows are not within the source.

        Example:
          >>> Synthetic(rows=100).read(20, 30).size
          10
        """
        labels, dense, keys, _ = self._draw(start, stop)
        return Batch(labels, dense, keys, self.feature_names)

    @property
    def rows_at_once(self) -> int:
        """Few: each row is drawn by itself."""
        return ROWS_AT_ONCE

    def row_count(self) -> int:
        """Gives the number of rows."""
        return self.rows

    def take(self, index: np.ndarray) -> Batch:
        """Draws rows by number, in the order asked for.

        Args:
          index: integers [n], each at least 0 and below `rows`.

        Returns:
          A batch of n rows.

        Raises:
          IndexError: if there is no such row.

        Example:
          >>> source = Synthetic(rows=100)
          >>> bool((source.take([7, 3]).fixed[:, 0] == source.read(7, 8).fixed[:, 0]).all())
          True
        """
        index = check_rows(index, self.rows)
        labels, dense, keys, _ = self._sample(index)
        return Batch(labels, dense, keys, self.feature_names)

    def logits(self, start: int, stop: int) -> np.ndarray:
        """Gives the true logits of rows start to stop.

        Args:
          start: first row, at least 0.
          stop: one past the last row, at most `rows`.

        Returns:
          float64 [stop - start]; sigmoid of it is the probability of label 1.

        Example:
          >>> Synthetic(rows=100).logits(0, 10).shape
          (10,)
        """
        return self._draw(start, stop)[3]

    def bayes(self, start: int, stop: int) -> dict[str, float]:
        """Scores the true probabilities against the labels of the same rows.

        No model scores better in expectation. The scores are those of the labels that
        were drawn, so they compare with a model's on just these rows.

        Args:
          start: first row, at least 0.
          stop: one past the last row, at most `rows`.

        Returns:
          `auc`, the area under the ROC curve (NaN if all labels are the same), and
          `logloss`, in nats.

        Example:
          >>> scores = Synthetic(rows=20_000).bayes(0, 20_000)
          >>> abs(scores["auc"] - 0.8) < 0.01
          True
        """
        if not 0 <= start < stop <= self.rows:
            raise ValueError(
                f"rows to score must satisfy 0 <= start < stop <= {self.rows}, got"
                f" {start} and {stop}"
            )
        parts = [
            (labels, logits)
            for at in range(start, stop, self.chunk_rows)
            for labels, *_, logits in [self._draw(at, min(at + self.chunk_rows, stop))]
        ]
        labels = np.concatenate([labels for labels, _ in parts]).astype(bool)
        logits = np.concatenate([logits for _, logits in parts])
        # -log sigmoid(x) = log(1 + exp(-x)), for the side that the label is on.
        losses = np.logaddexp(0, np.where(labels, -logits, logits))
        return {"auc": _auc(labels, logits), "logloss": float(losses.mean())}

    def _draw(self, start: int, stop: int):
        if not 0 <= start <= stop <= self.rows:
            raise ValueError(
                f"rows must satisfy 0 <= start <= stop <= {self.rows}, got {start} and"
                f" {stop}"
            )
        return self._sample(np.arange(start, stop))

    def _sample(self, index: np.ndarray):
        return _sample(self._planted, self.zipf, self.seed, index, self.hashed_keys)

    @cached_property
    def _planted(self) -> _Planted:
        random = np.random.default_rng(self.model_seed)
        n = len(self.vocabulary)
        sizes = np.array(self.vocabulary, np.float64)
        planted = _Planted(
            sizes=sizes,
            salts=random.integers(0, 2**64, n, np.uint64),
            effects=0.6 * random.uniform(0.7, 1.3, n) * (100 / sizes) ** 0.3,
            pairs=np.arange(n - n % 2).reshape(-1, 2)[:3],
            interaction=0.4,
            linear=random.normal(0, 0.6, self.n_dense),
            square=random.normal(0, 0.15, self.n_dense),
        )
        *_, logits = _sample(
            planted,
            self.zipf,
            _CALIBRATION_SEED,
            np.arange(_CALIBRATION_ROWS),
            False,
        )
        bias, scale = _calibrate(logits, self.click_rate, self.auc)
        return _Planted(**{**vars(planted), "bias": bias, "scale": scale})


def _sample(planted, zipf, seed, index, hashed_keys):
    """Draws labels [n], dense [n, n_dense], keys [n_categorical, n] and logits [n]."""
    rows = len(index)
    labels = np.empty(rows, np.float32)
    dense = np.empty((rows, len(planted.linear)), np.float32)
    keys = np.empty((len(planted.sizes), rows), np.uint64)
    logits = np.empty(rows, np.float64)
    _fill(
        labels,
        dense,
        keys,
        logits,
        planted.sizes,
        planted.salts,
        planted.effects,
        planted.pairs,
        planted.interaction,
        planted.linear,
        planted.square,
        planted.bias,
        planted.scale,
        zipf,
        np.uint64(seed),
        index,
        hashed_keys,
    )
    return labels, dense, keys, logits


@numba.njit(nogil=True, cache=True, inline="always")
def _mix(x):
    """SplitMix64: a bijection of 64 bits."""
    x += _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@numba.njit(nogil=True, cache=True, inline="always")
def _uniform(bits):
    """The upper 53 bits as a number in (0, 1)."""
    return (np.float64(bits >> np.uint64(11)) + 0.5) * 2.0**-53


@numba.njit(nogil=True, cache=True, inline="always")
def _lane(bits, lane):
    """One of four 16-bit lanes as a number of mean 0 and variance 1."""
    part = (bits >> np.uint64(16 * lane)) & np.uint64(0xFFFF)
    return (np.float64(part) - 32767.5) * (np.sqrt(12.0) / 65536)


@numba.njit(nogil=True, cache=True)
def _fill(
    labels,
    dense,
    keys,
    logits,
    sizes,
    salts,
    effects,
    pairs,
    interaction,
    linear,
    square,
    bias,
    scale,
    zipf,
    seed,
    index,
    hashed_keys,
):
    n_categorical = len(sizes)
    traits = np.empty(n_categorical, np.float64)
    exponent = 1.0 - zipf
    spans = (sizes + 1.0) ** exponent - 1.0
    stream = _mix(seed)
    for row in range(len(labels)):
        # The draws of a row are the SplitMix64 sequence that starts at its own state.
        state = _mix(stream ^ np.uint64(index[row]))
        logit = 0.0
        for f in range(n_categorical):
            state += _GOLDEN
            u = _uniform(_mix(state))
            # The inverse of the distribution function of a bounded power law.
            rank = int((u * spans[f] + 1.0) ** (1.0 / exponent)) - 1
            rank = min(max(rank, 0), int(sizes[f]) - 1)
            key = _mix(np.uint64(rank) ^ salts[f])
            keys[f, row] = key if hashed_keys else np.uint64(rank)
            bits = _mix(key)
            total = _lane(bits, 0) + _lane(bits, 1) + _lane(bits, 2) + _lane(bits, 3)
            traits[f] = 0.5 * total
            logit += effects[f] * traits[f]
        for p in range(len(pairs)):
            logit += interaction * traits[pairs[p, 0]] * traits[pairs[p, 1]]
        for j in range(len(linear)):
            state += _GOLDEN
            radius = np.sqrt(-2.0 * np.log(_uniform(_mix(state))))
            state += _GOLDEN
            x = radius * np.cos(2.0 * np.pi * _uniform(_mix(state)))
            dense[row, j] = x
            logit += linear[j] * x + square[j] * (x * x - 1.0)
        logit = bias + scale * logit
        logits[row] = logit
        state += _GOLDEN
        labels[row] = _uniform(_mix(state)) < 1.0 / (1.0 + np.exp(-logit))


def _calibrate(logits, click_rate, auc):
    """Finds the bias and scale that give the click rate and the expected AUC."""
    low, high = 0.01, 100.0
    for _ in range(20):
        scale = np.sqrt(low * high)
        bias = _bias_for(logits * scale, click_rate)
        if _expected_auc(logits * scale + bias) < auc:
            low = scale
        else:
            high = scale
    return float(bias), float(scale)


def _bias_for(logits, click_rate):
    low, high = -500.0, 500.0
    for _ in range(25):
        bias = (low + high) / 2
        if _sigmoid(logits + bias).mean() < click_rate:
            low = bias
        else:
            high = bias
    return bias


def _sigmoid(x):
    return 0.5 * (1 + np.tanh(0.5 * x))


def _expected_auc(logits):
    """The AUC of the true probabilities, in expectation over the labels."""
    p = np.sort(_sigmoid(logits))
    negatives_below = np.cumsum(1 - p) - (1 - p)
    return (p * (negatives_below + 0.5 * (1 - p))).sum() / (p.sum() * (1 - p).sum())


def _auc(labels, scores):
    """The AUC of scores for boolean labels; ties count one half."""
    positives = int(labels.sum())
    negatives = len(labels) - positives
    if not positives or not negatives:
        return float("nan")
    values, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    total = ranks[inverse][labels].sum()
    return float((total - positives * (positives + 1) / 2) / (positives * negatives))
