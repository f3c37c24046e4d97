"""Looks at the checkpoints of a run, checks them and removes old ones.

    python -m shardjax.checkpoint inspect DIR [--step N]
    python -m shardjax.checkpoint verify DIR [--step N]
    python -m shardjax.checkpoint prune DIR --keep K
    python -m shardjax.checkpoint compact DIR [--step N]

Exit code 0: all is well; 1: a step is not what was written; 2: it could not be done.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence

from tqdm import tqdm

from shardjax.checkpoint.chain import chain_of
from shardjax.checkpoint.compact import compact
from shardjax.checkpoint.manifest import MANIFEST, CorruptCheckpointError, Manifest
from shardjax.checkpoint.steps import StepFolder


class _Bar(tqdm):
    monitor_interval = 0  # no thread that wakes up bars


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
      arguments: after the program's name; by default those of the process.

    Returns:
      The exit code.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as path:
      ...     main(["inspect", path])
      no steps
      0
    """
    chosen = _parser().parse_args(arguments)
    commands = {
        "inspect": _inspect,
        "verify": _verify,
        "prune": _prune,
        "compact": _compact,
    }
    run = commands[chosen.command]
    try:
        return run(chosen)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, CorruptCheckpointError) else 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m shardjax.checkpoint",
        description="Looks at the checkpoints of a run, checks them and removes old ones.",
        epilog="Exit code 0: all is well; 1: a step is not what was written; 2: it could"
        " not be done.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    texts = {
        "inspect": "list the steps: when they were written, and how large they are",
        "verify": "read all files and compare them with what was written",
        "prune": "remove old steps; not while a run writes to the folder",
        "compact": "write a step that has the changes since others anew, with all rows, so"
        " that those can go; not while a run writes to the folder",
    }
    for name, text in texts.items():
        command = commands.add_parser(
            name, help=text, description=f"{text.capitalize()}."
        )
        command.add_argument(
            "directory", metavar="DIR", help="the folder of the checkpoints of a run"
        )
        if name == "prune":
            command.add_argument(
                "--keep",
                type=int,
                required=True,
                metavar="K",
                help="how many of the newest steps stay; those that they need stay too",
            )
            continue
        more = {
            "inspect": "show this step, with the details that were kept with it",
            "verify": "check this step only",
            "compact": "this step; the newest one without",
        }
        command.add_argument("--step", type=int, metavar="N", help=more[name])
    return parser


def _inspect(chosen) -> int:
    with StepFolder(chosen.directory, write=False) as folder:
        if chosen.step is not None:
            manifest = folder.read(chosen.step)
            needs = [f"needs steps {list(manifest.needs)}"] if manifest.needs else []
            size = f"{_files(manifest)}, {_size(manifest.size)}"
            print(", ".join([f"step {manifest.step}: {_when(manifest)}", size, *needs]))
            print(json.dumps(manifest.details, indent=2, sort_keys=True))
            return 0
        steps, bad = folder.steps(), False
        if not steps:
            print("no steps")
            return 0
        rows = [("step", "written", "files", "size")]
        for step in steps:
            try:
                manifest = folder.read(step)
            except CorruptCheckpointError:
                rows.append((str(step), "its manifest has changed", "", ""))
                bad = True
                continue
            files = str(len(manifest.files))
            rows.append((str(step), _when(manifest), files, _size(manifest.size)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for step, *rest in rows:
        cells = [
            cell.ljust(width) for cell, width in zip(rest, widths[1:], strict=True)
        ]
        print("  ".join([step.rjust(widths[0]), *cells]).rstrip())
    return int(bad)


def _verify(chosen) -> int:
    with StepFolder(chosen.directory, write=False) as folder:
        steps = folder.steps() if chosen.step is None else [chosen.step]
        if not steps:
            raise FileNotFoundError(
                f"there are no steps in {chosen.directory!r} to verify. Give the folder"
                " that checkpoints have been written to"
            )
        bad = False
        for step in steps:
            try:
                manifest = folder.read(step)
                # a line of its own to watch, where somebody does; the result stays
                with _Bar(
                    desc=f"step {step}",
                    total=manifest.size,
                    unit="B",
                    unit_scale=True,
                    leave=False,
                    disable=None,
                ) as bar:
                    folder.verify(step, bar.update)
            except CorruptCheckpointError as error:
                print(error)
                bad = True
            else:
                print(f"step {step}: ok, {_files(manifest)}, {_size(manifest.size)}")
    return int(bad)


def _prune(chosen) -> int:
    StepFolder(chosen.directory, write=False).close()  # it must be there
    with StepFolder(chosen.directory, write=True) as folder:
        for step in folder.prune(chosen.keep):
            print(f"removed step {step}")
        print("steps left:", ", ".join(str(step) for step in folder.steps()) or "none")
    return 0


def _compact(chosen) -> int:
    StepFolder(chosen.directory, write=False).close()  # it must be there
    with StepFolder(chosen.directory, write=True) as folder:
        step = chosen.step
        if step is None:
            if not folder.steps():
                raise FileNotFoundError(
                    f"there are no steps in {chosen.directory!r} to compact. Give the folder"
                    " that checkpoints have been written to"
                )
            step = folder.steps()[-1]
        sizes = [manifest.size for manifest in chain_of(folder, step)]
        with _Bar(
            desc=f"step {step}",
            total=sum(sizes) if len(sizes) > 1 else 0,
            unit="B",
            unit_scale=True,
            leave=False,
            disable=None,
        ) as bar:
            steps = compact(folder, step, bar.update)
        size = _size(folder.read(step).size)
        print(
            f"step {step}: {f'made of {steps} steps' if steps > 1 else 'as it was'}, {size}"
        )
    return 0


def _when(manifest: Manifest) -> str:
    written = (manifest.path / MANIFEST).stat().st_mtime
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written))


def _files(manifest: Manifest) -> str:
    count = len(manifest.files)
    return f"{count} file" if count == 1 else f"{count} files"


def _size(size: float) -> str:
    """Bytes, for people.

    Example:
      >>> _size(999), _size(12_345_678)
      ('999 B', '12.3 MB')
    """
    if size < 1000:
        return f"{size} B"
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 1000:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"


if __name__ == "__main__":
    sys.exit(main())
