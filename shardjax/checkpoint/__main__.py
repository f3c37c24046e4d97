"""Looks at the checkpoints of a run, checks them, removes old ones and exports rows.

    python -m shardjax.checkpoint inspect DIR [--step N]
    python -m shardjax.checkpoint verify DIR [--step N]
    python -m shardjax.checkpoint prune DIR --keep K
    python -m shardjax.checkpoint compact DIR [--step N]
    python -m shardjax.checkpoint export DIR OUT [--step N] [--format arrow|npy]

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
from shardjax.checkpoint.export import export_checkpoint
from shardjax.checkpoint.manifest import MANIFEST, CorruptCheckpointError, Manifest
from shardjax.checkpoint.steps import StepFolder
from shardjax.embed import TableRows


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
        "export": _export,
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
        description="Looks at the checkpoints of a run, checks them, removes old ones and"
        " exports rows.",
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
        "export": "write rows of embedding tables, keys and vectors, into files for other"
        " programs",
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
            "export": "of this step; of the newest one without",
        }
        command.add_argument("--step", type=int, metavar="N", help=more[name])
        if name == "export":
            _add_export_options(command)
    return parser


def _add_export_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("out", metavar="OUT", help="the folder for the files")
    command.add_argument(
        "--format",
        choices=["arrow", "npy"],
        default="arrow",
        help="an Arrow file (Feather) per table, or a NumPy array per column; arrow"
        " without",
    )
    command.add_argument(
        "--table",
        action="append",
        metavar="T",
        help="this table; may be given several times; all tables without",
    )
    command.add_argument(
        "--min-uses",
        type=int,
        metavar="N",
        help="only rows that at least N training steps have used; for tables with an"
        " eviction policy or a storage, which keep that",
    )
    command.add_argument(
        "--replace",
        action="store_true",
        help="remove the files that OUT has, once the new ones are written",
    )


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
                with _bar(step, manifest.size) as bar:
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
        with _bar(step, sum(sizes) if len(sizes) > 1 else 0) as bar:
            steps = compact(folder, step, bar.update)
        size = _size(folder.read(step).size)
        print(
            f"step {step}: {f'made of {steps} steps' if steps > 1 else 'as it was'}, {size}"
        )
    return 0


def _export(chosen) -> int:
    def often(table: str, rows: TableRows):
        if rows.uses is None:
            raise ValueError(
                f"of table {table!r} nobody has kept how often its rows are used: leave"
                " out --min-uses, or name other tables with --table"
            )
        return rows.uses >= chosen.min_uses

    with StepFolder(chosen.directory, write=False) as folder:
        steps = folder.steps()
        step = chosen.step if chosen.step is not None or not steps else steps[-1]
        total = 0
        if step is not None:
            total = sum(manifest.size for manifest in chain_of(folder, step))
    with _bar(step, total) as bar:
        try:
            counts = export_checkpoint(
                chosen.directory,
                chosen.out,
                step,
                format=chosen.format,
                tables=chosen.table,
                filter=None if chosen.min_uses is None else often,
                replace=chosen.replace,
                progress=bar.update,
            )
        except KeyError as error:
            raise ValueError(error.args[0]) from error
    for table, count in counts.items():
        print(f"step {step}: {count} rows of table {table!r}")
    return 0


def _bar(step: int | None, total: int) -> _Bar:
    """How much has been read: a line of its own to watch, where somebody does."""
    return _Bar(
        desc=f"step {step}",
        total=total,
        unit="B",
        unit_scale=True,
        leave=False,
        disable=None,
    )


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
