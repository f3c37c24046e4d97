"""How large an index is for how many keys, and memory for it.

A small index doubles, all at once, and then takes twice the memory. A large one lies in
address space that is backed with memory as it is written to: it grows where it is, by
some homes for each key that comes, so it never moves and its memory follows its keys.
"""

import numpy as np

from shardjax.embed.memory import can_reserve, reserve

MIN_HOMES = 64
SMALL = 2**16  # homes, at most
MAX_ENTRIES = 2**31  # their numbers are int32


def homes_for(count: int) -> int:
    """How many homes an index of `count` keys has.

    There are n (a power of two) for n / 2 keys. Five more come with each further key,
    until there are 2n for 0.7 n keys, which then is the most that a home has on average.
    """
    homes = MIN_HOMES
    while homes < count:
        homes *= 2
    more = max(count - homes // 2, 0)
    if more and homes < SMALL:
        return 2 * homes
    return homes + min(5 * more, homes)


def limit_for(homes: int) -> int:
    """How many keys an index of so many homes takes, at most half as many."""
    power = 1 << (homes.bit_length() - 1)
    return power // 2 + (homes - power) // 5


def space_for(homes: int) -> np.ndarray:
    """Empty entries, uint64 [.., 2], for so many homes and all that may overflow.

    Raises:
      MemoryError: if those are more than an index may have.
    """
    if homes + homes // 2 > MAX_ENTRIES:
        most = limit_for(MAX_ENTRIES * 2 // 3)
        raise MemoryError(f"an index has room for {most} keys and not for more")
    if homes > SMALL and can_reserve:
        return reserve((MAX_ENTRIES, 2), np.uint64)
    power = 1 << (homes - 1).bit_length()
    return np.zeros((min(power + power // 2, MAX_ENTRIES), 2), np.uint64)
