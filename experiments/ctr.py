"""Train a click-through model on click logs, with embedding tables over a mesh.

    python -m experiments.ctr --mesh 8x1                      synthetic clicks
    python -m experiments.ctr --data.path 'day_*.tsv.gz'      Criteo logs
    python -m experiments.ctr --data.path clicks.csv --data.label click

Prints progress, and as the last line one JSON object with the result. On a host without
enough devices the mesh is simulated on the CPU.
"""

import json
import logging
import math
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
from flax import nnx

import shardjax as sj
from experiments import config as configs
from experiments.balancing import Balancer
from experiments.checkpoints import (
    CheckpointConfig,
    Checkpoints,
    check_resume,
)
from experiments.cluster import (
    ProcessConfig,
    block_share,
    check_same_data,
    is_first,
    joined,
    share,
)
from experiments.data import DataConfig, Opened, open_data
from experiments.optimizers import ROW_OPTIMIZERS as ROW_OPTIMIZERS, OptimConfig
from experiments.output import (
    as_floats,
    claim,
    finite,
    open_writers,
    trace_window,
    write_result,
)
from experiments.storage import AdmitConfig, EvictConfig, StorageConfig
from experiments.tiers import tier_rates, tier_sizes
from shardjax import (
    embed,
    export,
    metrics,
    models,
    plots,
    processes,
    train,
    writers,
    zero,
)
from shardjax.data import Batch, Loader
from shardjax.embed import Index
from shardjax.folders import check_vacant
from shardjax.network import from_nnx
from shardjax.pacing import Pace
from shardjax.state import TrainState, compute_metrics, init_state, stack_metrics

log = logging.getLogger("experiments.ctr")

