"""A program as one of several processes."""

import dataclasses
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import shardjax as sj
from experiments import config as configs
from experiments.checkpoints import resumes
from shardjax import processes
from shardjax.data import BlockShare, Share
from shardjax.export.rows import versions
from shardjax.together import PeerError

C = TypeVar("C", bound="ProcessConfig")


@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """Which process of a run this is."""

    coordinator: str | None = None
    """HOST:PORT of process 0, a free port there; where SLURM, mpirun, Kubernetes or a TPU pod
    starts the processes, none of these three options is needed."""
    num_processes: int | None = None
    """How many processes the run has; the mesh spans the devices of all."""
    process_id: int | None = None
    """The number of this process, from 0."""
    heartbeat: float = 20.0
    """Seconds without a sign of life after which a process counts as dead; the others then end
    within as many again."""


def is_first() -> bool:
    """Whether this process is the one that prints and writes."""
    return processes.process_index() == 0


def share(mesh: Any) -> Share | None:
    """Which part of each batch this process reads; None if it is the only one."""
    count = processes.process_count()
    if count == 1:
        return None
    return Share(processes.process_index(), count, mesh.size // count)


def block_share(mesh: Any, batch_size: int, blocks: int) -> BlockShare:
    """Which part of each batch this process reads, by its speed.

    Args:
      mesh: of all devices.
      batch_size: rows of a batch.
      blocks: of each process, on average.

    Raises:
      ValueError: if there is only one process, or a batch has not so many rows.
    """
    own = share(mesh)
    if own is None:
        raise ValueError(
            "`data.balance` deals batches to several processes, and this run has one. Leave"
            " it out, or start more"
        )
    if batch_size < mesh.size * blocks:
        raise ValueError(
            f"`data.balance` must leave each of {mesh.size} devices a row of a block, got"
            f" {blocks} blocks with `batch_size` {batch_size}. Give"
            f" {batch_size // mesh.size} blocks at most, or larger batches"
        )
    return BlockShare(own, -(-batch_size // (mesh.size * blocks)))


def check_same_data(**facts: Any) -> None:
    """Checks that all processes have found the same data: their files may lie on storage
    that only looks the same.

    Args:
      facts: about the data, as JSON has them.

    Raises:
      ValueError: if they differ; it names them.
    """
    try:
        processes.check_agreement({"data": facts})
    except ValueError as error:
        raise ValueError(
            f"{error}. The files of --data.path are to be the same for all processes"
        ) from None


def _reserve_stdout() -> None:
    """Keeps stdout for what this program prints: collectives on CPUs write to it that they
    are connected, which goes to stderr from now on."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(own, "w", buffering=1)


@contextmanager
def joined(config: C) -> Iterator[C]:
    """A context in which this process has joined the others, and has its devices.

    Args:
      config: of the program, with `mesh`, `out`, `checkpoint` and `resume`.

    Yields:
      What this process goes by: only the first one has a folder to write to.

    Where there are several processes, none of them waits for one that is gone or has failed:
    see `processes.watch`.

    Raises:
      ValueError: if the processes have been started with different options or versions, or
        the mesh cannot be divided among them.
    """
    processes.start_processes(
        config.coordinator,
        config.num_processes,
        config.process_id,
        heartbeat=config.heartbeat,
    )
    several = processes.process_count() > 1
    if several:
        _reserve_stdout()
        facts = {
            "config": {
                name: value
                for name, value in configs.to_dict(config).items()
                if name not in ("process_id", "coordinator", "out")
            },
            "versions": versions(
                ("shardjax", "jax", "jaxlib", "flax", "optax", "numpy")
            ),
            "resumes": resumes(config),
        }
        processes.check_agreement(facts)
    own: Any = config
    sj.ensure_devices(own.mesh)
    if not is_first():
        for ours in ("experiments", "shardjax"):
            logging.getLogger(ours).setLevel(logging.WARNING)
        own = dataclasses.replace(own, out=None, profile=None)
    with processes.watch():
        try:
            yield own
        except (OSError, ValueError, PeerError) as error:  # what the user can mend
            if not several:
                raise
            raise SystemExit(f"process {processes.process_index()}: {error}") from None
