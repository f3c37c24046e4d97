"""Train a language model on the bytes of text, with ZeRO over a mesh.

    python -m experiments.lm --mesh 8x1 --zero 3              Python's standard library
    python -m experiments.lm --mesh 4x2 --zero 1              tensor parallelism besides
    python -m experiments.lm --data.path 'books/*.txt' --size medium --precision bf16

Prints progress, and as the last line one JSON object with the result. On a host without
enough devices the mesh is simulated on the CPU.

Measured with jax 0.10.2 on 2 cores (Xeon with AVX-512), one run of
``python -m experiments.lm --mesh 2x1 --zero 2 --steps 800``: 2.14 bits per byte of 467,638
held-out bytes, in 202 s in all.
"""

import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

import shardjax as sj
from experiments import config as configs
from experiments.checkpoints import (
    CheckpointConfig,
    Checkpoints,
    check_resume,
)
from experiments.cluster import ProcessConfig, check_same_data, is_first, joined
from experiments.output import (
    as_floats,
    claim,
    finite,
    open_writers,
    trace_window,
    write_result,
)
from experiments.schedules import NetworkOptimConfig
from experiments.storage import refuse_idle
from experiments.text import (
    Text,
    TextConfig,
    held_out_batches,
    open_text,
    training_batch,
)
from shardjax import processes, profiling, writers, zero
from shardjax.mesh import as_mesh_shape
from shardjax.models import gpt
from shardjax.remat import Remat
from shardjax.sharded import place, replicate
from shardjax.zero.plan import check_offload

log = logging.getLogger("experiments.lm")

SIZES = {
    "tiny": gpt.tiny,
    "small": gpt.small,
    "medium": gpt.medium,
    "large": gpt.large,
}