MODELS = {
    "lr": models.LogisticRegression,
    "wide_deep": models.WideDeep,
    "deepfm": models.DeepFM,
    "dlrm": models.DLRM,
    "dcn": models.DCN,
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network."""

    name: Literal["lr", "wide_deep", "deepfm", "dlrm", "dcn"] = "deepfm"
    """Which network."""
    dim: int = 16
    """Numbers per embedding vector."""
    init_scale: float = 0.01
    """New embedding rows are uniform in [-init_scale, init_scale)."""


@dataclass(frozen=True, kw_only=True)
class Config(ProcessConfig):
    """All settings of a run."""

    mesh: str = "1x1"
    """Devices along data x model, such as 8x1; a CPU host simulates those it lacks."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    admit: AdmitConfig = field(default_factory=AdmitConfig)
    evict: EvictConfig = field(default_factory=EvictConfig)
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage of the network: 1 splits its optimizer's state over all devices, 2 its
    gradients too, 3 its parameters too; 0 nothing. Tables are always split."""
    precision: Literal["f32", "bf16", "f16"] = "f32"
    """What the network computes in; parameters, rows and optimizers are float32."""
    batch_size: int = 512
    """Examples per step, over all devices."""
    eval_batch_size: int = 8192
    """Examples per evaluation step."""
    epochs: int = 1
    """Passes over the training rows."""
    steps: int | None = None
    """Stop after this many steps."""
    seed: int = 0
    """Of the initial values of network and rows, and of the synthetic clicks."""
    microbatch_size: int | None = None
    """Examples per device through the network at a time; 512 on a CPU, else all."""
    planner_threads: int = 1
    """Host threads that look up keys."""
    log_every: int = 50
    """Steps between lines in metrics.jsonl."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resume: str = "auto"
    """What to go on from in --checkpoint.dir: auto (the newest, if there is one), none, or the
    number of a step."""
    profile: tuple[Literal["steps"], str] | None = None
    """Trace these steps into OUT/trace for TensorBoard or Perfetto: --profile steps 10:15."""
    out: Path | None = None
    """Folder for the config, metrics.jsonl, TensorBoard events, curves.png, and tiers.png if
    rows lie off the devices."""
    export: Path | None = None
    """Folder for the trained model, network and rows, for use where nothing is trained: see
    docs/export.md."""

    def __post_init__(self):
        sj.MeshShape.parse(self.mesh)
        for name in ("batch_size", "eval_batch_size", "epochs", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}` must be positive, got {getattr(self, name)}"
                )
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"`seed` must be in [0, 2**31), got {self.seed}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"`steps` must be positive, got {self.steps}")
        if self.data.balance is not None and self.microbatch_size is not None:
            raise ValueError(
                "`microbatch_size` and `data.balance` exclude each other, as a block goes"
                f" through the network at a time, got {self.microbatch_size} and"
                f" {self.data.balance}. Leave one of them out"
            )
        trace_window(self.profile, self.out)
        check_resume(self.resume, self.checkpoint)


def main(config: Config) -> dict[str, Any]:
    """Runs the experiment.

    Args:
      config: all settings.

    Returns:
      The result: what the program prints as its last line.
    """
    with joined(config) as own:
        return run(own)


def run(config: Config) -> dict[str, Any]:
    """Runs the experiment in this process, once its devices are there."""
    started = time.perf_counter()
    goes_on = claim(config)
    if config.export is not None:
        if processes.process_count() > 1:
            raise ValueError(
                "`export` is for one process, which has the rows of all devices, and this"
                f" run has {processes.process_count()}. Export from one of its checkpoints:"
                " python -m shardjax.checkpoint export"
            )
        check_vacant(config.export, "`export`")
    mesh = sj.make_mesh(config.mesh)
    data = open_data(config.data, config.seed)
    log.info("%s", data.description)
    check_same_data(
        rows=data.train_rows,
        eval_rows=data.eval_rows,
        features=list(data.features),
        bags=sorted(data.bags),
        n_dense=data.n_dense,
    )
    collection, network = build(config, data, mesh)
    users = Index() if data.has_groups else None
    steps = total_steps(config, data.train_rows)
    if config.steps is not None and steps < config.steps:
        log.warning(
            "--steps %d is more than the data have: %d steps in %d epochs of %d rows."
            " Raise --epochs to go on",
            config.steps,
            steps,
            config.epochs,
            data.train_rows,
        )
    tx = config.optim.dense_optimizer(steps)
    plan = sj.plan_network(
        network, tx, collection, config.zero, precision=config.precision
    )
    log.info("%s", zero.explain(plan))
    state = init_state(network, tx, collection, train_metrics(), zero=plan)
    microbatch = config.microbatch_size
    if microbatch is None and jax.default_backend() == "cpu":
        microbatch = 512
    part, balancer = share(mesh), None
    if config.data.balance is not None:
        part = block_share(mesh, config.batch_size, config.data.balance)
        microbatch = part.block_size
        balancer = Balancer(part, config, network, collection, data.n_dense)
    pace = Pace()
    step = train.make_train_step(
        network,
        tx,
        collection,
        microbatch_size=microbatch,
        skip_padding=balancer is not None,
        pace=pace,
        zero=plan,
    )
    loader = Loader(
        data.train,
        config.batch_size,
        shuffle_seed=config.data.shuffle_seed,
        shuffle="global" if config.data.shuffle_all else "window",
        share=part,
        stream=train.prepare_stream(collection, train=True, check=checked),
        window=config.storage.window,
        meanwhile=pace.look,
    )
    result: dict[str, Any] = {
        "experiment": "ctr",
        "mesh": config.mesh,
        "devices": mesh.size,
        "model": config.model.name,
        "zero": config.zero,
        "rows": data.train_rows,
    }
    checkpoints = Checkpoints(config, steps, collection=collection, loader=loader)
    with (
        closing(collection),
        checkpoints,
        open_writers(config.out, config, goes_on) as writer,
    ):
        run = Run(
            config,
            collection,
            state,
            step,
            pace,
            loader,
            writer,
            steps,
            checkpoints,
            balancer,
        )
        with checkpoints.catch_sigterm():
            result |= run.loop()
        state = run.state
        checkpoints.end(state)
        evaluator = train.make_eval_step(network, collection)
        result |= evaluate(config, data, collection, state, evaluator, users)
        values = {k: v for k, v in finite(result).items() if "/" in k}
        writer.write(
            result["steps"], {k: v for k, v in values.items() if v is not None}
        )
        if config.export is not None:
            export.export_model(
                network, collection, state, config.export, n_dense=data.n_dense
            )
            log.info("the model is in %s", config.export)
        rows = run.rows
    result = finite(result)
    result["seconds"] = round(time.perf_counter() - started, 2)
    if config.out is not None:
        write_result(config.out, result, rows, ("loss", "auc"))
        if config.storage.device_rows is not None:
            plots.tiers(config.out / "tiers.png", rows)
    return result


def checked(batch: Batch) -> Batch:
    """The batch, if its labels are probabilities.

    Raises:
      ValueError: for a label outside [0, 1].
    """
    outside = (batch.labels < 0) | (batch.labels > 1)
    if outside.any():
        raise ValueError(
            f"labels must lie in [0, 1], got {batch.labels[outside][0]:g} and"
            f" {outside.sum() - 1} others in a batch. Name the label's column with"
            " --data.label, or the value from which on it is 1 with"
            " --data.label-threshold"
        )
    return batch


def total_steps(config: Config, rows: int) -> int:
    """Steps of a run over so many training rows per epoch."""
    steps = -(-rows // config.batch_size) * config.epochs
    return min(steps, config.steps or steps)


def build(config: Config, data: Opened, mesh):
    """The tables and the network for the features of the data.

    Raises:
      ValueError: for data without a keyed feature.
    """
    if not data.features:
        raise ValueError(
            "no column has keys, so there is nothing to embed. Name such columns with"
            f" --data.categorical or --data.bags; what was found is\n{data.description}"
        )
    model = MODELS[config.model.name]
    steps = total_steps(config, data.train_rows)
    rows = config.optim.row_optimizer(steps, config.batch_size)
    initializer = embed.uniform(config.model.init_scale)
    features = {}
    for name in data.features:
        table = embed.TableSpec(
            name,
            dim=model.row_dim(config.model.dim),
            optimizer=rows,
            initializer=initializer,
            admit=config.admit.policy(),
            evict=config.evict.policies(),
        )
        combiner = "mean" if name in data.bags else "sum"
        features[name] = embed.FeatureSpec(table, combiner=combiner)
    collection = embed.EmbeddingCollection(
        features,
        mesh=mesh,
        seed=config.seed,
        initial_rows=max(65536 // mesh.size, 1024),
        threads=config.planner_threads,
        storage=config.storage.storage(),
    )
    network = model(
        features=tuple(features),
        n_dense=data.n_dense,
        dim=config.model.dim,
        rngs=nnx.Rngs(config.seed),
    )
    return collection, from_nnx(network)


def train_metrics() -> dict[str, metrics.Metric]:
    """What training measures between two log lines."""
    return {"loss": metrics.LogLoss(), "auc": metrics.AUC()}


class Run:
    """The training loop, and what it writes on the way: see docs/counters.md."""

    def __init__(
        self,
        config,
        collection,
        state,
        step,
        pace,
        loader,
        writer,
        steps,
        checkpoints,
        balancer,
    ):
        self.config = config
        self.collection = collection
        self.state: TrainState
        self.step = step
        self.pace = pace
        self.loader = loader
        self.writer = writer
        self.total_steps = steps
        self.checkpoints: Checkpoints = checkpoints
        self.balancer: Balancer | None = balancer
        self.taken, self.state, extra = checkpoints.begin(state)
        self.rows: list[dict[str, float]] = as_floats(extra.get("rows", []))
        self.counters: dict[str, float] = extra.get("counters", {})
        self.recent: dict[str, float] = extra.get("recent", {})  # since the last row
        self.examples: int = extra.get("examples", 0)

    def extra(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the state."""
        return {
            "rows": [finite(row) for row in self.rows],
            "counters": self.counters,
            "recent": self.recent,
            "examples": self.examples,
        }

    def loop(self) -> dict[str, Any]:
        """Trains, and returns its part of the result."""
        config = self.config
        first = self.taken
        before = self.examples
        self.started = self.mark = after_first = time.perf_counter()
        self.wait = self.idle = 0.0
        self.logged = self.taken
        bar = writers.ProgressBar(
            self.total_steps, batch_size=config.batch_size, enabled=is_first()
        )
        with bar, trace_window(config.profile, config.out) as trace:
            for batch in self.batches():
                trace.before(self.taken + 1)
                self.state, info = self.step(self.state, batch)
                self.taken += 1
                trace.after(self.taken, info)
                self.examples += batch.size
                train.add_counters(self.counters, batch.counters)
                train.add_counters(self.recent, batch.counters)
                if self.taken == first + 1:
                    jax.block_until_ready(info["loss"])
                    after_first = time.perf_counter()
                if self.taken % config.log_every == 0 or self.taken == self.total_steps:
                    jax.block_until_ready(info["loss"])
                    bar.write(self.taken, self.write_row())
                if self.balancer is not None:
                    self.balancer.after(self.taken, info)
                self.checkpoints.after(self.taken, self.state, self.extra)
                if self.taken == self.total_steps:
                    break
        if not self.taken:
            raise ValueError("there are no training rows: see --data.path")
        ended = time.perf_counter()
        steady = self.examples - before
        steady -= min(config.batch_size, steady)  # the first step compiles
        return {
            "steps": self.taken,
            "examples": self.examples,
            "examples_per_s": round(steady / max(ended - after_first, 1e-9)),
            "train_seconds": round(ended - self.started, 2),
            **{f"planner/{k}": v for k, v in self.counters.items()},
            **tier_rates(self.counters, self.taken),
            "loader/wait_s": round(self.loader.wait_seconds, 3),
            "device/wait_s": round(self.pace.idle_seconds, 3),
            **self.checkpoints.figures(),
            **({} if self.balancer is None else self.balancer.figures()),
            **self.sizes(),
        }

    def write_row(self) -> dict[str, float]:
        """Writes what training was like since the last time.

        Raises:
          ValueError: for a loss that is not finite.
        """
        now = time.perf_counter()
        row = self.read_metrics()
        if not math.isfinite(row["train/loss"]):
            raise ValueError(
                f"the training loss is {row['train/loss']} at step {self.taken}:"
                " lower --optim.dense-lr or --optim.rows-lr, and look at the"
                " dense features"
            )
        steps = max(self.taken - self.logged, 1)
        row["train/examples_per_s"] = self.recent["examples"] / (now - self.mark)
        row["train/step_ms"] = 1e3 * (now - self.mark) / steps
        row |= {f"planner/{k}": v for k, v in self.recent.items()}
        row |= tier_rates(self.recent, steps)
        row["loader/wait_s"] = self.loader.wait_seconds - self.wait
        row["device/wait_s"] = self.pace.idle_seconds - self.idle
        row |= self.checkpoints.figures()
        if self.balancer is not None:
            row |= self.balancer.figures()
        self.wait, self.idle = self.loader.wait_seconds, self.pace.idle_seconds
        self.writer.write(self.taken, row)
        self.rows.append({"step": self.taken, **row})
        self.mark, self.logged, self.recent = time.perf_counter(), self.taken, {}
        return row

    def sizes(self) -> dict[str, int]:
        """How many keys have a row and, where there is a storage, what each tier holds."""
        stats = self.collection.total_stats()
        keys = sum(s["rows"] - s["coming_rows"] + s["leaving_rows"] for s in stats)
        sizes = {"unique_keys": keys}
        if self.config.storage.device_rows is not None:
            sizes |= tier_sizes(stats)
        return sizes

    def batches(self) -> Iterator[train.PreparedBatch]:
        """The batches of all epochs."""
        while self.loader.epoch < self.config.epochs and self.taken < self.total_steps:
            yield from self.loader

    def read_metrics(self) -> dict[str, float]:
        """Training metrics since the last time, which start anew."""
        values = compute_metrics(self.state.metrics)
        fresh = stack_metrics(train_metrics(), self.collection.mesh)
        self.state = self.state.replace(metrics=fresh)
        return {f"train/{name}": value for name, value in values.items()}


def evaluate(config, data: Opened, collection, state, step, users) -> dict[str, Any]:
    """Evaluates, and returns its part of the result."""
    measures: dict[str, metrics.Metric] = {
        "auc": metrics.AUC(),
        "logloss": metrics.LogLoss(),
        "normalized_entropy": metrics.NormalizedEntropy(),
        "calibration": metrics.Calibration(),
        "accuracy": metrics.Accuracy(),
    }
    if data.eval is None:
        return {f"eval/{name}": None for name in measures}
    if users is not None:
        for chunk in data.eval.chunks():
            users.number(chunk.groups)
        # a histogram per user: fewer bins where there are many users
        bins = max(min(2**26 // max(len(users), 1), 512), 16)
        measures["gauc"] = metrics.GAUC(groups=max(len(users), 1), bins=bins)
    loader = Loader(
        data.eval,
        config.eval_batch_size,
        share=share(collection.mesh),
        stream=train.prepare_stream(
            collection, train=False, groups=users, check=checked
        ),
    )
    found, counters = train.evaluate(step, state, loader, measures, collection.mesh)
    result = {f"eval/{k}": v for k, v in compute_metrics(found).items()}
    result["eval/examples"] = counters.get("examples", 0)
    result["eval/unseen"] = counters.get("unseen", 0)
    result |= {f"bayes/{k}": v for k, v in data.bayes().items()}
    return result


def from_anything(values: dict[str, Any]) -> Config:
    """A config from nested dicts; an unknown key is an error that names the nearest."""
    return configs.from_dict(Config, values)


if __name__ == "__main__":
    found = configs.run_program(main, Config, "experiments.ctr", __doc__)
    if is_first():
        print(json.dumps(found, allow_nan=False))
