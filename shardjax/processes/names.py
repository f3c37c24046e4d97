"""How messages name processes."""


def processes(numbers) -> str:
    """Names processes, such as "process 1" and "processes 1, 2"."""
    numbers = sorted(numbers)
    names = ", ".join(map(str, numbers))
    return f"process {names}" if len(numbers) == 1 else f"processes {names}"
