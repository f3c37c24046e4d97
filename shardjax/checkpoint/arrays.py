"""Arrays of a state in files: written by Orbax in the background, restored anywhere.

A tree is stored as a flat mapping from paths to arrays, so that what a checkpoint holds
depends on no class and on no mesh. Orbax is imported where it is used, not with this
module: it takes a second.
"""

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from shardjax.checkpoint.backend import Quiet, first_line, make_handler, stored_name
from shardjax.checkpoint.leaves import (
    check_fit,
    describe as describe,
    describe_leaf,
    flatten as flatten,
    flatten_target,
    is_empty,
    is_ignored,
    is_key,
    leaf_kind,
)

# Read at a time, by all devices: reading needs as much again for a while.
_BATCH_BYTES = 256 << 20
# Whole arrays as one chunk would be read whole by every device that wants a part of them.
_CHUNK_BYTES = 16 << 20
_ASK_EVERY = 0.2  # seconds
_NOT_THERE = "not there"


class ArrayWriter:
    """Writes trees of arrays into folders, one at a time, in the background.

    Call `wait` or `close` before the program ends: what is not written by then is lost.

    Args:
      timeout: seconds after which a write counts as failed.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder, ArrayWriter() as writer:
      ...     writer.save(Path(folder) / "arrays", {"w": jnp.arange(3)})
      ...     writer.wait()
      ...     described = describe({"w": jnp.arange(3)})
      ...     restore(Path(folder) / "arrays", described, {"w": np.zeros(3, np.int32)})
      {'w': array([0, 1, 2], dtype=int32)}
    """

    def __init__(self, *, timeout: float = 3600.0):
        if not timeout > 0:
            raise ValueError(f"`timeout` must be positive seconds, got {timeout}")
        self._timeout = timeout
        self._checkpointer: Any = None
        self._path: Path | None = None  # of the save in flight
        self._quiet = Quiet()

    def save(self, path: str | os.PathLike, tree: PyTree) -> None:
        """Starts to write a tree; it may be donated or changed once this returns.

        Waits for the save before.

        Args:
          path: a folder that does not exist.
          tree: as of `flatten`. All processes give the same; what is not a jax.Array is
            written by the first one.

        Raises:
          OSError: if the save before failed; nothing is written then.
          FileExistsError: if there is something at `path`.
          TypeError, ValueError: as of `flatten`; also, where there are several processes,
            for a jax.Array that is not on the devices of all.
        """
        self.wait()
        path = Path(path).absolute()
        if jax.process_index() == 0 and path.exists():
            raise FileExistsError(
                f"arrays are written into a new folder, but there is something at {path}."
                " Give another path, or remove it"
            )
        stored = {
            stored_name(name): _stored_value(name, x)
            for name, x in flatten(tree).items()
            if np.size(x)  # Orbax refuses to write nothing
        }
        if not stored:
            path.mkdir(parents=True, exist_ok=True)
            return
        import orbax.checkpoint as ocp

        args = ocp.args.PyTreeSave(
            stored,
            save_args={
                name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in stored
            },
        )
        self._quiet.start()
        self._path = path
        try:
            if self._checkpointer is None:
                # A folder made in the background that cannot be made would leave threads
                # that wait for it for minutes.
                options = ocp.options.AsyncOptions(
                    timeout_secs=math.ceil(self._timeout),
                    create_directories_asynchronously=False,
                )
                self._checkpointer = ocp.AsyncCheckpointer(
                    make_handler(), async_options=options
                )
            self._checkpointer.save(path, args=args)
        except Exception as error:
            self._discard()
            raise _write_error(path, error) from error

    def wait(self, until: Callable[[], bool] = lambda: False) -> None:
        """Waits until all is written, by all processes.

        Args:
          until: asked now and then; once it is true, another process will not end its
            part, for which Orbax would wait as long as `timeout`. This returns then, and
            what has been written is of no use.

        Raises:
          OSError: if that failed; naming the folder.
        """
        if self._path is None:
            return
        path = self._path
        try:
            if jax.process_count() == 1:
                self._checkpointer.wait_until_finished()
            elif not self._ends(until):
                self._checkpointer, self._path = None, None  # its thread waits on
                self._quiet.stop()
                return
        except Exception as error:
            self._discard()
            raise _write_error(path, error) from error
        self._path = None
        self._quiet.stop()

    def _ends(self, until: Callable[[], bool]) -> bool:
        """Waits until the save has ended, and says so; or until something else has."""
        found: list[Exception | None] = []
        checkpointer = self._checkpointer

        def wait() -> None:
            try:
                checkpointer.wait_until_finished()
                found.append(None)
            except Exception as error:
                found.append(error)

        waiting = threading.Thread(target=wait, name="wait for Orbax", daemon=True)
        waiting.start()
        while not found:
            waiting.join(_ASK_EVERY)
            if not found and until():
                return False
        if found[0] is not None:
            raise found[0]
        return True

    def close(self) -> None:
        """Waits, and ends the threads.

        Raises:
          OSError: as of `wait`.
        """
        try:
            self.wait()
        finally:
            self._discard()

    def _discard(self) -> None:
        """Ends the threads, after a failure too; the next save starts new ones."""
        checkpointer, self._checkpointer, self._path = self._checkpointer, None, None
        try:
            if checkpointer is not None:
                with Quiet():
                    checkpointer.close()
        finally:
            self._quiet.stop()

    def __enter__(self) -> "ArrayWriter":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def restore(
    path: str | os.PathLike,
    described: Mapping[str, Mapping[str, Any]],
    target: PyTree,
    *,
    ignore: Sequence[str] = (),
    cast: bool = False,
    prefix: str = "",
    lengths: Mapping[str, int] | None = None,
) -> PyTree:
    """Reads a tree, onto the devices of the target, wherever it lay when it was saved.

    Args:
      path: the folder that it was written to.
      described: what `describe` said of it.
      target: a tree of the wanted structure. Its leaves are arrays and numbers, whose
        kind, dtype, sharding and kind of memory the result takes, or jax.ShapeDtypeStruct
        with a sharding.
      ignore: patterns of paths, as "opt_state/*", of leaves that are not read: the
        result has a copy of the target's value, if the target has such a leaf.
      cast: allow other dtypes, among floats, and among integers where all values fit.
      prefix: the target is the part of the checkpoint below this path.
      lengths: by path, how many entries of dim 0 of a leaf of the target count. What lies
        behind them is padding, of which there may be more or less than in the files; it
        reads zeros, or what was there. `described` has the shapes without it.

    Returns:
      A tree with the structure of the target. No two of its leaves share memory.

    Raises:
      ValueError: listing all leaves that only one of both has, or that have another shape
        or dtype; or if an integer does not fit.
      OSError: if the files cannot be read.

    Example: see `ArrayWriter`.
    """
    path, prefix = Path(path).absolute(), prefix.strip("/")
    if prefix:
        described = {
            name: leaf
            for name, leaf in described.items()
            if name == prefix or name.startswith(prefix + "/")
        }
    wanted = flatten_target(target, prefix)
    lengths = lengths or {}
    check_fit(str(path), described, wanted, ignore, cast, lengths)
    ignored = {name for name in wanted if is_ignored(name, ignore)}
    read = {
        name: _Reading(name, described[name], x, name in lengths)
        for name, x in wanted.items()
        if name not in ignored and not is_empty(described[name])
    }
    result = {}
    for batch in _batches(read):
        values = _read(path, batch)
        for name, reading in batch.items():
            result[name] = reading.finish(values.pop(name))
    for name, x in wanted.items():
        if name in ignored:
            result[name] = _copy(x)
        elif name not in result:
            result[name] = _empty(x)
    leaves = [result[name] for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(target), leaves)


