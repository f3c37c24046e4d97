"""Compile the language model's training step for TPUs that are not here.

    python -m experiments.scale                            writes docs/scale.md
    python -m experiments.scale --topologies v5e:4x4 --sizes large --stages 3 --out t.md

It needs no TPU, only the package libtpu (``pip install 'shardjax[aot,experiments]'``), and
writes what the compiler says of memory and of bytes on the wire next to what the plan
predicts. A row takes minutes: with ``--rows FILE``, those that FILE has are not made again.
"""

import datetime
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import mesh_utils, topologies
from jax.sharding import Mesh

import shardjax as sj
from experiments import config as configs, lm
from shardjax import profiling, zero
from shardjax.mesh import as_mesh_shape

log = logging.getLogger("experiments.scale")

Row = dict[str, Any]

_TOPOLOGY = re.compile(r"(?:([1-9]\d*)\*)?([a-z]\w*:\d+x\d+(?:x\d+)?)")
_REFUSED = re.compile(r"UNIMPLEMENTED: (.*?)\.?$", re.MULTILINE)
_TOO_LARGE = re.compile(
    r"RESOURCE_EXHAUSTED: .*\(([\d.]+)([KMG])\) exceeds available HBM \(([\d.]+)G\)"
)
_GIB = {"K": 2**-20, "M": 2**-10, "G": 1.0}


@dataclass(frozen=True, kw_only=True)
class Config:
    """What to compile: each topology with each size, each stage and each offload."""

    topologies: tuple[str, ...] = ("v5e:2x4", "2*v5e:2x4", "v5e:16x16")
    """Of TPUs; 2*v5e:2x4 is two slices of 2x4, between which there is a slower network."""
    sizes: tuple[str, ...] = ("large",)
    """Of the model, as of experiments.lm."""
    stages: tuple[int, ...] = zero.STAGES
    """Of ZeRO."""
    offloads: tuple[str, ...] = ("none", "opt_state", "all")
    """What is in the host's memory: none, opt_state (the optimizer's state), all (that and the
    parameters, at stage 3 only)."""
    sequences: int = 1
    """Sequences per device and step."""
    seq_len: int = 1024
    """Bytes that a sequence predicts."""
    remat: str = "full"
    """What is kept for the backward pass, as of experiments.lm."""
    precision: str = "bf16"
    """What is computed in; parameters and optimizer are float32."""
    out: Path = Path("docs/scale.md")
    """The table."""
    rows: Path | None = None
    """File of rows, one JSON object a line, to take rows from and to add others to."""

    def __post_init__(self):
        for topology in self.topologies:
            parse_topology(topology)


