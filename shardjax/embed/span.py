"""Which of the devices of a mesh belong to this process."""

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class DeviceSpan:
    """Devices [first, first + count) of `total`, in the order of the mesh.

    Attributes:
      total: devices that rows lie on.
      first: the first one of this process.
      count: how many this process has.
    """

    total: int
    first: int
    count: int

    @classmethod
    def whole(cls, total: int) -> "DeviceSpan":
        """All of so many devices."""
        return cls(total, 0, total)

    @classmethod
    def of_mesh(cls, mesh: jax.sharding.Mesh) -> "DeviceSpan":
        """Those of this process in a mesh.

        Raises:
          ValueError: if this process has none, or others' lie between them.

        Example:
          >>> import shardjax as sj
          >>> DeviceSpan.of_mesh(sj.make_mesh("1x1"))
          DeviceSpan(total=1, first=0, count=1)
        """
        here = jax.process_index()
        own = [n for n, d in enumerate(mesh.devices.flat) if d.process_index == here]
        return cls._of_numbers(own, mesh.devices.size, here)

    @classmethod
    def _of_numbers(cls, own: list[int], total: int, process: int) -> "DeviceSpan":
        if not own or own[-1] - own[0] + 1 != len(own):
            raise ValueError(
                "the devices of each process must follow one another in the mesh, row by"
                f" row, got the numbers {own} of {total} for process {process}. Order the"
                " devices by process: shardjax.make_mesh over all of them does so"
            )
        return cls(total, own[0], len(own))

    @property
    def is_whole(self) -> bool:
        """Whether one process has all devices."""
        return self.count == self.total