class _Reading:
    """How one leaf is read: as what Orbax is to give it, and what becomes of that."""

    def __init__(self, path: str, stored: Mapping[str, Any], target: Any, padded: bool):
        self.path, self.target, self.padded = path, target, padded
        new = describe_leaf(target)
        self.key = is_key(new["dtype"])
        self.kind = new["kind"]
        self.shape, self.dtype = tuple(new["shape"]), new["dtype"]
        if self.key:
            data = _key_data(target)
            self.shape, self.dtype = data.shape, str(data.dtype)
        changed = stored["dtype"] != new["dtype"]
        # integers are looked at before they are cast, which would wrap them
        self.checked = changed and jnp.issubdtype(jnp.dtype(self.dtype), jnp.integer)
        self.free = _is_free(target)
        self.on_device = self.kind == "jax" and not self.checked and not self.free

    def restore_args(self, ocp):
        """What Orbax is to do."""
        if not self.on_device:
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(
            sharding=self.target.sharding,
            global_shape=self.shape,
            dtype=jnp.dtype(self.dtype),
            strict=not self.padded,
        )

    def finish(self, value):
        """The leaf, from what Orbax has read."""
        if self.on_device:
            return self._as_key(_own(value))
        value = np.asarray(value)
        dtype = jnp.dtype(self.dtype)
        if self.checked:
            _check_range(self.path, value, dtype)
        value = value.astype(dtype, copy=False)
        if self.padded:
            value = value[: self.shape[0]]
            more = self.shape[0] - len(value)
            value = np.pad(value, [(0, more)] + [(0, 0)] * (value.ndim - 1))
        if self.free:
            return self._as_key(jnp.array(value))
        if self.kind == "jax":
            return jax.device_put(value, self.target.sharding, may_alias=False)
        if self.kind == "numpy":
            return value
        return value[()] if self.kind == "numpy_scalar" else value.item()

    def _as_key(self, value: jax.Array) -> jax.Array:
        if not self.key:
            return value
        return jax.random.wrap_key_data(value, impl=_key_impl(self.target))