def main(config: Config) -> list[Row]:
    """Compiles what the config says, and writes the table.

    Args:
      config: all settings.

    Returns:
      The rows.

    Raises:
      ValueError: without libtpu.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "compiling for TPUs needs the package libtpu, which is not installed. Run pip"
            " install 'shardjax[aot,experiments]'"
        )
    known = _read_rows(config.rows)
    rows = []
    for asked in cases(config):
        key = json.dumps(asked)
        if key not in known:
            known[key] = asked | measure(asked)
            _add_row(config.rows, known[key])
        log.info("%s", known[key])
        rows.append(known[key])
    config.out.write_text(document(rows))
    return rows


def cases(config: Config) -> Iterator[Row]:
    """What identifies each row, in order: the topology and options of `lm.Config`.

    Stages that an offload is not for are left out.
    """
    for topology in config.topologies:
        for size in config.sizes:
            for stage in config.stages:
                for offload in config.offloads:
                    if offload == "all" and stage != 3:
                        continue
                    yield {
                        "topology": topology,
                        "size": size,
                        "zero": stage,
                        "offload": offload,
                        "sequences": config.sequences,
                        "seq_len": config.seq_len,
                        "remat": config.remat,
                        "precision": config.precision,
                    }


def parse_topology(text: str) -> tuple[str, int]:
    """Reads a topology.

    Args:
      text: such as "v5e:2x4", or "2*v5e:2x4" for two slices.

    Returns:
      The name of a slice's topology and the number of slices.

    Raises:
      ValueError: for anything else.

    Example:
      >>> parse_topology("2*v5e:2x4")
      ('v5e:2x4', 2)
    """
    match = _TOPOLOGY.fullmatch(text)
    if match is None:
        raise ValueError(
            "a topology must be GENERATION:AxB, or SLICES*GENERATION:AxB, got"
            f" {text!r}. Write for example 'v5e:2x4' or '2*v5e:2x4'"
        )
    return match[2], int(match[1] or 1)


def describe_mesh(topology: str) -> Mesh:
    """The mesh of described TPUs: all along the data axis, those of a slice together.

    Args:
      topology: as of `parse_topology`.
    """
    name, slices = parse_topology(topology)
    options = {"num_slices": slices} if slices > 1 else {}
    described = topologies.get_topology_desc(name, "tpu", **options)
    devices = described.devices
    shape = (len(devices) // slices, 1)
    if slices > 1:
        grid = mesh_utils.create_hybrid_device_mesh(shape, (slices, 1), devices)
    else:
        grid = mesh_utils.create_device_mesh(shape, devices)
    return sj.make_mesh(Mesh(grid, (sj.DATA_AXIS, sj.MODEL_AXIS)))


def measure(asked: Row) -> Row:
    """What is predicted for a row, and what the compiler says.

    Args:
      asked: one of `cases`.

    Returns:
      The other entries of the row, as of `compile_or_not` too. Bytes are per device.
    """
    mesh = describe_mesh(asked["topology"])
    options = {k: v for k, v in asked.items() if k not in ("topology", "sequences")}
    batch_size = asked["sequences"] * mesh.size
    sizes = {"batch_size": batch_size, "eval_batch_size": batch_size}
    shape = str(as_mesh_shape(mesh))
    config = lm.from_anything(options | sizes | {"mesh": shape})
    program = lm.build(config, mesh)
    state = zero.abstract_state(program.plan)
    lowered = program.step.jitted.lower(state, abstract_batch(config, mesh))
    started = time.perf_counter()
    compiled, problem = compile_or_not(lowered)
    estimate = zero.estimate_memory(program.plan, config.microbatches)
    return {
        "mesh": shape,
        "parameters": program.model.parameter_count(),
        "estimate": asdict(estimate) | {"total": estimate.total},
        "predicted_wire": zero.predict_wire_bytes(program.plan).total,
        "seconds": round(time.perf_counter() - started, 1),
    } | (problem or _read_program(compiled, mesh))


def abstract_batch(config: lm.Config, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch of the config as shapes, split over the data axis."""
    sharding = jax.NamedSharding(mesh, jax.P(sj.DATA_AXIS))
    batch, length = config.batch_size, config.seq_len

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return {
        "tokens": array((batch, length + 1), jnp.uint8),
        "weights": array((batch, length), jnp.float32),
    }


def compile_or_not(lowered: Any) -> tuple[Any, Row]:
    """Compiles, if the memory of a device is enough and the compiler can.

    Returns:
      The program and nothing; or None and "needed", the GiB that it needs and that there
      are, or "refused", what the compiler cannot do.
    """
    try:
        return lowered.compile(), {}
    except jax.errors.JaxRuntimeError as error:
        if found := _TOO_LARGE.search(str(error)):
            return None, {"needed": [float(found[1]) * _GIB[found[2]], float(found[3])]}
        if found := _REFUSED.search(str(error)):
            return None, {"refused": found[1]}
        raise


def _read_program(compiled: Any, mesh: Mesh) -> Row:
    wire = profiling.wire_bytes(profiling.collectives(compiled, devices=mesh))
    return {
        "memory": asdict(profiling.memory(compiled)),
        "wire": wire.total,
        "wire_by_kind": dict(wire.by_kind),
        "unknown": len(wire.unknown),
    }


def _read_rows(path: Path | None) -> dict[str, Row]:
    """Rows of a file by what identifies them."""
    if path is None or not path.is_file():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    names = list(next(cases(Config())))
    return {json.dumps({name: row[name] for name in names}): row for row in rows}


