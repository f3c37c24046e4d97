"""Sums and averages over rows: of a named column, and of simple errors."""

import math

import jax
import jax.numpy as jnp

from shardjax.metrics.metric import (
    Metric,
    check_columns,
    pick_column,
    ratio,
    static,
)
from shardjax.metrics.total import Total


class Sum(Metric):
    """Sum of a column over the rows whose weight is not 0; 0.0 when empty.

    A scalar instead of a column is added once per update (and per device).

    Attributes:
      name: the column: an extra of `update`, or labels, predictions, weights.
      total: the sum.

    Raises:
      TypeError: if `name` is not a string.

    Example:
      >>> x = jnp.array([1.0, 0.0, 1.0])
      >>> Sum("labels").update(labels=x, predictions=x, weights=x).compute()
      2.0
    """

    name: str = static()
    total: Total = Total()

    def __post_init__(self):
        _check_name(self)

    def update(self, *, labels, predictions, weights, **extras):
        columns = dict(extras, labels=labels, predictions=predictions, weights=weights)
        values = pick_column(self, self.name, columns)
        if jnp.ndim(values) == 0:
            return self.replace(total=self.total.add(jnp.reshape(values, 1)))
        check_columns(**{self.name: values, "weights": weights})
        return self.replace(total=self.total.add(values, _is_real(weights)))

    def compute(self) -> float:
        return float(self.total.value())


class Mean(Metric):
    """Mean of a column over the rows whose weight is not 0; nan when empty.

    A scalar instead of a column counts as the mean of the batch's rows.

    Attributes:
      name: the column: an extra of `update`, or labels, predictions, weights.
      total: sum of the column.
      rows: number of rows.

    Raises:
      TypeError: if `name` is not a string.

    Example:
      >>> x = jnp.array([1.0, 0.0, 1.0])
      >>> Mean("loss").update(labels=x, predictions=x, weights=x, loss=3 * x).compute()
      3.0
    """

    name: str = static()
    total: Total = Total()
    rows: Total = Total()

    def __post_init__(self):
        _check_name(self)

    def update(self, *, labels, predictions, weights, **extras):
        columns = dict(extras, labels=labels, predictions=predictions, weights=weights)
        real = _is_real(weights)
        values = _column_or_scalar(self, columns, weights)
        return self.replace(
            total=self.total.add(values, real), rows=self.rows.add(real)
        )

    def compute(self) -> float:
        return ratio(self.total.value(), self.rows.value())


class WeightedMean(Metric):
    """Mean of a column, each row counted with its weight; nan when empty.

    A scalar instead of a column counts as the mean of the batch's rows.

    Attributes:
      name: the column: an extra of `update`, or labels, predictions.
      total: weighted sum of the column.
      weight: sum of the weights.

    Raises:
      TypeError: if `name` is not a string.

    Example:
      >>> x = jnp.array([1.0, 2.0, 0.0])
      >>> WeightedMean("labels").update(labels=x, predictions=x, weights=x).compute()
      1.6666666666666667
    """

    name: str = static()
    total: Total = Total()
    weight: Total = Total()

    def __post_init__(self):
        _check_name(self)

    def update(self, *, labels, predictions, weights, **extras):
        columns = dict(extras, labels=labels, predictions=predictions, weights=weights)
        values = _column_or_scalar(self, columns, weights)
        return self.replace(
            total=self.total.add(values, weights), weight=self.weight.add(weights)
        )

    def compute(self) -> float:
        return ratio(self.total.value(), self.weight.value())


