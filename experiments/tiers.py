"""What a run with a storage says about the tiers: how often rows are where, and how many."""

from collections.abc import Iterable, Mapping

RATES = {
    "device_hit_rate": "device_hits",
    "host_hit_rate": "host_hits",
    "disk_hit_rate": "disk_hits",
    "new_rate": "inserted",
}
SIZES = (
    "device_rows", "host_rows", "disk_rows", "host_bytes", "disk_bytes", "index_bytes",
)  # fmt: skip


def tier_rates(counters: Mapping[str, float], steps: int) -> dict[str, float]:
    """Shares of the tiers in the rows of some batches, and the mean length of a window.

    Args:
      counters: of the batches, summed.
      steps: how many batches they are.

    Returns:
      tiers/device_hit_rate, tiers/host_hit_rate, tiers/disk_hit_rate and tiers/new_rate,
      which add up to one, if there are such rows; tiers/window_steps if a window began
      with one of the batches. Nothing for counters without a storage.
    """
    if not counters.keys() >= set(RATES.values()):
        return {}
    rates = {}
    rows = sum(counters[counter] for counter in RATES.values())
    if rows:
        rates = {f"tiers/{name}": counters[c] / rows for name, c in RATES.items()}
    if counters["windows"]:
        rates["tiers/window_steps"] = steps / counters["windows"]
    return rates


def tier_sizes(stats: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Rows and bytes of the tiers, over all slabs.

    Args:
      stats: of `EmbeddingCollection.stats`, of each slab.
    """
    slabs = list(stats)
    return {f"tiers/{name}": sum(slab[name] for slab in slabs) for name in SIZES}
