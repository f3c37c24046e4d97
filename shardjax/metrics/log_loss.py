"""Log loss and normalized entropy."""

import jax
import jax.numpy as jnp
import numpy as np

from shardjax.metrics.metric import Metric, check_columns, ratio
from shardjax.metrics.total import Total

# As scikit-learn clips float32 probabilities.
_EPS = float(np.finfo(np.float32).eps)


class LogLoss(Metric):
    """Weighted mean of the log loss, in nats; nan when empty.

    From the extra `logits` if `update` gets it, which is exact for any logit; else from
    the predictions, clipped to [eps, 1 - eps] with eps = 2**-23, as scikit-learn does
    for float32. Labels may be anything in [0, 1].

    Attributes:
      loss: weighted sum of the losses.
      weight: sum of the weights.
      outside: number of rows with a label or prediction outside [0, 1].

    Example:
      >>> y, p = jnp.array([1.0, 0.0]), jnp.array([0.5, 0.5])
      >>> round(LogLoss().update(labels=y, predictions=p, weights=p).compute(), 6)
      0.693147
    """

    loss: Total = Total()
    weight: Total = Total()
    outside: Total = Total()

    def update(self, *, labels, predictions, weights, **extras):
        losses = _log_losses(labels, predictions, weights, extras.get("logits"))
        outside = count_outside(labels, predictions, weights)
        return self.replace(
            loss=self.loss.add(losses, weights),
            weight=self.weight.add(weights),
            outside=self.outside.plus(outside),
        )

    def compute(self) -> float:
        """Reads the log loss.

        Returns:
          Nats per unit of weight.

        Raises:
          ValueError: if labels or predictions were outside [0, 1].

        Example:
          >>> LogLoss().compute()
          nan
        """
        check_inside(self, self.outside)
        return ratio(self.loss.value(), self.weight.value())


class NormalizedEntropy(Metric):
    """Log loss over the entropy of the labels' mean: 1 is what the mean alone gives.

    Lower is better. nan when empty or when all labels are of one class, where it is not
    defined. (He et al., Practical Lessons from Predicting Clicks on Ads at Facebook,
    2014, eq. 3.)

    Attributes:
      loss: weighted sum of the log losses, as in `LogLoss`.
      positives: weighted sum of the labels.
      weight: sum of the weights.
      outside: number of rows with a label or prediction outside [0, 1].

    Example:
      >>> y, p = jnp.array([1.0, 0.0]), jnp.array([0.5, 0.5])
      >>> ne = NormalizedEntropy().update(labels=y, predictions=p, weights=p)
      >>> round(ne.compute(), 6)
      1.0
    """

    loss: Total = Total()
    positives: Total = Total()
    weight: Total = Total()
    outside: Total = Total()

    def update(self, *, labels, predictions, weights, **extras):
        losses = _log_losses(labels, predictions, weights, extras.get("logits"))
        outside = count_outside(labels, predictions, weights)
        return self.replace(
            loss=self.loss.add(losses, weights),
            positives=self.positives.add(labels, weights),
            weight=self.weight.add(weights),
            outside=self.outside.plus(outside),
        )

    def compute(self) -> float:
        """Reads the normalized entropy.

        Returns:
          The ratio, without unit.

        Raises:
          ValueError: if labels or predictions were outside [0, 1].

        Example:
          >>> NormalizedEntropy().compute()
          nan
        """
        check_inside(self, self.outside)
        weight = self.weight.value()
        rate = ratio(self.positives.value(), weight)
        if not 0 < rate < 1:
            return float("nan")
        entropy = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))
        return ratio(self.loss.value(), weight * entropy)


def count_outside(labels, predictions, weights) -> jax.Array:
    """Counts the real rows whose label or prediction is not in [0, 1].

    Args:
      labels: float32 [batch].
      predictions: float32 [batch].
      weights: float32 [batch]; rows of weight 0 are not looked at.

    Returns:
      float32 scalar; nan if one of them is nan, so that the metric becomes nan.

    Example:
      >>> float(count_outside(jnp.array([0.0, -1]), jnp.ones(2), jnp.ones(2)))
      1.0
    """
    low, high = jnp.minimum(labels, predictions), jnp.maximum(labels, predictions)
    bad = jnp.where((low < 0) | (high > 1), 1.0, 0.0)
    bad = jnp.where(jnp.isnan(low), jnp.nan, bad)
    return jnp.sum(jnp.where(jnp.asarray(weights) != 0, bad, 0.0))


def check_inside(metric: Metric, outside: Total) -> None:
    """Refuses to compute a metric of probabilities that were none.

    Args:
      metric: the metric, for the error.
      outside: how many rows were outside [0, 1].

    Raises:
      ValueError: if there were any.

    Example:
      >>> check_inside(LogLoss(), Total())
    """
    count = outside.value()
    if count > 0:
        raise ValueError(
            f"{metric} needs labels and predictions in [0, 1], got {int(count)} rows"
            " outside. Give probabilities (the sigmoid of the logits), labels 0 or 1."
        )


def _log_losses(labels, predictions, weights, logits) -> jax.Array:
    check_columns(labels=labels, predictions=predictions, weights=weights)
    if logits is None:
        p = jnp.clip(jnp.asarray(predictions, jnp.float32), _EPS, 1 - _EPS)
        return -(labels * jnp.log(p) + (1 - labels) * jnp.log1p(-p))
    check_columns(labels=labels, logits=logits)
    z = jnp.asarray(logits, jnp.float32)
    return jnp.maximum(z, 0) - z * labels + jnp.log1p(jnp.exp(-jnp.abs(z)))
