"""The base class of all metrics, and what is needed to write one."""

import abc
import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import Any, Self, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from shardjax.sharded import fetch

_STATIC = "static"
_PLAIN_TYPES = (str, int, float, bool)


def static(*, default: Any = dataclasses.MISSING) -> Any:
    """Declares a setting of a metric: a hashable value, not part of its state.

    Args:
      default: its default; without one the constructor asks for it.

    Returns:
      A dataclass field.

    Example:
      >>> class Above(Metric):
      ...     threshold: float = static(default=0.5)
      ...     def update(self, *, labels, predictions, weights, **extras):
      ...         return self
      ...     def compute(self):
      ...         return self.threshold
      >>> Above(threshold=0.9)
      Above(threshold=0.9)
    """
    return dataclasses.field(default=default, metadata={_STATIC: True})


@dataclass_transform(
    frozen_default=True, eq_default=False, field_specifiers=(dataclasses.field, static)
)
class Metric(abc.ABC):
    """A number over many batches, as a pytree: update, merge, compute.

    A subclass becomes a frozen dataclass and a pytree by subclassing; it needs no
    decorator. Its fields are either settings, made with `static`, or state: a `Total`,
    an array or another metric, whose default is the empty state. Defaults must not
    touch a device: `Total()`, `Total.zeros(shape)`, numpy arrays.

    Raises:
      TypeError: when a subclass is made with a field of type str, int, float or bool
        that is not `static`.

    Example:
      >>> from shardjax.metrics import Total
      >>> class Clicks(Metric):
      ...     clicks: Total = Total()
      ...     def update(self, *, labels, predictions, weights, **extras):
      ...         return self.replace(clicks=self.clicks.add(labels, weights))
      ...     def compute(self):
      ...         return float(self.clicks.value())
      >>> one = np.ones(3, np.float32)
      >>> Clicks().update(labels=one, predictions=one, weights=one).compute()
      3.0
    """

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        # In place: returns `cls` itself.
        dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
        names: dict[bool, list[str]] = {True: [], False: []}
        for f in dataclasses.fields(cls):  # type: ignore[arg-type]
            is_static = f.metadata.get(_STATIC, False)
            if not is_static and f.type in _PLAIN_TYPES + _PLAIN_NAMES:
                raise TypeError(
                    f"field `{f.name}` of metric {cls.__name__} is of type"
                    f" {getattr(f.type, '__name__', f.type)}, which cannot be state."
                    f" Declare a setting with `{f.name}: ... = static(default=...)`, a"
                    f" running sum with `{f.name}: Total = Total()`."
                )
            names[is_static].append(f.name)
        cls._settings, cls._state = tuple(names[True]), tuple(names[False])
        _register(cls)

    _settings = ()
    _state = ()

    @abc.abstractmethod
    def update(
        self, *, labels: Any, predictions: Any, weights: Any, **extras: Any
    ) -> Self:
        """Adds a batch. Pure, to be called under jit.

        Args:
          labels: float32 [batch].
          predictions: float32 [batch], probabilities.
          weights: float32 [batch]; 0 marks padding, which must contribute nothing.
          **extras: more columns: `logits` float32 [batch], `groups` int32 [batch],
            `loss`, ...; a metric takes what it needs.

        Returns:
          The metric with the batch added.
        """

    @abc.abstractmethod
    def compute(self) -> float:
        """Reads the metric on the host, in float64.

        Returns:
          The number; nan if it is not defined (nothing seen).
        """

    def merge(self, other: Self) -> Self:
        """Joins what two instances have seen. By default every state field is added.

        Args:
          other: a metric of the same class and settings.

        Returns:
          The metric of both; with the state on the host if both were there.

        Raises:
          TypeError: if `other` is of another class.
          ValueError: if its settings or the shapes of its state are others.

        Example:
          >>> from shardjax.metrics import AUC
          >>> AUC().merge(AUC()).compute()
          nan
        """
        if type(other) is not type(self):
            raise TypeError(
                f"metrics to merge must be of one class, got {type(self).__name__} and"
                f" {type(other).__name__}. Merge each with its own kind."
            )
        if any(getattr(self, n) != getattr(other, n) for n in self._settings):
            raise ValueError(
                f"metrics to merge must have the same settings, got {self} and {other}."
                " Make both with the same arguments."
            )
        state = {n: (getattr(self, n), getattr(other, n)) for n in self._state}
        return self.replace(**{n: _merge_state(n, *both) for n, both in state.items()})

    def replace(self, **changes: Any) -> Self:
        """Copies the metric with some fields changed.

        Args:
          **changes: new values by field name.

        Returns:
          A new metric.

        Example:
          >>> from shardjax.metrics import Accuracy
          >>> Accuracy().replace(threshold=0.9)
          Accuracy(threshold=0.9)
        """
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def __repr__(self) -> str:
        settings = ", ".join(f"{n}={getattr(self, n)!r}" for n in self._settings)
        return f"{type(self).__name__}({settings})"


