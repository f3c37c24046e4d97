"""The state of a PCG64 generator as an array."""

import numpy as np


def generator_words(rng: np.random.Generator) -> np.ndarray:
    """The state of a generator of `PCG64`, uint64 [6]."""
    known = rng.bit_generator.state
    words = [known["state"]["state"], known["state"]["inc"]]
    words = [w >> shift & 2**64 - 1 for w in words for shift in (64, 0)]
    return np.array([*words, known["has_uint32"], known["uinteger"]], np.uint64)


def set_generator(rng: np.random.Generator, words: np.ndarray) -> None:
    """Goes on where `generator_words` were taken.

    Example:
      >>> first, second = (np.random.Generator(np.random.PCG64(s)) for s in (1, 2))
      >>> set_generator(second, generator_words(first))
      >>> bool(first.random() == second.random())
      True
    """
    state, state_low, inc, inc_low, has_uint32, uinteger = (int(w) for w in words)
    rng.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": state << 64 | state_low, "inc": inc << 64 | inc_low},
        "has_uint32": has_uint32,
        "uinteger": uinteger,
    }