@dataclass(frozen=True, kw_only=True)
class Config(ProcessConfig):
    """All settings of a run."""

    mesh: str = "1x1"
    """Devices along data x model, such as 8x1; a CPU host simulates those it lacks. The
    batch and ZeRO are over data, tensor parallelism over model."""
    zero: int = 2
    """ZeRO stage: 1 splits the optimizer's state over the devices, 2 the gradients too, 3
    the parameters too; 0 nothing."""
    data: TextConfig = field(default_factory=TextConfig)
    size: Literal["tiny", "small", "medium", "large"] = "small"
    """Of the model: 0.1, 0.8, 25 or 1200 million parameters."""
    positions: Literal["rotary", "learned"] = "rotary"
    """How the model knows the order of bytes."""
    optim: NetworkOptimConfig = field(default_factory=NetworkOptimConfig)
    batch_size: int = 8
    """Sequences per step, over all devices."""
    seq_len: int = 256
    """Bytes that a sequence predicts."""
    microbatches: int = 1
    """Parts of a batch that go through the model one after the other."""
    remat: str = "none"
    """What is kept for the backward pass: none (all), full (layers' inputs), dots, sqrt,
    save:NAME,... or offload:NAME,... of block_in, attention, mlp_hidden."""
    offload: Literal["none", "opt_state", "all"] = "none"
    """What is in the host's memory between uses: opt_state, the optimizer's state (adamw,
    sgd); all, that and the parameters, which come a layer at a time (--zero 3)."""
    precision: Literal["f32", "bf16", "f16"] = "f32"
    """What is computed in; parameters and optimizer are float32."""
    steps: int = 1500
    """Training steps."""
    eval_batch_size: int = 64
    """Sequences per evaluation step."""
    seed: int = 0
    """Of the first parameters and of the order of the text."""
    log_every: int = 50
    """Steps between lines in metrics.jsonl."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resume: str = "auto"
    """What to go on from in --checkpoint.dir: auto (the newest, if there is one), none, or the
    number of a step."""
    profile: tuple[Literal["steps"], str] | None = None
    """Trace these steps into OUT/trace for TensorBoard or Perfetto: --profile steps 10:15."""
    out: Path | None = None
    """Folder for the config, metrics.jsonl, TensorBoard events and curves.png."""

    def __post_init__(self):
        shape = sj.MeshShape.parse(self.mesh)
        sizes = ("batch_size", "seq_len", "microbatches", "steps", "eval_batch_size")
        for name in (*sizes, "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}` must be positive, got {getattr(self, name)}"
                )
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"`seed` must be in [0, 2**31), got {self.seed}")
        if self.zero not in zero.STAGES:
            raise ValueError(f"`zero` must be one of {zero.STAGES}, got {self.zero}")
        check_offload(self.offload, self.zero)
        Remat.parse(self.remat)
        trace_window(self.profile, self.out)
        check_resume(self.resume, self.checkpoint)
        refuse_idle(self.checkpoint, ("full_every",), "embedding tables")
        parts = shape.data * self.microbatches
        if self.batch_size % parts:
            raise ValueError(
                f"`batch_size` must be a multiple of {parts} ({self.microbatches}"
                f" microbatches on {shape.data} devices along data), got"
                f" {self.batch_size}"
            )
        if self.eval_batch_size % shape.data:
            raise ValueError(
                f"`eval_batch_size` must be a multiple of the {shape.data} devices along"
                f" data, got {self.eval_batch_size}"
            )


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
    text = open_text(config.data)
    log.info("%s", text)
    check_same_data(
        bytes=len(text.train),
        crc32=crc32(text.train.data),
        held_out=crc32(text.held_out.data),
    )
    run = Run(config, text)
    log.info("%s", zero.explain(run.plan, config.microbatches))
    checkpoints = Checkpoints(config, config.steps)
    with (
        checkpoints,
        open_writers(config.out, config, goes_on) as writer,
    ):
        with checkpoints.catch_sigterm():
            result = run.train(writer, checkpoints)
        checkpoints.end(run.state)
        found = run.evaluate()
        writer.write(config.steps, found)
        run.rows.append({"step": config.steps, **found})
    result = {
        "experiment": "lm",
        "mesh": config.mesh,
        "devices": run.mesh.size,
        "zero": config.zero,
        "size": config.size,
        "parameters": run.model.parameter_count(),
        **result,
        **found,
        "mfu": run.utilization(result["tokens_per_s"]),
        "bytes_per_device": run.bytes_per_device(),
        "train_bytes": len(text.train),
        "seconds": round(time.perf_counter() - started, 2),
    }
    result = finite(result)
    if config.out is not None:
        write_result(config.out, result, run.rows, ("loss", "bits_per_byte"))
    return result


@dataclass(frozen=True)
class Program:
    """What trains a config's model on a mesh, before there is any data or state.

    Attributes:
      model: its sizes; its parameters have shapes only.
      plan: where everything lies.
      loss: of parameters and a batch.
      step: trains on a batch; it can be compiled for devices that are not here.
      init: makes the first state.
    """

    model: gpt.GPT
    plan: zero.ZeroPlan
    loss: zero.Loss
    step: Any
    init: Callable[[], zero.ZeroState]


def build(config: Config, mesh: Mesh) -> Program:
    """The program of a config on a mesh of its shape; allocates nothing.

    Args:
      config: all settings.
      mesh: of the devices, here or described (`jax.experimental.topologies`).

    Raises:
      ValueError: for a mesh of another shape.
    """
    if as_mesh_shape(mesh) != sj.MeshShape.parse(config.mesh):
        raise ValueError(
            f"the mesh must have the shape {config.mesh} of the config, got"
            f" {as_mesh_shape(mesh)}. Give the config the mesh's shape"
        )

    def make() -> gpt.GPT:
        learned = config.positions == "learned"
        return SIZES[config.size](
            positions=config.positions,
            seq_len=config.seq_len if learned else None,
            remat=config.remat,
            rngs=nnx.Rngs(config.seed),
        )

    model = nnx.eval_shape(make)
    graph, abstract = nnx.split(model, nnx.Param)
    optim = replace(
        config.optim, clip=0.0
    )  # the step clips: it can while state streams
    tx = optim.optimizer(config.steps, config.batch_size)
    plan = zero.plan_zero(
        abstract,
        tx,
        mesh,
        config.zero,
        gpt.TP_RULES,
        blocks=("blocks/",),
        precision=config.precision,
        offload=config.offload,
    )

    def loss(params, batch):
        model = nnx.merge(graph, params)
        return gpt.next_token_loss(model, batch["tokens"], batch["weights"])

    def init() -> zero.ZeroState:
        return zero.init_state(lambda: nnx.split(make(), nnx.Param)[1], tx, plan)

    clip, parts = config.optim.clip or None, config.microbatches
    step = zero.make_step(loss, tx, plan, microbatches=parts, clip_norm=clip)
    return Program(model, plan, loss, step, init)


class Run:
    """A model on a mesh, its training and its evaluation."""

    def __init__(self, config: Config, text: Text):
        self.config, self.text = config, text
        self.mesh = sj.make_mesh(config.mesh)
        self.rows: list[dict[str, float]] = []
        program = build(config, self.mesh)
        self.model, self.plan, self.step = program.model, program.plan, program.step
        self._loss = program.loss
        self._batch = jax.NamedSharding(self.mesh, jax.P(sj.DATA_AXIS))
        self.state = program.init()

    def train(self, writer: writers.Writer, checkpoints: Checkpoints) -> dict[str, Any]:
        """Trains, and returns its part of the result."""
        config = self.config
        tokens = config.batch_size * config.seq_len
        started = mark = first = time.perf_counter()
        begun, self.state, extra = checkpoints.begin(self.state)
        self.rows = as_floats(extra.get("rows", []))
        losses = list(extra.get("losses", []))  # since the last row
        logged = begun - len(losses)

        def kept() -> dict[str, Any]:
            now = [float(x) for x in jax.device_get(losses)]
            return {"rows": [finite(row) for row in self.rows], "losses": now}

        bar = writers.ProgressBar(
            config.steps, batch_size=config.batch_size, enabled=is_first()
        )
        with bar, trace_window(config.profile, config.out) as trace:
            for taken in range(begun + 1, config.steps + 1):
                batch = training_batch(
                    self.text.train,
                    seed=config.seed,
                    step=taken - 1,
                    batch_size=config.batch_size,
                    seq_len=config.seq_len,
                )
                batch = place(batch, self._batch)
                trace.before(taken)
                self.state, info = self.step(self.state, batch)
                trace.after(taken, info)
                losses.append(info["loss"])
                if taken == begun + 1:
                    jax.block_until_ready(info)
                    first = time.perf_counter()
                if taken % config.log_every == 0 or taken == config.steps:
                    row = self._row(taken, losses, info)
                    now = time.perf_counter()
                    here = taken - max(logged, begun)  # steps of this process
                    row["train/step_ms"] = 1e3 * (now - mark) / here
                    row["train/tokens_per_s"] = tokens * here / (now - mark)
                    row |= checkpoints.figures()
                    writer.write(taken, row)
                    bar.write(taken, row)
                    self.rows.append({"step": taken, **row})
                    mark, losses, logged = now, [], taken
                checkpoints.after(taken, self.state, kept)
        ended = time.perf_counter()
        steady = max(config.steps - begun - 1, 0) * tokens / max(ended - first, 1e-9)
        return {
            "steps": config.steps,
            "tokens": config.steps * tokens,
            "train/loss": self.rows[-1]["train/loss"],
            "tokens_per_s": round(steady),
            "train_seconds": round(ended - started, 2),
            **checkpoints.figures(),
        }

    def _row(self, taken: int, losses: list, info: dict) -> dict[str, float]:
        """Means since the row before.

        Raises:
          ValueError: for a loss that is not finite.
        """
        loss = float(np.mean(jax.device_get(losses)))
        if not math.isfinite(loss):
            raise ValueError(
                f"the training loss is {loss} at step {taken}: lower --optim.lr, or give a"
                " longer --optim.warmup"
            )
        row = {"train/loss": loss, "train/bits_per_byte": loss / math.log(2)}
        row["train/grad_norm"] = float(info["grad_norm"])
        if "skipped" in info:
            row["train/skipped_steps"] = float(info["skipped"])
        return row

    def evaluate(self) -> dict[str, float]:
        """Predicts each held-out byte once, and returns its part of the result."""
        config = self.config

        @jax.jit
        def losses(params, batch):
            return self._loss(zero.params_for_evaluation(self.plan, params), batch)

        params = self.state.params
        if processes.process_count() > 1 and jax.default_backend() == "cpu":
            # jaxlib 0.10.2 takes 20 s for a batch there, with 2 cores: collectives that do
            # not wait for one another wait for threads
            params = replicate(params)
        total = weight = 0.0
        for batch in held_out_batches(
            self.text.held_out,
            batch_size=config.eval_batch_size,
            seq_len=config.seq_len,
        ):
            batch = place(batch, self._batch)
            found = jax.device_get(losses(params, batch))
            total, weight = total + float(found[0]), weight + float(found[1])
        loss = total / weight
        return {
            "eval/loss": loss,
            "eval/bits_per_byte": loss / math.log(2),
            "eval/bytes": int(weight),
        }

    def utilization(self, tokens_per_s: float) -> float:
        """MFU: the share of the machine's rate of matrix products that training used."""
        flops = self.model.flops_per_token(self.config.seq_len) * tokens_per_s
        device = self.mesh.devices.flat[0]
        if device.platform == "cpu":  # all simulated devices share its cores
            peak, devices = profiling.measure_peak_flops(512), 1
        else:
            peak, devices = profiling.peak_flops(device.device_kind), self.mesh.size
        return round(profiling.mfu(flops, 1.0, devices, peak), 4)

    def bytes_per_device(self) -> dict[str, int]:
        """Bytes on the first device: of the arrays there are, and of planned gradients;
        and of its arrays in the host's memory."""
        device = self.mesh.devices.flat[0]

        def size(tree, on_host: bool = False) -> int:
            return sum(
                shard.data.nbytes
                for x in jax.tree.leaves(tree)
                for shard in x.addressable_shards
                if shard.device == device
                and (x.sharding.memory_kind == "pinned_host") == on_host
            )

        return {
            "params": size(self.state.params),
            "grads": zero.estimate_memory(self.plan).grads,
            "opt_state": size(self.state.opt_state),
            "host": size(self.state, on_host=True),
        }


def from_anything(values: dict[str, Any]) -> Config:
    """A config from nested dicts; an unknown key is an error that names the nearest."""
    return configs.from_dict(Config, values)


if __name__ == "__main__":
    found = configs.run_program(main, Config, "experiments.lm", __doc__)
    if is_first():
        print(json.dumps(found, allow_nan=False))