# What annotations are in a module with `from __future__ import annotations`.
_PLAIN_NAMES = tuple(t.__name__ for t in _PLAIN_TYPES)

M = TypeVar("M", bound=Metric)


def merge_stacked(metric: M) -> M:
    """Merges the metrics of all devices, read from one with a leading device dim.

    Args:
      metric: a metric whose every state array is [devices, *shape], as a step over a
        mesh keeps it; on devices or on the host.

    Returns:
      The merged metric, its state on the host: [*shape].

    Raises:
      ValueError: if the arrays have no common leading dim.

    Example:
      >>> from shardjax.metrics import Sum
      >>> one = np.ones((2, 3), np.float32)  # two devices, three rows each
      >>> each = jax.vmap(lambda x: Sum("labels").update(
      ...     labels=x, predictions=x, weights=x))(one)
      >>> merge_stacked(each).compute()
      6.0
    """
    leaves, structure = jax.tree.flatten(fetch(metric))
    sizes = {x.shape[0] if np.ndim(x) else None for x in leaves}
    if len(sizes) != 1 or not (count := sizes.pop()):
        raise ValueError(
            f"every state array of {metric} must have the same leading device dim, got"
            f" shapes {sorted({np.shape(x) for x in leaves})}. Stack the state as"
            " [devices, ...] before the step, or use the metric as it is."
        )
    parts = [structure.unflatten([x[i] for x in leaves]) for i in range(count)]
    return functools.reduce(lambda a, b: a.merge(b), parts)


def check_columns(**columns: ArrayLike) -> None:
    """Checks that columns of a batch have one and the same shape, [batch].

    Without it [batch] and [batch, 1] would broadcast to [batch, batch] in silence.

    Args:
      **columns: arrays by name.

    Raises:
      ValueError: if a column has another shape.

    Example:
      >>> check_columns(labels=np.ones(3), weights=np.ones(3))
    """
    shapes = {name: jnp.shape(column) for name, column in columns.items()}
    if len(set(shapes.values())) > 1 or any(len(s) != 1 for s in shapes.values()):
        got = ", ".join(f"`{name}` {shape}" for name, shape in shapes.items())
        raise ValueError(
            f"the columns of a batch must all have the shape [batch], got {got}. Drop"
            " other dims, for example with `x[:, 0]`."
        )


def ratio(numerator: ArrayLike, denominator: ArrayLike) -> float:
    """Divides on the host as floats do, without a warning.

    Args:
      numerator: a number.
      denominator: a number.

    Returns:
      The quotient; nan for 0 / 0 and inf for x / 0.

    Example:
      >>> ratio(1, 4), ratio(0, 0)
      (0.25, nan)
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.divide(numerator, denominator, dtype=np.float64))


def pick_column(metric: Metric, name: str, extras: Mapping[str, Any]) -> Any:
    """Takes a column that a metric needs from what `update` was given.

    Args:
      metric: the metric, for the error.
      name: the column's name.
      extras: columns by name.

    Returns:
      The column.

    Raises:
      ValueError: if it is not there.

    Example:
      >>> from shardjax.metrics import Mean
      >>> pick_column(Mean("loss"), "loss", {"loss": 2.0})
      2.0
    """
    if name not in extras:
        raise ValueError(
            f"{metric} reads the column {name!r}, which `update` was not given; it got"
            f" {sorted(extras)}. Pass {name}=... to `update`."
        )
    return extras[name]


def _merge_state(name: str, mine: Any, other: Any) -> Any:
    if hasattr(mine, "merge"):
        return mine.merge(other)
    if np.shape(mine) != np.shape(other):
        raise ValueError(
            f"`{name}` of metrics to merge must have the same shape, got"
            f" {np.shape(mine)} and {np.shape(other)}. Make both with the same"
            " settings."
        )
    return operator.add(mine, other)


def _register(cls: type[Metric]) -> None:
    """Makes a pytree of a metric class: state fields are children, settings static."""

    names = cls._settings + cls._state

    def settings(metric):
        return tuple(getattr(metric, n) for n in cls._settings)

    def flatten(metric):
        return [getattr(metric, n) for n in cls._state], settings(metric)

    def flatten_with_keys(metric):
        keys = [jax.tree_util.GetAttrKey(n) for n in cls._state]
        return list(zip(keys, flatten(metric)[0], strict=True)), settings(metric)

    def unflatten(values, children):
        # Not through __init__: JAX also builds trees of placeholders, and what a
        # subclass checks in __post_init__ must not see them.
        metric = object.__new__(cls)
        for n, value in zip(names, (*values, *children), strict=True):
            object.__setattr__(metric, n, value)
        return metric

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
