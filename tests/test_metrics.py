import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sklearn import metrics as sklearn_metrics

from shardjax.mesh import make_mesh
from shardjax.metrics import (
    AUC,
    GAUC,
    MAE,
    RMSE,
    Accuracy,
    Calibration,
    LogLoss,
    Mean,
    Metric,
    NormalizedEntropy,
    Sum,
    Total,
    WeightedMean,
    check_columns,
    merge_stacked,
    ratio,
    static,
)
from shardjax.metrics.auc import _NARROW, _WIDE, _bins_of
from shardjax.metrics.total import Array
from tests.helpers import run_python

pytestmark = pytest.mark.usefixtures("optimized")

ROWS = 4096
GROUPS = 12
ALL = {
    "sum": Sum("loss"),
    "mean": Mean("loss"),
    "weighted_mean": WeightedMean("loss"),
    "accuracy": Accuracy(threshold=0.2),
    "logloss": LogLoss(),
    "ne": NormalizedEntropy(),
    "auc": AUC(),
    "calibration": Calibration(),
    "mae": MAE(),
    "rmse": RMSE(),
    "gauc": GAUC(groups=GROUPS, bins=1024),
}


@functools.cache
def columns(rows=ROWS, seed=0):
    """A batch of a skewed, calibrated model, with example weights."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(-2, 1.5, rows).astype(np.float32)
    predictions = (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32)
    return {
        "labels": (rng.random(rows) < predictions).astype(np.float32),
        "predictions": predictions,
        "weights": rng.integers(1, 4, rows).astype(np.float32),
        "logits": logits,
        "loss": rng.gamma(0.5, size=rows).astype(np.float32),
        "groups": rng.integers(0, GROUPS, rows).astype(np.int32),
    }


def split(batch, parts):
    pieces = {k: np.array_split(v, parts) for k, v in batch.items()}
    return [{k: v[i] for k, v in pieces.items()} for i in range(parts)]


@jax.jit
def update(metrics, batch):
    return {name: metric.update(**batch) for name, metric in metrics.items()}


@jax.jit
def update_one(metric, batch):
    return metric.update(**batch)


def compute(metrics):
    return {name: metric.compute() for name, metric in metrics.items()}


def expected(batch):
    """The metrics of `ALL` from scikit-learn and float64."""
    y, p, w, loss = (
        batch[k].astype(np.float64)
        for k in ("labels", "predictions", "weights", "loss")
    )
    logloss = sklearn_metrics.log_loss(y, p, sample_weight=w)
    rate = np.average(y, weights=w)
    entropy = -rate * np.log(rate) - (1 - rate) * np.log(1 - rate)
    per_group = []
    for g in range(GROUPS):
        at = batch["groups"] == g
        if 0 < y[at].sum() < at.sum():
            auc = sklearn_metrics.roc_auc_score(y[at], p[at], sample_weight=w[at])
            per_group.append((w[at].sum(), auc))
    size, auc = np.array(per_group).T
    return {
        "sum": loss.sum(),
        "mean": loss.mean(),
        "weighted_mean": np.average(loss, weights=w),
        "accuracy": sklearn_metrics.accuracy_score(y, p >= 0.2, sample_weight=w),
        "logloss": logloss,
        "ne": logloss / entropy,
        "auc": sklearn_metrics.roc_auc_score(y, p, sample_weight=w),
        "calibration": (w * y).sum() / (w * p).sum(),
        "mae": sklearn_metrics.mean_absolute_error(y, p, sample_weight=w),
        "rmse": sklearn_metrics.root_mean_squared_error(y, p, sample_weight=w),
        "gauc": np.average(auc, weights=size),
    }


TOLERANCE = {"auc": 2e-5, "gauc": 1e-3}


def assert_close(got, want, rel=3e-7):
    for name in want:
        allowed = TOLERANCE.get(name, rel)
        assert got[name] == pytest.approx(want[name], rel=allowed), name


# --- the numbers ----------------------------------------------------------------------


def test_every_metric_equals_its_definition():
    batch = columns()
    assert_close(compute(update(ALL, batch)), expected(batch))


def test_one_batch_equals_many_small_ones():
    batch = columns()
    metrics = ALL
    for part in split(batch, 16):
        metrics = update(metrics, part)
    assert_close(compute(metrics), compute(update(ALL, batch)), rel=1e-12)


@pytest.mark.parametrize("shape", ["8x1", "4x2"])
def test_states_per_device_merge_to_the_whole(shape):
    mesh = make_mesh(shape)
    devices = mesh.devices.size
    stacked = jax.tree.map(lambda x: np.stack([np.asarray(x)] * devices), ALL)
    spec = P(("data", "model"))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    def step(stacked, batch):
        local = jax.tree.map(lambda x: x[0], stacked)
        local = {name: metric.update(**batch) for name, metric in local.items()}
        return jax.tree.map(lambda x: x[None], local)

    batch = columns(2 * 8 * 2048)
    for part in split(batch, 2):
        stacked = step(stacked, part)
    merged = {name: merge_stacked(metric) for name, metric in stacked.items()}
    assert_close(compute(merged), compute(update(ALL, batch)), rel=1e-12)
    assert all(
        isinstance(x, np.ndarray | np.generic) and x.dtype == np.float32
        for x in jax.tree.leaves(merged)
    )


def test_padding_contributes_nothing_whatever_it_holds():
    batch = columns()
    padded = {k: v.copy() for k, v in batch.items()}
    for name, column in padded.items():
        column[-24:] = -7 if name == "groups" else np.nan
    padded["weights"][-24:] = 0
    got = compute(update(ALL, padded))
    want = compute(update(ALL, {k: v[:-24] for k, v in batch.items()}))
    assert_close(got, want, rel=1e-12)


def test_a_batch_of_padding_and_an_empty_batch_change_nothing():
    metrics = update(ALL, columns())
    padded = update(metrics, {k: np.zeros_like(v) for k, v in columns().items()})
    assert compute(padded) == compute(metrics)
    unchanged = update(metrics, {k: v[:0] for k, v in columns().items()})
    assert compute(unchanged) == compute(metrics)


@pytest.mark.parametrize("name", ALL)
def test_the_empty_metric_computes_to_nan(name):
    want = 0.0 if name == "sum" else math.nan
    assert ALL[name].compute() == pytest.approx(want, nan_ok=True)
    assert ALL[name].merge(ALL[name]).compute() == pytest.approx(want, nan_ok=True)


def test_nan_in_a_real_row_makes_every_metric_nan():
    batch = {k: v.copy() for k, v in columns().items()}
    for column in ("predictions", "logits", "loss"):
        batch[column][5] = np.nan
    bad, good = jax.device_get((update(ALL, batch), update(ALL, columns())))
    for name in ALL:
        assert math.isnan(bad[name].compute()), name
        assert math.isnan(bad[name].merge(good[name]).compute()), name


def test_log_loss_from_logits_is_exact_where_predictions_saturate():
    logits = np.array([-60.0, 60.0, 30.0], np.float32)
    labels = np.array([1.0, 1.0, 0.0], np.float32)
    p = np.array([0.0, 1.0, 1.0], np.float32)
    one = np.ones(3, np.float32)
    got = LogLoss().update(labels=labels, predictions=p, weights=one, logits=logits)
    assert got.compute() == pytest.approx(30.0, rel=1e-6)
    clipped = LogLoss().update(labels=labels, predictions=p, weights=one).compute()
    assert clipped == pytest.approx(sklearn_metrics.log_loss(labels, p), rel=1e-5)


def test_normalized_entropy_of_the_mean_is_one_and_of_one_class_nan():
    labels = columns()["labels"]
    p = np.full_like(labels, labels.mean())
    got = NormalizedEntropy().update(labels=labels, predictions=p, weights=p)
    assert got.compute() == pytest.approx(1.0, rel=1e-6)
    one = np.ones_like(p)
    got = NormalizedEntropy().update(labels=one, predictions=p, weights=p)
    assert math.isnan(got.compute())


def test_calibration_above_one_means_predicting_too_little():
    y, p = np.array([1, 1, 0, 0], np.float32), np.full(4, 0.25, np.float32)
    metric = Calibration().update(labels=y, predictions=p, weights=np.ones_like(y))
    assert metric.compute() == 2.0
    zero = np.zeros_like(p)
    metric = Calibration().update(labels=y, predictions=zero, weights=np.ones_like(y))
    assert metric.compute() == math.inf


def test_sum_and_mean_of_a_scalar():
    batch = {k: v for k, v in columns(10).items() if k != "loss"}
    batch["weights"] = np.array([2.0] * 7 + [0.0] * 3, np.float32)
    metrics = {"sum": Sum("x"), "mean": Mean("x"), "weighted": WeightedMean("x")}
    metrics = update(metrics, {**batch, "x": np.float32(3.0)})
    batch["weights"] = np.ones(10, np.float32)
    metrics = update(metrics, {**batch, "x": np.float32(5.0)})
    got = compute(metrics)
    assert got["sum"] == 8.0
    assert got["mean"] == pytest.approx((7 * 3 + 10 * 5) / 17)
    assert got["weighted"] == pytest.approx((14 * 3 + 10 * 5) / 24)


def test_sum_reads_the_standard_columns_too():
    batch = columns()
    for name in ("labels", "predictions", "weights"):
        got = Sum(name).update(**batch).compute()
        assert got == pytest.approx(batch[name].sum(dtype=np.float64), rel=1e-12)


# --- precision ------------------------------------------------------------------------


def test_twenty_million_rows_count_exactly():
    rows = 1001  # odd, so that a float32 counter rounds at each step
    steps = 20_000
    one = np.ones(rows, np.float32)
    batch = dict(labels=one, predictions=one / 2, weights=one, loss=one)
    metrics = {"sum": Sum("weights"), "auc": AUC(bins=1024), "accuracy": Accuracy()}

    @jax.jit
    def run(metrics, naive):
        def step(carry, _):
            metrics, naive = carry
            return (update(metrics, batch), naive + batch["weights"].sum()), None

        return jax.lax.scan(step, (metrics, naive), length=steps)[0]

    metrics, naive = run(metrics, np.float32(0))
    assert float(naive) != rows * steps
    assert metrics["sum"].compute() == rows * steps
    assert metrics["auc"].positives.value().sum() == rows * steps
    assert metrics["accuracy"].weight.value() == rows * steps
    assert metrics["accuracy"].compute() == 1.0


@pytest.mark.parametrize("start", [2**25, 2**31, 2**40])
def test_rows_added_to_a_large_state_are_not_lost(start):
    metric = Sum("weights").replace(total=Total(np.float32(start), np.float32(0)))
    one = np.ones(1, np.float32)
    step = jax.jit(lambda m: m.update(labels=one, predictions=one, weights=one))
    for _ in range(100):
        metric = step(metric)
    assert float(metric.total.hi) + 0.0 <= start + 128
    assert metric.compute() == start + 100


@pytest.mark.parametrize("rows", [1, 3, 1023, 1024, 1025, 50_000])
def test_total_sums_a_batch_to_float64_precision(rows):
    rng = np.random.default_rng(rows)
    values = rng.lognormal(0, 4, rows).astype(np.float32)
    values *= rng.choice([-1, 1], rows).astype(np.float32)
    got = jax.jit(lambda v: Total().add(v))(values).value()
    want = math.fsum(values.astype(np.float64))
    assert abs(got - want) <= 1e-12 * np.abs(values).sum(dtype=np.float64)


def test_total_merges_on_the_host_as_on_the_device():
    rng = np.random.default_rng(0)
    a, b = (
        jax.device_get(Total().add(rng.gamma(1, size=999).astype(np.float32)))
        for _ in range(2)
    )
    host, device = a.merge(b), jax.jit(Total.merge)(a, b)
    assert isinstance(host.hi, np.generic | np.ndarray)
    assert (host.hi, host.lo) == (float(device.hi), float(device.lo))


def test_infinite_values_make_a_total_nan():
    assert math.isnan(Total().add(np.array([1.0, np.inf])).value())


# --- AUC ------------------------------------------------------------------------------


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _calibrated(p, rng):
    return p, rng.random(len(p)) < p


def _separated(rng, rows):
    y = rng.random(rows) < 0.3
    return _sigmoid(rng.normal(np.where(y, 6, -6), 3)), y


DISTRIBUTIONS = {
    "beta(1, 30), mean 0.03": lambda rng, n: _calibrated(rng.beta(1, 30, n), rng),
    "beta(0.5, 60), mean 0.008": lambda rng, n: _calibrated(rng.beta(0.5, 60, n), rng),
    "logits N(-4.6, 1)": lambda rng, n: _calibrated(
        _sigmoid(rng.normal(-4.6, 1, n)), rng
    ),
    "logits N(-4.6, 0.1)": lambda rng, n: _calibrated(
        _sigmoid(rng.normal(-4.6, 0.1, n)), rng
    ),
    "logits N(0, 2)": lambda rng, n: _calibrated(_sigmoid(rng.normal(0, 2, n)), rng),
    "uniform": lambda rng, n: _calibrated(rng.random(n), rng),
    "near 1": lambda rng, n: _calibrated(1 - rng.beta(1, 300, n), rng),
    "near separable, p at 0 and 1": _separated,
    "no signal": lambda rng, n: (rng.beta(1, 30, n), rng.random(n) < 0.03),
    "100 distinct values": lambda rng, n: _calibrated(
        rng.choice(rng.beta(1, 20, 100), n), rng
    ),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_auc_is_within_1e_4_of_scikit_learn(name):
    p, y = DISTRIBUTIONS[name](np.random.default_rng(7), 400_000)
    p, y = p.astype(np.float32), y.astype(np.float32)
    metric = update_one(AUC(), dict(labels=y, predictions=p, weights=np.ones_like(p)))
    want = sklearn_metrics.roc_auc_score(y, p)
    error = abs(metric.compute() - want)
    print(f"| {name} | {want:.4f} | {error:.1e} | {metric.error_bound():.1e} |")
    assert error < 1e-4
    assert error <= metric.error_bound() + 1e-12


def test_auc_error_bound_holds_with_few_bins_and_weights():
    batch = columns()
    want = expected(batch)["auc"]
    for bins in (1024, 4096):
        metric = update_one(AUC(bins=bins), batch)
        assert abs(metric.compute() - want) <= metric.error_bound() < 1e-2


def test_auc_counts_ties_half_and_takes_soft_labels():
    half, one = np.full(4, 0.5, np.float32), np.ones(4, np.float32)
    y = np.array([0, 1, 1, 0], np.float32)
    metric = update_one(AUC(), dict(labels=y, predictions=half, weights=one))
    assert (metric.compute(), metric.error_bound()) == (0.5, 0.5)
    # A label of 0.25 is a quarter of a positive and three quarters of a negative.
    soft = AUC().update(
        labels=np.array([0.25, 1.0], np.float32),
        predictions=np.array([0.2, 0.8], np.float32),
        weights=np.array([4.0, 1.0], np.float32),
    )
    hard = sklearn_metrics.roc_auc_score(
        [1, 0, 1], [0.2, 0.2, 0.8], sample_weight=[1, 3, 1]
    )
    assert soft.compute() == pytest.approx(hard)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_auc_of_one_class_is_nan(label):
    p = columns()["predictions"]
    labels = np.full_like(p, label)
    metric = update_one(AUC(), dict(labels=labels, predictions=p, weights=p))
    assert math.isnan(metric.compute())
    assert math.isnan(metric.error_bound())


@pytest.mark.parametrize(
    ("bins", "octaves"), [(1024, _WIDE), (16384, _WIDE), (2**20, _WIDE), (128, _NARROW)]
)
def test_bins_never_decrease_and_stay_in_range(bins, octaves):
    tiny = np.float32(1e-45)
    edges = np.array([0, tiny, 1e-38, 0.5, 1 - 2.0**-24, 1], np.float32)
    powers = 2.0 ** -np.arange(1, 60, dtype=np.float32)
    near = np.concatenate([powers, 1 - powers, edges]).astype(np.float32)
    near = np.concatenate(
        [near, np.nextafter(near, 0), np.nextafter(near, np.float32(1))]
    )
    p = np.sort(
        np.concatenate([near, np.random.default_rng(0).random(5000, np.float32)])
    )
    at = np.asarray(_bins_of(p, bins, octaves))
    assert at[0] == 0
    assert at[-1] == bins - 1
    assert np.all(np.diff(at) >= 0)
    odd = np.array([-0.0, np.nan, np.inf, -np.inf, 2, -1], np.float32)
    at = np.asarray(_bins_of(odd, bins, octaves))
    assert at[0] == 0
    assert np.all((at >= 0) & (at < bins))


def test_bins_keep_the_resolution_that_is_documented():
    p = np.geomspace(1e-10, 0.5, 20_000, endpoint=False).astype(np.float32)
    at = np.asarray(_bins_of(p, 16384, _WIDE))
    same = at[1:] == at[:-1]
    assert np.all(p[1:][same] / p[:-1][same] <= 1 + 1 / 256)
    apart = np.asarray(_bins_of(p * np.float32(1 + 1 / 200), 16384, _WIDE))
    assert np.all(apart > at)


def test_the_compiled_update_sorts_nothing():
    batch = columns()
    lowered = jax.jit(lambda m, b: m.update(**b)).lower(AUC(), batch)
    text = lowered.compile().as_text() or ""
    assert " scatter(" in text
    assert " sort(" not in text


# --- GAUC -----------------------------------------------------------------------------


def test_gauc_leaves_out_groups_of_one_class_and_weighs_by_rows():
    y = np.array([0, 1, 1, 0, 0, 1, 1], np.float32)
    p = np.array([0.1, 0.9, 0.2, 0.8, 0.3, 0.6, 0.7], np.float32)
    g = np.array([0, 0, 1, 1, 1, 2, 2], np.int32)
    batch = dict(labels=y, predictions=p, weights=y + 1, groups=g)
    metric = update_one(GAUC(groups=4), batch)
    # Group 0: AUC 1, weight 3. Group 1: AUC 0, weight 4. Group 2 has no negative.
    assert metric.compute() == pytest.approx(3 / 7)
    assert metric.error_bound() == 0.0


def test_gauc_error_stays_within_its_bound():
    batch = columns(20_000)
    metric = update_one(GAUC(groups=GROUPS), batch)
    error = abs(metric.compute() - expected(batch)["gauc"])
    print("GAUC, 512 bins: error", error, "bound", metric.error_bound())
    assert error <= metric.error_bound() < 0.02
    assert error < 1e-3


@pytest.mark.parametrize("bad", [-1, GROUPS, 2**31 - 1, -(2**31)])
def test_gauc_refuses_ids_outside_the_groups(bad):
    batch = {k: v.copy() for k, v in columns().items()}
    batch["groups"][:3] = bad
    metric = update(update(ALL, batch), columns())["gauc"]
    with pytest.raises(ValueError, match=r"must be in \[0, 12\), got 3 rows outside"):
        metric.compute()


def test_gauc_needs_integer_groups():
    batch = dict(columns(8), groups=np.zeros(8, np.float32))
    with pytest.raises(TypeError, match="`groups` must be integers, got dtype float32"):
        GAUC(groups=3).update(**batch)
    del batch["groups"]
    with pytest.raises(ValueError, match="reads the column 'groups', which `update`"):
        GAUC(groups=3).update(**batch)


# --- values and shapes that do not fit ------------------------------------------------


@pytest.mark.parametrize(("column", "value"), [("labels", -1), ("predictions", 1.5)])
def test_values_outside_0_1_are_refused_with_their_number(column, value):
    batch = {k: v.copy() for k, v in columns().items()}
    batch[column][:2] = value
    metrics = update(ALL, batch)
    for name in ("logloss", "ne", "auc", "gauc"):
        with pytest.raises(ValueError, match=r"in \[0, 1\], got 2 rows outside. Give"):
            metrics[name].compute()


@pytest.mark.parametrize("name", ALL)
def test_columns_of_other_shapes_are_refused(name):
    batch = columns(8)
    for column in ("labels", "predictions", "weights"):
        if name in ("sum", "mean", "weighted_mean") and column != "weights":
            continue
        bad = dict(batch, **{column: batch[column][:, None]})
        with pytest.raises(ValueError, match=r"must all have the shape \[batch\], got"):
            ALL[name].update(**bad)


def test_check_columns_says_which_shapes_it_got():
    check_columns(labels=np.ones(2), weights=np.ones(2))
    with pytest.raises(ValueError, match=r"got `labels` \(2,\), `weights` \(3,\)"):
        check_columns(labels=np.ones(2), weights=np.ones(3))


def test_logits_of_another_shape_are_refused():
    batch = dict(columns(8), logits=np.zeros((8, 1), np.float32))
    with pytest.raises(ValueError, match=r"`logits` \(8, 1\)"):
        LogLoss().update(**batch)


@pytest.mark.parametrize("make", [Sum, Mean, WeightedMean])
def test_a_named_column_must_be_there(make):
    with pytest.raises(
        ValueError, match="reads the column 'x', which `update` was not"
    ):
        make("x").update(**columns(8))
    with pytest.raises(
        TypeError, match="needs the name of a column, a string, got int"
    ):
        make(3)


@pytest.mark.parametrize(
    ("metric", "settings", "kind", "match"),
    [
        (AUC, {"bins": 1000}, ValueError, "`bins` of AUC must be a power of two"),
        (AUC, {"bins": 512}, ValueError, "from 1024 to 2\\*\\*20, got 512"),
        (AUC, {"bins": 2**21}, ValueError, "got 2097152"),
        (AUC, {"bins": 4096.0}, TypeError, "`bins` of AUC must be an integer"),
        (GAUC, {"groups": 8, "bins": 64}, ValueError, "`bins` of GAUC must be a power"),
        (GAUC, {"groups": 0}, ValueError, "`groups` of GAUC must be positive, got 0"),
        (GAUC, {"groups": "a"}, TypeError, "`groups` of GAUC must be an integer"),
        (Accuracy, {"threshold": math.nan}, ValueError, "must be finite, got nan"),
    ],
)
def test_settings_are_checked(metric, settings, kind, match):
    with pytest.raises(kind, match=match):
        metric(**settings)


def test_totals_check_shapes():
    with pytest.raises(ValueError, match=r"has shape \(3,\). Use `plus`"):
        Total.zeros((3,)).add(np.ones(3))
    with pytest.raises(
        ValueError, match=r"`values` must have shape \[batch\], got \(\)"
    ):
        Total().add(np.float32(1))
    with pytest.raises(ValueError, match=r"got \(3,\) and \(2,\). Give one weight per"):
        Total().add(np.ones(3), np.ones(2))
    with pytest.raises(ValueError, match=r"shape of the total, \(\), got \(3,\)"):
        Total().plus(np.ones(3))
    with pytest.raises(
        ValueError, match=r"must have the same shape, got \(\) and \(3,\)"
    ):
        Total().merge(Total.zeros((3,)))


def test_ratio_divides_without_warnings():
    assert ratio(1, 0) == math.inf
    assert math.isnan(ratio(np.float64(0), np.float64(0)))


# --- the base class -------------------------------------------------------------------


class Precision(Metric):
    """A custom metric with a setting, as a user writes it."""

    threshold: float = static(default=0.5)
    right: Total = Total()
    above: Total = Total()

    def update(self, *, labels, predictions, weights, **extras):
        above = predictions >= self.threshold
        return self.replace(
            right=self.right.add(labels * above, weights),
            above=self.above.add(above, weights),
        )

    def compute(self):
        return ratio(self.right.value(), self.above.value())


class Highest(Metric):
    """A custom metric that is no sum: it says how to merge."""

    highest: Array = np.float32(-np.inf)

    def update(self, *, labels, predictions, weights, **extras):
        real = jnp.where(weights != 0, predictions, -jnp.inf)
        return self.replace(highest=jnp.maximum(self.highest, real.max()))

    def merge(self, other):
        return self.replace(highest=np.maximum(self.highest, other.highest))

    def compute(self):
        return float(self.highest)


class Pair(Metric):
    """A custom metric made of a metric and a plain array."""

    auc: AUC = AUC(bins=1024)
    rows: Array = np.float32(0)

    def update(self, *, labels, predictions, weights, **extras):
        auc = self.auc.update(labels=labels, predictions=predictions, weights=weights)
        return self.replace(auc=auc, rows=self.rows + jnp.sum(weights != 0))

    def compute(self):
        return float(self.rows) * self.auc.compute()


def test_custom_metrics_work_as_ours_do():
    batch = columns()
    y, p, w = (batch[k] for k in ("labels", "predictions", "weights"))
    empty = {
        "precision": Precision(threshold=0.4),
        "highest": Highest(),
        "pair": Pair(),
    }
    each = jax.vmap(lambda b: update(empty, b))(
        {k: v.reshape(4, -1) for k, v in batch.items()}
    )
    got = {name: merge_stacked(metric).compute() for name, metric in each.items()}
    want = sklearn_metrics.precision_score(y, p >= 0.4, sample_weight=w)
    assert got["precision"] == pytest.approx(want, rel=1e-12)
    assert got["highest"] == p.max()
    auc = AUC(bins=1024).update(labels=y, predictions=p, weights=w).compute()
    assert got["pair"] == pytest.approx(ROWS * auc)


def test_settings_are_static_and_state_has_readable_paths():
    leaves, structure = jax.tree.flatten_with_path(GAUC(groups=2))
    assert [jax.tree_util.keystr(path) for path, _ in leaves][:2] == [
        ".positives",
        ".negatives",
    ]
    assert structure != jax.tree.structure(GAUC(groups=3))
    assert structure == jax.tree.structure(GAUC(groups=2))
    assert repr(GAUC(groups=2)) == "GAUC(groups=2, bins=512)"


def test_one_program_serves_all_steps():
    traces = []

    @jax.jit
    def step(metrics, batch):
        traces.append(1)
        return {name: metric.update(**batch) for name, metric in metrics.items()}

    metrics = ALL
    for seed in range(3):
        metrics = step(metrics, columns(256, seed))
    assert len(traces) == 1


def test_state_can_be_donated():
    step = jax.jit(lambda m, b: update(m, b), donate_argnums=0)
    metrics = jax.tree.map(jnp.array, ALL)
    for _ in range(2):
        metrics = step(metrics, columns())
    assert metrics["mean"].rows.value() == 2 * ROWS


def test_merge_refuses_other_classes_and_settings():
    with pytest.raises(TypeError, match="must be of one class, got MAE and RMSE"):
        MAE().merge(RMSE())  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"got AUC\(bins=1024\) and AUC\(bins=2048\)"):
        AUC(bins=1024).merge(AUC(bins=2048))
    other = Pair().replace(rows=np.zeros(2, np.float32))
    with pytest.raises(ValueError, match=r"`rows` of metrics to merge must have the"):
        Pair().merge(other)


def test_merge_stacked_refuses_a_state_without_a_device_dim():
    with pytest.raises(ValueError, match="must have the same leading device dim, got"):
        merge_stacked(MAE())
    with pytest.raises(ValueError, match="must have the same leading device dim, got"):
        merge_stacked(MAE().replace(error=Total.zeros((2,)), weight=Total.zeros((3,))))


def test_a_setting_must_be_declared_static():
    with pytest.raises(
        TypeError, match="field `k` of metric Bad is of type int, which"
    ):

        class Bad(Metric):
            k: int = 3

    # As annotations are under `from __future__ import annotations`.
    with pytest.raises(TypeError, match="field `k` of metric Late is of type float"):

        class Late(Metric):
            k: "float" = 0.5


def test_an_incomplete_metric_cannot_be_made():
    class NoCompute(Metric):
        def update(self, *, labels, predictions, weights, **extras):
            return self

    with pytest.raises(TypeError, match="abstract method '?compute"):
        NoCompute()  # pyright: ignore[reportAbstractUsage]


def test_an_empty_metric_touches_no_device():
    run_python("""
import jax
from shardjax.metrics import *
made = [AUC(), GAUC(groups=3), Mean("loss"), LogLoss(), NormalizedEntropy(), MAE()]
merged = [metric.merge(metric).compute() for metric in made]
# This fails once any JAX operation has run.
jax.config.update("jax_num_cpu_devices", 5)
assert jax.device_count() == 5
""")


def test_metrics_are_frozen():
    with pytest.raises(AttributeError):
        MAE().error = Total()  # pyright: ignore[reportAttributeAccessIssue]
