"""What several test files share."""

import re
import subprocess
import sys
from collections import Counter

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)


def collectives(compiled) -> Counter[str]:
    """Counts the collectives of a compiled program; an asynchronous pair counts once.

    Args:
      compiled: what `jax.jit(f).lower(...).compile()` returns.

    Returns:
      How often each operation occurs, without those that do not.
    """
    names = "|".join(COLLECTIVES)
    found = re.findall(rf" ({names})(?:-start)?\(", compiled.as_text())
    return Counter(found)


def run_python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a fresh Python, for what must happen before JAX is up.

    Args:
      program: its source.
      *arguments: its command-line arguments.

    Returns:
      The finished process, with its output as text.

    Raises:
      AssertionError: if it fails; the message is what it printed.
    """
    run = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run


def table_sized(compiled, slots: int) -> list[str]:
    """The operations whose result is as large as a slab, but for scatters into it."""
    operation = re.compile(r"\s*(ROOT )?%(\S+) = (\S+) ([a-z-]+)\(")
    computation, scatters, large = "", set(), []
    for line in compiled.as_text().splitlines():
        if line.endswith("{"):
            computation = line.split()[0].lstrip("%")
        match = operation.match(line)
        if match is None or not re.search(rf"\[{slots}\b", match[3]):
            continue
        if match[4] == "scatter":
            if match[1]:
                scatters.add(computation)
        elif match[4] not in ("parameter", "get-tuple-element", "bitcast"):
            called = re.search(r"calls=%([^\s,]+)", line)
            large.append((called and called[1], line.strip()))
    return [line for called, line in large if called not in scatters]