def _add_row(path: Path | None, row: Row) -> None:
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def document(rows: list[Row]) -> str:
    """The text of docs/scale.md.

    Args:
      rows: of `main`.
    """
    versions = [f"{name} {_version(name)}" for name in ("jax", "libtpu")]
    return _TEXT.format(
        date=datetime.date.today().isoformat(),
        versions=", ".join(versions),
        sequences=_all(rows, "sequences"),
        seq_len=_all(rows, "seq_len"),
        remat=_all(rows, "remat"),
        precision=_all(rows, "precision"),
        table="\n".join([_line(_COLUMNS), _line(["---"] * len(_COLUMNS))])
        + "".join("\n" + _line(_cells(row)) for row in rows),
    )


_COLUMNS = (
    "TPUs",
    "mesh",
    "size",
    "parameters",
    "ZeRO",
    "state: plan",
    "state: compiled",
    "all: plan",
    "peak: compiled",
    "host",
    "fits",
    "wire: plan",
    "wire: compiled",
    "compiled in",
)

_OFFLOADS = {"none": "", "opt_state": ", offload", "all": ", offload all"}

_TEXT = """# The language model's training step on TPUs that were not there

Written by `python -m experiments.scale` on {date} with {versions}.
There was no TPU: the programs are those that TPUs would run; none was run. {sequences} sequence
of {seq_len} bytes per device, precision {precision}, remat {remat}, adamw.

{table}

Memory is in GiB per device, bytes on the wire in MB that a device sends per step.

- **state**: parameters and optimizer state on the device, as `zero.estimate_memory` plans them
  and as arguments of the program, with the batch. **all** adds gradients and what is gathered
  or streamed for a while; activations and the compiler's temporaries are in the **peak** only.
- **host**: bytes in the memory of the host; what is updated there counts as old and as new.
- **fits**: whether the compiler found room in a device's memory; if not, what it would need, or
  what it cannot do.
- **wire**: `zero.predict_wire_bytes`, and the collectives of the program, as on rings.

What is on the wire beyond the plan, of the size large, is the compiler's choice:

- On v5e:2x4, stages 1 and 2 sum one stack, of the matrices to queries, keys and values, by an
  all-reduce of which each device keeps a part: twice the bytes of a reduce-scatter.
- On two slices and on 16x16, reduce-scatters become all-reduces, those of two slices within
  each slice; what the slices send each other besides is counted too.
- On 16x16, stage 3 also gathers what projects attention by an all-reduce: a device keeps 8 of
  its 2048 columns, less than the 128 of a tile.
- Stage 0 with offload is short of memory: the compiler all-reduces gradients a second time for
  the update and does not keep them.
- Refused on 16x16 is the offload of the norms' scales: a device keeps 8 of their 2048 columns.
- With parameters offloaded too (offload all), what is left on the device is
  gradients, and what the compiler keeps for a while.
- With one microbatch, as here, stages 1 and 2 are the same program.
"""


def _cells(row: Row) -> list[str]:
    estimate, memory = row["estimate"], row.get("memory")
    state = estimate["params"] + estimate["opt_state"]
    host = estimate["host"] if memory is None else memory["host"]
    fits = "yes"
    if row.get("needed"):
        fits = "does not fit: needs {:.2f} of {:.2f}".format(*row["needed"])
    elif "refused" in row:
        fits = f"refused: {row['refused']}"
    return [
        row["topology"].replace("*", " x "),
        row["mesh"],
        row["size"],
        f"{row['parameters'] / 1e6:,.1f} M",
        f"{row['zero']}{_OFFLOADS[row['offload']]}",
        _gib(state),
        _gib(memory and memory["arguments"]),
        _gib(estimate["total"]),
        _gib(memory and memory["peak"]),
        _gib(host),
        fits,
        f"{row['predicted_wire'] / 1e6:,.1f}",
        _wire(row),
        f"{row['seconds']:.0f} s",
    ]


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**30:.3f}"


def _wire(row: Row) -> str:
    if "wire" not in row:
        return "-"
    ratio = row["wire"] / row["predicted_wire"]
    more = f", {row['unknown']} unknown" if row["unknown"] else ""
    return f"{row['wire'] / 1e6:,.1f} ({ratio:.2f}x{more})"


def _line(cells) -> str:
    return "| " + " | ".join(cells) + " |"


def _all(rows: list[Row], name: str) -> str:
    return ", ".join(dict.fromkeys(str(row[name]) for row in rows))


def _version(package: str) -> str:
    return importlib.metadata.version(package)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # there is no TPU to ask about
    configs.run_program(main, Config, "experiments.scale", __doc__)
