"""What a user says about tables and features: frozen, hashable, checked when made."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardjax.embed.optimizers import rowwise_adagrad
from shardjax.embed.policies import (
    Admission,
    Always,
    Eviction,
    Never,
    ShowClick,
    check_integer,
    check_policies,
)
from shardjax.embed.storage import Storage

Placement = Literal["row_wise", "table_wise", "data_parallel"]
Combiner = Literal["sum", "mean", "sqrtn", "none"]
Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]


def uniform(scale: float = 0.01) -> Initializer:
    """An initializer: uniform in [-scale, scale).

    Example:
      >>> bool(jnp.all(jnp.abs(uniform(0.5)(jax.random.key(0), (4,), jnp.float32)) <= 0.5))
      True
    """
    if not scale >= 0:
        raise ValueError(f"`scale` must not be negative, got {scale}")

    def init(key, shape, dtype):
        return jax.random.uniform(key, shape, dtype, -scale, scale)

    return init


def zeros() -> Initializer:
    """An initializer: all zero."""

    def init(key, shape, dtype):
        return jnp.zeros(shape, dtype)

    return init


def _choice(owner: str, name: str, value: str, kind) -> None:
    if value not in get_args(kind):
        choices = ", ".join(repr(c) for c in get_args(kind))
        raise ValueError(f"`{name}` of {owner} must be one of {choices}, got {value!r}")


def _default_optimizer() -> optax.GradientTransformation:
    return _DEFAULT_OPTIMIZER


_DEFAULT_OPTIMIZER = rowwise_adagrad(0.05)


@dataclass(frozen=True)
class TableSpec:
    """An embedding table: rows of `dim` numbers, one per key.

    A *dynamic* table (no `vocabulary`) takes any 64-bit key and gives it a row when
    training first meets it, up to `capacity` rows. A table with a *fixed* `vocabulary`
    takes ids in [0, vocabulary).

    Tables of one (dim, dtype, optimizer object) and kind of placement share one slab of
    device memory, one gather, one exchange and one update: pass the same optimizer
    object to all tables that may share.

    Attributes:
      name: unique within a collection; also part of each row's initial value.
      dim: numbers per row.
      optimizer: any optax transformation that works row by row (see
        `shardjax.embed.rowwise_adagrad`, `optax.adam`, ...).
      capacity: rows a dynamic table may have, None for no bound but memory.
      vocabulary: number of ids of a fixed table, None for a dynamic one.
      placement: `row_wise` spreads rows over all devices by a hash of the key,
        `table_wise` puts the whole table on one device, `data_parallel` keeps a copy on
        every device (for small tables).
      initializer: `f(key, (dim,), dtype)`, called per row with a PRNG key that depends
        on (seed, table name, row key) alone; `jax.nn.initializers` that need no fan
        work as they are.
      dtype: of the rows.
      on_full: a key that meets a full table is an error, or with "reject" reads zeros
        and trains nothing (counted as `rejected`).
      admit: which keys get a row: `Always()`, `MinCount(n)` or `Probability(p)`.
      evict: which rows leave for good: `Never()`, `TTL(steps)`, `LRU(rows)`, `LFU(rows)`,
        `ShowClick(...)`, or a tuple of them, applied in its order.
      storage: where the rows lie: None for what the collection says, "device" for all on
        the devices, or a `Storage` of the table's own. Tables that share a storage share
        its budgets; `device_rows` is per slab.
      on_evict: called with each part of the rows that leave, `f(table name, keys, uint64
        [n], rows, [n, dim], row_state, a list of [n, ...])`, before the step at which
        they are gone. If it raises an error the step is not made, and nothing has changed:
        all rows that leave before that step are still there. They are given again, from
        the first, when that batch or a later one is stepped on, so it may get a row twice.

    Example:
      >>> TableSpec("item", dim=16, capacity=1_000_000).placement
      'row_wise'
    """

    name: str
    dim: int
    optimizer: optax.GradientTransformation = field(default_factory=_default_optimizer)
    capacity: int | None = None
    vocabulary: int | None = None
    placement: Placement = "row_wise"
    initializer: Initializer = uniform(0.01)
    dtype: Any = np.float32
    on_full: Literal["error", "reject"] = "error"
    admit: Admission = Always()
    evict: Eviction | tuple[Eviction, ...] = Never()
    storage: Storage | Literal["device"] | None = None
    on_evict: Callable[[str, np.ndarray, np.ndarray, list[np.ndarray]], None] | None = (
        None
    )

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(
                f"`name` of a table must be a non-empty text, got {self.name!r}"
            )
        owner = f"table {self.name!r}"
        check_integer(f"`dim` of {owner}", self.dim, 1)
        if self.capacity is not None:
            check_integer(f"`capacity` of {owner}", self.capacity, 1)
        if self.vocabulary is not None:
            check_integer(f"`vocabulary` of {owner}", self.vocabulary, 1)
            if self.capacity is not None:
                raise ValueError(
                    f"{owner} must not have both `capacity` ({self.capacity}) and"
                    f" `vocabulary` ({self.vocabulary}): a fixed vocabulary is its capacity"
                )
        _choice(owner, "placement", self.placement, Placement)
        _choice(owner, "on_full", self.on_full, Literal["error", "reject"])
        dtype = jnp.dtype(self.dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"`dtype` of {owner} must be a float type, got {dtype}")
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise ValueError(
                f"`dtype` of {owner} must be enabled in JAX, got {dtype}. Use float32, or"
                " set the flag jax_enable_x64"
            )
        object.__setattr__(self, "dtype", dtype)
        if not callable(self.initializer):
            raise TypeError(
                f"`initializer` of {owner} must be a function of (key, shape, dtype), got"
                f" {self.initializer!r}"
            )
        if not isinstance(self.optimizer, optax.GradientTransformation):
            raise TypeError(
                f"`optimizer` of {owner} must be an optax.GradientTransformation, got"
                f" {self.optimizer!r}"
            )
        check_policies(owner, self.admit, self.evict)
        if not isinstance(self.storage, Storage | None) and self.storage != "device":
            raise TypeError(
                f"`storage` of {owner} must be a Storage, 'device' or None, got"
                f" {self.storage!r}"
            )
        if isinstance(self.storage, Storage) and self.placement == "data_parallel":
            raise ValueError(
                f"`storage` of {owner} must be None or 'device': with placement"
                " 'data_parallel' all rows lie on every device"
            )
        if self.on_evict is not None and not callable(self.on_evict):
            raise TypeError(
                f"`on_evict` of {owner} must be a function of (table, keys, rows,"
                f" row_state), got {self.on_evict!r}"
            )
        if self.on_evict is not None and not self.evictions:
            raise ValueError(
                f"`on_evict` of {owner} is never called: no row leaves. Give it an `evict`"
            )

    @property
    def evictions(self) -> tuple[Eviction, ...]:
        """The policies of `evict`, none for `Never()`."""
        return check_policies(f"table {self.name!r}", self.admit, self.evict)

    @property
    def show_click(self) -> ShowClick | None:
        """The ShowClick policy among them."""
        own = [x for x in self.evictions if isinstance(x, ShowClick)]
        return own[0] if own else None

    @property
    def max_rows(self) -> int:
        """Rows the table may come to have."""
        return self.capacity or self.vocabulary or 2**31 - 2


@dataclass(frozen=True)
class FeatureSpec:
    """How one feature of the batch reads a table. Several may share a table.

    Attributes:
      table: where its rows are.
      combiner: how the rows of a bag become one vector: `sum`; `mean` (divided by the
        sum of weights); `sqrtn` (divided by the root of the sum of squared weights);
        or `none`, which keeps them as a padded sequence with a mask. An empty bag, and
        a bag whose divisor is zero, gives zeros.
      max_length: longest sequence of combiner `none`; None takes the longest seen,
        rounded up.
      on_long: a sequence longer than `max_length` is an error, or its "first" or "last"
        `max_length` keys are kept and the others counted as `truncated`.
      padding_id: a key that means "nothing": reads no row, counts in no mean.
      on_bad_id: an id outside a fixed vocabulary is an error, or with "zero" reads a zero
        vector, or with "drop" is as if it were not there; counted as `bad_ids`.

    Example:
      >>> FeatureSpec(TableSpec("item", dim=16), combiner="mean").table.name
      'item'
    """

    table: TableSpec
    combiner: Combiner = "sum"
    max_length: int | None = None
    on_long: Literal["error", "first", "last"] = "error"
    padding_id: int | None = None
    on_bad_id: Literal["error", "zero", "drop"] = "error"

    def __post_init__(self):
        if not isinstance(self.table, TableSpec):
            raise TypeError(
                f"`table` of a feature must be a TableSpec, got {self.table!r}"
            )
        owner = f"a feature of table {self.table.name!r}"
        _choice(owner, "combiner", self.combiner, Combiner)
        _choice(owner, "on_long", self.on_long, Literal["error", "first", "last"])
        _choice(owner, "on_bad_id", self.on_bad_id, Literal["error", "zero", "drop"])
        if self.max_length is not None:
            check_integer(f"`max_length` of {owner}", self.max_length, 1)
            if self.combiner != "none":
                raise ValueError(
                    f"`max_length` of {owner} is for combiner 'none', got combiner"
                    f" {self.combiner!r}: a bag may have any number of keys"
                )
        if self.on_long != "error" and self.max_length is None:
            raise ValueError(f"`on_long` of {owner} needs a `max_length`")
        if self.padding_id is not None and not -(2**63) <= self.padding_id < 2**64:
            raise ValueError(
                f"`padding_id` of {owner} must fit 64 bits, got {self.padding_id}"
            )
