"""How Orbax is used: in which format, under which names, and without its log."""

import logging
import os
from urllib.parse import quote

import jax
import numpy as np


def make_handler():
    """Orbax's handler of trees, for both ways.

    OCDBT keeps a handful of files per process, however many arrays there are, and reads a
    part of an array without the rest. Compression costs more time than it saves: floats
    shrink by a tenth at best. Orbax's files of shardings and of per-process metadata are
    left out: our own manifest has what is needed. Replicas are written in parts by all
    processes; within one it would only make more chunks.
    """
    import orbax.checkpoint as ocp

    types = ocp.type_handlers
    registry = types.create_type_handler_registry(
        (
            jax.Array,
            types.ArrayHandler(
                use_replica_parallel=jax.process_count() > 1,
                enable_write_sharding_file=False,
                array_metadata_store=None,
            ),
        ),
        # the writer has made copies
        (np.ndarray, types.NumpyHandler(deepcopy_host_arrays=False)),
    )
    return ocp.PyTreeCheckpointHandler(
        use_ocdbt=True,
        use_zarr3=True,
        use_compression=False,
        type_handler_registry=registry,
    )


def stored_name(path: str) -> str:
    """A name for the files, as Orbax has them; no two paths have the same.

    Example:
      >>> stored_name("params/w"), stored_name("params.w")
      ('params.w', 'params%2Ew')
    """
    return quote(path, safe="/").replace(".", "%2E").replace("/", ".") or "%"


def first_line(error: BaseException) -> str:
    """The kind of an error and the start of what it says."""
    lines = str(error).strip().splitlines()
    line = lines[0] if lines else ""
    if len(line) > 500:
        line = f"{line[:200]} ... {line[-300:]}"  # TensorStore ends with the cause
    return f"{type(error).__name__}: {line}".rstrip(".: ")


class Quiet(logging.Filter):
    """Keeps what Orbax logs from the log while it works for us; its errors are raised."""

    def filter(self, record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname

    def start(self) -> None:
        logging.getLogger("absl").addFilter(self)

    def stop(self) -> None:
        logging.getLogger("absl").removeFilter(self)

    def __enter__(self) -> "Quiet":
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()
