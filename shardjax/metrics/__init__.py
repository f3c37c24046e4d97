"""Metrics: mergeable pytrees, updated inside the jitted step, read on the host.

A fresh instance is the empty metric. `update` adds a batch (pure, jit-able), `merge`
joins what two devices or processes have seen, `compute` gives the number::

    metric = AUC()
    metric = metric.update(labels=labels, predictions=predictions, weights=weights)
    metric.compute()

`labels`, `predictions` (probabilities) and `weights` are float32 [batch]. A row of
weight 0 is padding: it contributes nothing, whatever stands in its other columns. An
empty metric computes to nan. To write your own, subclass `Metric`: docs/metrics.md.
"""

from shardjax.metrics.auc import AUC as AUC, GAUC as GAUC
from shardjax.metrics.averages import (
    MAE as MAE,
    RMSE as RMSE,
    Accuracy as Accuracy,
    Calibration as Calibration,
    Mean as Mean,
    Sum as Sum,
    WeightedMean as WeightedMean,
)
from shardjax.metrics.log_loss import (
    LogLoss as LogLoss,
    NormalizedEntropy as NormalizedEntropy,
)
from shardjax.metrics.metric import (
    Metric as Metric,
    check_columns as check_columns,
    merge_stacked as merge_stacked,
    ratio as ratio,
    static as static,
)
from shardjax.metrics.total import Total as Total
