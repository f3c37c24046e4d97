"""An optimizer's state on disk, updated a group of layers at a time (ZeRO-Infinity's idea).

A step first takes the gradients. Then, group by group, the state is read, put on the
devices, updated with its parameters, and written back; threads read the next group and
write the last one meanwhile, and read the first group again while the next gradients are
computed. RAM holds three groups, the devices one, old and new.

The files belong to the parameters of this process: they are removed at the end. What is to
outlive it goes into a checkpoint by `DiskOptimizer.read`.
"""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from shardjax.folders import OwnFolder
from shardjax.zero.checks import check_optimizer
from shardjax.zero.disk_file import (
    PATTERN,
    ArrayOnDisk,
    DiskStateError,
    StateFile,
    Traffic,
)
from shardjax.zero.disk_groups import Group, make_groups
from shardjax.zero.opt_state import check_opt_state
from shardjax.zero.piecewise import split_piecewise
from shardjax.zero.plan import LeafPlan, ZeroPlan
from shardjax.zero.step import ZeroState, init_state


class DiskOptimizer:
    """An optimizer whose state lies in a folder, for `shardjax.zero.make_disk_step`.

    Close it at the end, or use it in a `with` statement.

    Args:
      tx: the optimizer of the plan; one that can update its parameters in pieces.
      plan: where parameters and gradients lie, and how state is split on the devices.
      folder: for the files, of this process alone; made if it is not there.
      group_bytes: of state to move at a time; a single layer or parameter may be more.
      prefetch: whether threads read and write while the devices compute.

    Raises:
      PiecewiseError: if the optimizer cannot update its parameters in pieces.
      ValueError: for a plan that keeps the state on the host, or a bad `group_bytes`.
      OSError: if the folder cannot be written to or is in use.

    Example:
      >>> import tempfile, shardjax as sj
      >>> from shardjax import zero
      >>> def loss(params, batch):
      ...     return jnp.sum((batch @ params["w"]) ** 2), jnp.float32(len(batch))
      >>> params, tx = {"w": np.ones((8, 2), np.float32)}, optax.adam(1e-3)
      >>> plan = zero.plan_zero(params, tx, sj.make_mesh("1x1"), 1)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with DiskOptimizer(tx, plan, folder) as optimizer:
      ...         step = zero.make_disk_step(loss, optimizer)
      ...         state = optimizer.init_state(params)
      ...         state, info = step(state, np.ones((4, 8), np.float32))
      >>> info["disk_read_bytes"], info["disk_wait_s"] >= 0
      (128, True)
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        plan: ZeroPlan,
        folder: str | os.PathLike,
        *,
        group_bytes: int = 256 << 20,
        prefetch: bool = True,
    ):
        if group_bytes < 1:
            raise ValueError(f"`group_bytes` must be positive, got {group_bytes}")
        if plan.offloaded:
            raise ValueError(
                "a DiskOptimizer needs a plan with offload='none', as the state lies on"
                f" disk, got one with offload={plan.offload!r}"
            )
        check_optimizer(plan, tx)
        self.plan = plan
        self._leaves: list[LeafPlan] = [p for p in plan.leaves if p.trained]
        self._pieces = split_piecewise(tx, plan.abstract_trained)
        self._likes, _ = self._pieces.split(plan.abstract_opt_state)
        self._nothing = [
            [jnp.zeros((0,) * x.ndim, x.dtype) for x in k] for k in self._likes
        ]
        self.groups = make_groups(plan, self._likes, group_bytes)
        self._arrays = [self._lay_out(group) for group in self.groups]
        self._compiled: dict[Any, Callable] = {}
        self._failure: str | None = "has no state yet. Call its `init_state` first"
        self._folder = OwnFolder(
            folder, PATTERN, "the optimizer's state", "a DiskOptimizer"
        )
        try:
            sizes = [sum(x.nbytes for k in a for x in k) for a in self._arrays]
            self._file = StateFile(self._folder, sizes)
        except BaseException:
            self._folder.close()
            raise
        self._closed = False
        self._prefetch = prefetch
        self._reader = ThreadPoolExecutor(1, "disk_state_read")
        self._writer = ThreadPoolExecutor(1, "disk_state_write")
        self._reads: dict[int, Future] = {}
        self._writes: dict[int, Future] = {}

    def __enter__(self) -> "DiskOptimizer":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _lay_out(self, group: Group) -> list[list[ArrayOnDisk]]:
        def one(leaf: LeafPlan, like):
            shape = leaf.shape if group.rows is None else (group.rows, *leaf.shape[1:])
            sharding = jax.NamedSharding(self.plan.mesh, leaf.split_spec)
            return ArrayOnDisk(shape, like.dtype, sharding)

        return [
            [one(self._leaves[i], like) for like in self._likes[i]]
            for i in group.members
        ]

    @property
    def traffic(self) -> Traffic:
        """Bytes read and written so far, and the time that it took."""
        return replace(self._file.traffic)

    def init_state(self, params: PyTree, opt_state: PyTree | None = None) -> ZeroState:
        """The state before the first step, and the files with the optimizer's.

        Args:
          params: the parameters, as planned for, or a function that makes them.
          opt_state: of the optimizer, whole arrays as from `read`; None for that of new
            parameters.

        Returns:
          A state whose `opt_state` has the counts and the like, and arrays without
          elements in place of what lies on disk.

        Raises:
          ValueError: if the parameters or the state are not those of the plan.
          OSError: if the files cannot be written.
        """
        if opt_state is not None:
            check_opt_state(self.plan.abstract_opt_state, opt_state)
        nothing = optax.EmptyState()
        plan = replace(self.plan, opt_specs=nothing, abstract_opt_state=nothing)
        state = init_state(params, optax.identity(), plan)
        trained = self._trained(state.params)
        given = None if opt_state is None else self._pieces.split(opt_state)
        self._drain()
        self._failure = "has been given new state, which failed midway. Give it again"
        for number in range(len(self.groups)):
            if given is None:
                kept = self._new_state(number, trained)
            else:
                kept = self._given_state(number, given[0])
            self._write(number, kept)
        self._finish_writes()
        empty: list = [None] * len(trained)
        everywhere = jax.NamedSharding(self.plan.mesh, jax.P())
        shared = self._pieces.init(empty)[1] if given is None else given[1]
        shared = jax.device_put(shared, everywhere)
        self._failure = None
        return state.replace(opt_state=self._pieces.join(self._nothing, shared))

    def _new_state(self, number: int, params: list) -> list:
        group = self.groups[number]

        def make(params):
            pieces = [group.cut(x) for x in params]
            kept, _ = self._pieces.init(self._spread(group, pieces))
            return [kept[i] for i in group.members]

        shardings = jax.tree.map(lambda a: a.sharding, self._arrays[number])
        jitted = jax.jit(make, out_shardings=shardings)
        return jitted([params[i] for i in group.members])

    def _given_state(self, number: int, given: list[list]) -> list:
        group = self.groups[number]
        return [
            [
                jax.device_put(np.asarray(group.cut(x)), a.sharding)
                for x, a in zip(given[i], arrays, strict=True)
            ]
            for i, arrays in zip(group.members, self._arrays[number], strict=True)
        ]

    def _trained(self, params: PyTree) -> list:
        leaves = jax.tree.leaves(params)
        return [x for x, p in zip(leaves, self.plan.leaves, strict=True) if p.trained]

    def _spread(self, group: Group, values) -> list:
        """A value for each trained parameter, None for those of other groups."""
        found = dict(zip(group.members, values, strict=True))
        return [found.get(i) for i in range(len(self._leaves))]

    def update(self, grads: list, opt_state: PyTree, params: PyTree):
        """Moves parameters by their gradients; donates the parameters.

        Args:
          grads: of the trained parameters, in their order.
          opt_state, params: of the state.

        Returns:
          The new parameters and `opt_state`.

        Raises:
          DiskStateError: if this or an earlier update failed midway, or a file has been
            cut off.
          OSError: if the files cannot be read or written.
        """
        self.check()
        values = self._trained(params)
        _, shared = self._pieces.split(opt_state)
        after, busy = shared, grads
        with self._marked():
            for number, group in enumerate(self.groups):
                kept = self._fetch(number, busy)
                chosen = [[x[i] for i in group.members] for x in (values, grads)]
                new, kept, after = self._update_fn(number)(
                    *chosen, kept, shared, group.start
                )
                for i, x in zip(group.members, new, strict=True):
                    values[i] = x
                self._write(number, kept)
                busy = new
            if self._prefetch and self.groups:
                self._start_read(0)
        moved = iter(values)
        params = self.plan.tree(
            next(moved) if leaf.trained else x
            for leaf, x in zip(self.plan.leaves, jax.tree.leaves(params), strict=True)
        )
        return params, self._pieces.join(self._nothing, after)

    def _update_fn(self, number: int) -> Callable:
        """The compiled update of a group; groups of the same shapes share it."""
        group = self.groups[number]
        key = group.members, group.rows
        if key not in self._compiled:
            leaves = [self._leaves[i] for i in group.members]
            mesh = self.plan.mesh
            split = [jax.NamedSharding(mesh, p.split_spec) for p in leaves]
            specs = [jax.NamedSharding(mesh, p.spec) for p in leaves]
            kept = jax.tree.map(lambda a: a.sharding, self._arrays[number])

            @partial(
                jax.jit,
                donate_argnums=(0, 2),
                out_shardings=(specs, kept, jax.NamedSharding(mesh, jax.P())),
            )
            def update(params, grads, kept, shared, start):
                place = jax.lax.with_sharding_constraint
                mine = [
                    place(group.cut(p, start), s)
                    for p, s in zip(params, split, strict=True)
                ]
                pieces = (
                    self._spread(group, [group.cut(g, start) for g in grads]),
                    self._spread(group, kept),
                    shared,
                    self._spread(group, mine),
                )
                moved, kept, shared = self._pieces.update(*pieces)
                params = [
                    group.put(p, place(place(moved[i], a), b), start)
                    for i, p, a, b in zip(
                        group.members, params, split, specs, strict=True
                    )
                ]
                return params, [kept[i] for i in group.members], shared

            self._compiled[key] = update
        return self._compiled[key]

    def check(self) -> None:
        """Raises DiskStateError if there is no state that can be used."""
        if self._failure is not None:
            raise DiskStateError(f"this DiskOptimizer {self._failure}")

    @contextmanager
    def _marked(self) -> Iterator[None]:
        """Whatever ends an update midway leaves the mark that it did."""
        self._failure = (
            "has failed in the middle of an update: parameters and state on disk are of"
            " different steps. Start again from a checkpoint, by `init_state`"
        )
        yield
        self._failure = None

    def _fetch(self, number: int, busy) -> list[list[jax.Array]]:
        """State of a group on the devices; `busy` is what they compute just now."""
        if number not in self._reads:
            self._start_read(number)
        jax.block_until_ready(busy)
        start = time.perf_counter()
        data = self._reads.pop(number).result()
        self._file.traffic.wait_s += time.perf_counter() - start
        if self._prefetch and number + 1 < len(self.groups):
            self._start_read(number + 1)
        return [[a.to_devices(x) for a, x in z] for z in self._cut(number, data)]

    def _cut(self, number: int, data: np.ndarray) -> Iterator[list]:
        """The arrays of a group, each with its bytes."""
        start = 0
        for arrays in self._arrays[number]:
            cut = []
            for a in arrays:
                cut.append((a, data[start : start + a.nbytes]))
                start += a.nbytes
            yield cut

    def _start_read(self, number: int) -> None:
        def read(written: Future | None):
            if written is not None:
                written.result()
            return self._file.read(number)

        self._reads[number] = self._reader.submit(read, self._writes.get(number))

    def _write(self, number: int, kept: list[list[jax.Array]]) -> None:
        def write():
            parts = zip(self._arrays[number], kept, strict=True)
            pairs = [p for a, x in parts for p in zip(a, x, strict=True)]
            self._file.write(number, [part for a, x in pairs for part in a.parts(x)])

        self._finish_writes()  # RAM is for one at a time
        self._writes = {number: self._writer.submit(write)}
        if not self._prefetch:
            self._finish_writes()

    def _finish_writes(self) -> None:
        for write in self._writes.values():
            write.result()

    def _drain(self) -> None:
        """Waits for the threads, whatever they have met, and forgets what they read."""
        for future in [*self._reads.values(), *self._writes.values()]:
            future.exception()
        self._reads, self._writes = {}, {}

    def read(self, state: ZeroState) -> PyTree:
        """The state of the optimizer as whole arrays in RAM, such as for a checkpoint.

        Args:
          state: after the last step.

        Returns:
          Like the optimizer's state: numpy arrays, and shared ones as they are.

        Raises:
          DiskStateError: if there is none, or it is half updated.
        """
        self.flush()
        whole = [[np.empty(x.shape, x.dtype) for x in kept] for kept in self._likes]
        for number, group in enumerate(self.groups):
            data = self._file.read(number)
            for i, arrays in zip(group.members, self._cut(number, data), strict=True):
                for out, (a, part) in zip(whole[i], arrays, strict=True):
                    group.cut(out)[...] = a.to_host(part)
        _, shared = self._pieces.split(state.opt_state)
        return self._pieces.join(whole, shared)

    def flush(self) -> None:
        """Waits until the disk has all that was written.

        Raises:
          DiskStateError: if there is no state that can be used.
          OSError: if something could not be written.
        """
        self.check()
        with self._marked():
            self._finish_writes()
            self._file.flush()

    def close(self) -> None:
        """Ends the threads, removes the files and frees the folder; twice does no harm."""
        if self._closed:
            return
        self._closed = True
        self._failure = "has been closed. Make a new one"
        self._reader.shutdown(wait=True)
        self._writer.shutdown(wait=True)
        self._file.close()
        self._folder.close()
