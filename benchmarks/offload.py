"""Where the state of Adam lies: on the devices, in the host's memory, on disk; and parameters.

    python benchmarks/offload.py

Steps of a residual network of about 21 M parameters at ZeRO stage 1, all variants in one
process, one step of each in turn:

memory         state on the devices
pinned_host    offload="opt_state"
stage 3        state and parameters on the devices, in parts
all            stage 3 with offload="all", parameters and state in the host's memory
disk           DiskOptimizer, reading and writing in threads; files in the system's cache
disk in turn   the same without threads: reads, updates and writes one after the other
disk cold      as disk; before each step the files leave the system's cache
disk mapped    as disk, but the file is memory that is copied from and to, without calls

Prints a table of medians, and as the last line JSON. On a CPU the host's memory is that of
the devices: pinned_host and all show only what it costs to stream.
"""

import argparse
import contextlib
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
import unittest.mock
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))


def make_params(layers, dim, vocabulary):
    """Random weights of the network."""
    random = np.random.default_rng(0)

    def normal(*shape):
        return random.normal(size=shape, scale=shape[-2] ** -0.5).astype(np.float32)

    return {
        "embedding": normal(vocabulary, dim),
        "blocks": {
            "w1": normal(layers, dim, 4 * dim),
            "w2": normal(layers, 4 * dim, dim),
        },
    }


def loss(params, batch):
    """Squares of what comes out, of which each layer adds a part."""
    import jax.numpy as jnp

    from shardjax.remat import scan_layers
    from shardjax.sharded import gather

    def layer(x, layer):
        layer = gather(layer)
        return x + jnp.tanh(x @ layer["w1"]) @ layer["w2"]

    x = scan_layers(layer, params["embedding"][batch], params["blocks"])
    return jnp.sum(jnp.square(x)), jnp.float32(len(batch))


def drop_from_cache(folder):
    """Lets the next reads of files come from the disk."""
    for path in Path(folder).glob("*.shardjax-state"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def mapped_files():
    """A stand-in for the class of the files, of memory mapped into the process."""
    from shardjax.zero.disk_file import StateFile

    class MappedFile(StateFile):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            os.ftruncate(self._file, self._offsets[-1])
            self._map = mmap.mmap(self._file, self._offsets[-1])

        def read(self, group):
            start = time.perf_counter()
            at, end = self._offsets[group : group + 2]
            data = np.frombuffer(self._map, np.uint8, end - at, at).copy()
            self.traffic.read_bytes += end - at
            self.traffic.read_s += time.perf_counter() - start
            return data

        def write(self, group, parts):
            start = time.perf_counter()
            at = self._offsets[group]
            for part in parts:
                data = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
                np.frombuffer(self._map, np.uint8, data.nbytes, at)[:] = data
                at += data.nbytes
            self.traffic.written_bytes += at - self._offsets[group]
            self.traffic.write_s += time.perf_counter() - start

    return unittest.mock.patch("shardjax.zero.disk_state.StateFile", MappedFile)


def main(a):
    """Times all variants."""
    import optax

    import shardjax as sj
    from shardjax import zero

    sj.ensure_devices(a.mesh)
    mesh = sj.make_mesh(a.mesh)
    params, tx = make_params(a.layers, a.dim, a.vocabulary), optax.adamw(1e-3)
    batch = np.random.default_rng(1).integers(0, a.vocabulary, a.batch)
    folders: dict[str, str] = {}
    states, steps = {}, {}
    with contextlib.ExitStack() as stack:
        for name, stage, offload in (
            ("memory", a.stage, "none"),
            ("pinned_host", a.stage, "opt_state"),
            ("stage 3", 3, "none"),
            ("all", 3, "all"),
        ):
            plan = zero.plan_zero(
                params, tx, mesh, stage, blocks=["blocks"], offload=offload
            )
            states[name] = zero.init_state(params, tx, plan)
            steps[name] = zero.make_step(loss, tx, plan)
        plan = zero.plan_zero(params, tx, mesh, a.stage, blocks=["blocks"])
        for name in ("disk", "disk in turn", "disk cold", "disk mapped"):
            files = (
                mapped_files() if name == "disk mapped" else contextlib.nullcontext()
            )
            folders[name] = stack.enter_context(tempfile.TemporaryDirectory(dir=a.dir))
            with files:
                optimizer = zero.DiskOptimizer(
                    tx,
                    plan,
                    folders[name],
                    group_bytes=a.group_mb << 20,
                    prefetch=name != "disk in turn",
                )
            stack.enter_context(optimizer)
            states[name] = optimizer.init_state(params)
            steps[name] = zero.make_disk_step(loss, optimizer)
        results = time_all(a, steps, states, folders, batch)
    count = sum(x.size for x in jax.tree.leaves(params))
    print(f"{count / 1e6:.1f} M parameters, stage {a.stage}, {a.mesh}")
    for name, row in results.items():
        print(f"{name:13}", "  ".join(f"{k} {v:9.3f}" for k, v in row.items()))
    print(json.dumps({"parameters": count, **vars(a), "results": results}))


def time_all(a, steps, states, folders, batch):
    """Medians of each variant's steps, one of each in turn."""
    rows: dict[str, list[dict]] = {name: [] for name in steps}
    for i in range(a.warm + a.steps):
        for name, step in steps.items():
            if name == "disk cold":
                drop_from_cache(folders[name])
            start = time.perf_counter()
            states[name], info = step(states[name], batch)
            jax.block_until_ready((states[name], info))
            row = {"step_ms": 1e3 * (time.perf_counter() - start)}
            if "disk_read_s" in info:
                read, written = info["disk_read_s"], info["disk_write_s"]
                row |= {
                    "wait_ms": 1e3 * info["disk_wait_s"],
                    "read_gb_s": info["disk_read_bytes"] / max(read, 1e-9) / 1e9,
                    "write_gb_s": info["disk_written_bytes"] / max(written, 1e-9) / 1e9,
                    "moved_mb": (info["disk_read_bytes"] + info["disk_written_bytes"])
                    / 1e6,
                }
            if i >= a.warm:
                rows[name].append(row)
    return {
        name: {k: statistics.median(r[k] for r in found) for k in found[0]}
        for name, found in rows.items()
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", default="2x1")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--group-mb", type=int, default=40)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--dir", help="where the files go; default that of tempfile")
    main(parser.parse_args())
