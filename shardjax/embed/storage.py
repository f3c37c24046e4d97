"""Where rows may lie: on the devices, in RAM, on disk, and how much of each."""

import os
import re
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from shardjax.embed.policies import check_integer

Keep = Literal["lfu", "lru"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(name: str, value: int | str, least: int = 1) -> int:
    """A number of bytes from an integer or a text such as "8GB" or "512 MiB".

    Raises:
      TypeError, ValueError: for anything else; `name` is in the message.

    Example:
      >>> parse_bytes("host_bytes", "1.5GB"), parse_bytes("host_bytes", "2KiB")
      (1500000000, 2048)
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer | str):
        raise TypeError(
            f"`{name}` must be a number of bytes or a text such as '8GB', got {value!r}"
        )
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if not match or match[2].upper() not in _UNITS:
            raise ValueError(
                f"`{name}` must be a number and a unit (KB, MB, GB, TB or KiB, MiB, GiB,"
                f" TiB), such as '8GB', got {value!r}"
            )
        value = int(float(match[1]) * _UNITS[match[2].upper()])
    if value < least:
        rule = "be positive" if least else "not be negative"
        raise ValueError(f"`{name}` must {rule}, got {value}")
    return int(value)


@dataclass(frozen=True)
class Storage:
    """How many rows the devices hold, and where the others lie: in RAM, then on disk.

    A row moves whole, with its optimizer state, and moving changes no bit of it. Tables
    of placement `data_parallel` always lie on the devices.

    Attributes:
      device_rows: rows on all devices together, per slab (tables of one dim, dtype and
        optimizer share a slab). A batch, or a window of several, needs all its rows on
        the devices while it is trained on.
      host_bytes: RAM for the other rows and for what is needed to find rows, such as
        "8GB"; None for as much as they take. Rows beyond go to `disk`. It does not bound
        what is under way: batches and moves that are planned ahead.
      disk: a folder for the rows that RAM does not hold. One process uses it at a time,
        and what is in it is good while the process lives.
      disk_bytes: what the files there may take, such as "100GB"; None for any. Merging
        files takes up to 256 MB more for a moment. Rows that find no room are an error,
        and stay in RAM: let rows leave for good (`evict` of a table), or give more.
      map_bytes: of the files, how much may be mapped: a file that is read as memory is
        read about three times as fast while the system has it in its cache. What is there
        counts as memory of this process (RSS), though the system takes it back at need.
        None for a tenth of `host_bytes`.
      merge_rate: bytes per second, such as "100MB", that merging files in the background
        reads and writes at most, so that it leaves the disk to look-ups; None for as fast
        as it can. Files take more room meanwhile; once they take twice what lives in them,
        and where somebody waits for a merge, it goes as fast as it can.
      keep: which rows stay on the devices when others must come: those used most often
        lately, "lfu", or those used last, "lru".

    Example:
      >>> Storage(device_rows=1_000_000).keep
      'lfu'
    """

    device_rows: int
    host_bytes: int | str | None = None
    disk: str | os.PathLike | None = None
    disk_bytes: int | str | None = None
    map_bytes: int | str | None = None
    merge_rate: int | str | None = None
    keep: Keep = "lfu"

    def __post_init__(self):
        if self.host_bytes is not None:
            size = parse_bytes("host_bytes", self.host_bytes)
            object.__setattr__(self, "host_bytes", size)
        if self.disk is not None and self.host_bytes is None:
            raise ValueError(
                f"`disk` is for the rows that RAM does not hold, got {str(self.disk)!r} and"
                " no `host_bytes`. Say how much RAM, such as host_bytes='8GB'"
            )
        for name in ("disk_bytes", "map_bytes", "merge_rate"):
            value = getattr(self, name)
            if value is None:
                continue
            least = 0 if name == "map_bytes" else 1
            size = parse_bytes(name, value, least)
            object.__setattr__(self, name, size)
            if self.disk is None:
                raise ValueError(
                    f"`{name}` is about the files in `disk`, got {size} and no `disk`. Name"
                    " a folder"
                )
        if self.disk is not None and self.map_bytes is None:
            object.__setattr__(self, "map_bytes", int(self.host_bytes or 0) // 10)
        check_integer("`device_rows`", self.device_rows, 1, 2**30 - 1)
        if self.keep not in get_args(Keep):
            raise ValueError(f"`keep` must be 'lfu' or 'lru', got {self.keep!r}")