def _batches(read: Mapping[str, _Reading]) -> Iterator[dict[str, _Reading]]:
    """Parts of what is to be read, of about `_BATCH_BYTES` each."""
    batch, size = {}, 0
    for name, reading in read.items():
        batch[name] = reading
        size += math.prod(reading.shape) * jnp.dtype(reading.dtype).itemsize
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = {}, 0
    if batch:
        yield batch


def _read(path: Path, read: Mapping[str, _Reading]) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    names = {stored_name(name): name for name in read}
    args = ocp.args.PyTreeRestore(
        item=dict.fromkeys(names, _NOT_THERE),
        restore_args={
            stored: read[name].restore_args(ocp) for stored, name in names.items()
        },
        partial_restore=True,
    )
    try:
        with Quiet(), ocp.Checkpointer(make_handler()) as checkpointer:
            values = checkpointer.restore(path, args=args)
    except (jax.errors.JaxRuntimeError, MemoryError):
        raise  # no fault of the files
    except Exception as error:
        text = _chain_text(error)
        found = [name for stored, name in names.items() if f'"{stored}/' in text]
        raise _read_error(path, found, first_line(error)) from error
    for stored, name in names.items():
        # Orbax gives what is not there back as it was asked for
        if values[stored] is _NOT_THERE:
            raise _read_error(path, [name], "the files do not hold it")
    return {name: values[stored] for stored, name in names.items()}


def _stored_value(path: str, x: Any) -> Any:
    if not isinstance(x, jax.Array):
        return np.array(x)  # a copy: numpy arrays may be changed in place
    if jax.process_count() > 1 and x.is_fully_addressable:
        raise ValueError(
            f"{path} must be on the devices of all processes, got an array on"
            f" {x.sharding}. Put it on the mesh, or make it a numpy array"
        )
    return jax.random.key_data(x) if is_key(str(x.dtype)) else x


def _key_impl(x: Any) -> Any:
    found = []
    struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), struct)
    return found[0]


def _key_data(x: Any) -> jax.ShapeDtypeStruct:
    struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.eval_shape(jax.random.key_data, struct)


def _own(x: jax.Array) -> jax.Array:
    """The array in memory of its own.

    On the CPU, arrays may share the memory that was read into, all replicas of one even.
    A step that they are donated to could not reuse it.
    """
    if next(iter(x.sharding.device_set)).platform != "cpu":
        return x
    return jax.device_put(x, x.sharding, may_alias=False)


def _copy(x: Any) -> Any:
    if isinstance(x, jax.Array):
        return jax.device_put(x, x.sharding, may_alias=False)
    return x.copy() if leaf_kind(x) == "numpy" else x


def _empty(x: Any) -> Any:
    if leaf_kind(x) != "jax":
        return np.zeros(x.shape, x.dtype)
    key = is_key(str(x.dtype))
    like = _key_data(x) if key else x
    zeros: Any = np.zeros(like.shape, like.dtype)
    zeros = jnp.array(zeros) if _is_free(x) else jax.device_put(zeros, x.sharding)
    return jax.random.wrap_key_data(zeros, impl=_key_impl(x)) if key else zeros


def _is_free(x: Any) -> bool:
    """Whether JAX may move an array to other arrays' devices, as a step count's."""
    return isinstance(x, jax.Array) and not x.committed


def _check_range(path: str, values: np.ndarray, dtype) -> None:
    bounds = jnp.iinfo(dtype)
    low, high = int(values.min()), int(values.max())
    if low < int(bounds.min) or high > int(bounds.max):
        raise ValueError(
            f"{path} must fit into {dtype}, {bounds.min} to {bounds.max}, to be cast, got"
            f" values from {low} to {high}. Restore it as {values.dtype}"
        )


def _read_error(path: Path, leaves: list[str], why: str) -> OSError:
    leaf = f" ({leaves[0]})" if leaves else ""
    return OSError(
        f"the arrays in {path}{leaf} must be as they were written, but cannot be read:"
        f" {why}. Restore another checkpoint"
    )


def _write_error(path: Path, error: Exception) -> OSError:
    return OSError(
        f"the arrays of {path} must be written in full, but that failed:"
        f" {first_line(error)}. See that there is room and that the folder can be"
        " written to, then save again"
    )


def _chain_text(error: BaseException | None) -> str:
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__ or error.__context__
    return "\n".join(texts)