class Accuracy(Metric):
    """Weighted share of rows on the right side; nan when empty.

    A row is predicted positive if its prediction is >= `threshold`, and is positive if
    its label is >= 0.5. A nan prediction or label makes the result nan.

    Attributes:
      threshold: where predictions are cut, finite.
      correct: weight of the rows that are right.
      weight: sum of the weights.

    Raises:
      ValueError: if `threshold` is not finite.

    Example:
      >>> x, one = jnp.array([0.9, 0.2]), jnp.ones(2)
      >>> Accuracy().update(labels=one, predictions=x, weights=one).compute()
      0.5
    """

    threshold: float = static(default=0.5)
    correct: Total = Total()
    weight: Total = Total()

    def __post_init__(self):
        if not math.isfinite(self.threshold):
            raise ValueError(
                f"`threshold` of Accuracy must be finite, got {self.threshold}. Give a"
                " probability such as 0.5."
            )

    def update(self, *, labels, predictions, weights, **extras):
        check_columns(labels=labels, predictions=predictions, weights=weights)
        right = (predictions >= self.threshold) == (labels >= 0.5)
        # Comparisons with nan are False, which would count as a prediction.
        right = jnp.where(jnp.isnan(predictions) | jnp.isnan(labels), jnp.nan, right)
        return self.replace(
            correct=self.correct.add(right, weights), weight=self.weight.add(weights)
        )

    def compute(self) -> float:
        return ratio(self.correct.value(), self.weight.value())


class Calibration(Metric):
    """Calibration as COPC, clicks over predicted clicks: 1 is perfect.

    Weighted sum of labels / weighted sum of predictions. Above 1 the model predicts too
    little, below 1 too much. (TorchRec's calibration is the inverse.) nan when empty.

    Attributes:
      labels: weighted sum of the labels.
      predictions: weighted sum of the predictions.

    Example:
      >>> y, p = jnp.array([1.0, 0.0]), jnp.array([0.5, 0.3])
      >>> copc = Calibration().update(labels=y, predictions=p, weights=p / p)
      >>> round(copc.compute(), 6)
      1.25
    """

    labels: Total = Total()
    predictions: Total = Total()

    def update(self, *, labels, predictions, weights, **extras):
        check_columns(labels=labels, predictions=predictions, weights=weights)
        return self.replace(
            labels=self.labels.add(labels, weights),
            predictions=self.predictions.add(predictions, weights),
        )

    def compute(self) -> float:
        return ratio(self.labels.value(), self.predictions.value())


class MAE(Metric):
    """Weighted mean of |prediction - label|; nan when empty.

    Attributes:
      error: weighted sum of the absolute errors.
      weight: sum of the weights.

    Example:
      >>> y, p = jnp.array([1.0, 0.0]), jnp.array([0.5, 0.25])
      >>> MAE().update(labels=y, predictions=p, weights=p / p).compute()
      0.375
    """

    error: Total = Total()
    weight: Total = Total()

    def update(self, *, labels, predictions, weights, **extras):
        check_columns(labels=labels, predictions=predictions, weights=weights)
        return self.replace(
            error=self.error.add(jnp.abs(predictions - labels), weights),
            weight=self.weight.add(weights),
        )

    def compute(self) -> float:
        return ratio(self.error.value(), self.weight.value())


class RMSE(Metric):
    """Root of the weighted mean of (prediction - label)**2; nan when empty.

    Attributes:
      error: weighted sum of the squared errors.
      weight: sum of the weights.

    Example:
      >>> y, p = jnp.array([1.0, 0.0]), jnp.array([0.5, 0.5])
      >>> RMSE().update(labels=y, predictions=p, weights=p / p).compute()
      0.5
    """

    error: Total = Total()
    weight: Total = Total()

    def update(self, *, labels, predictions, weights, **extras):
        check_columns(labels=labels, predictions=predictions, weights=weights)
        return self.replace(
            error=self.error.add(jnp.square(predictions - labels), weights),
            weight=self.weight.add(weights),
        )

    def compute(self) -> float:
        return math.sqrt(ratio(self.error.value(), self.weight.value()))


def _check_name(metric: Sum | Mean | WeightedMean) -> None:
    if not isinstance(metric.name, str):
        raise TypeError(
            f"{type(metric).__name__} needs the name of a column, a string, got"
            f" {type(metric.name).__name__}. Write for example"
            f' {type(metric).__name__}("loss").'
        )


def _is_real(weights) -> jax.Array:
    """float32 [batch]: 1 for real rows, 0 for padding."""
    return (jnp.asarray(weights) != 0).astype(jnp.float32)


def _column_or_scalar(metric: Mean | WeightedMean, columns, weights):
    values = pick_column(metric, metric.name, columns)
    if jnp.ndim(values) == 0:
        return jnp.broadcast_to(values, jnp.shape(weights))
    check_columns(**{metric.name: values, "weights": weights})
    return values
