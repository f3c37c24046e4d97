"""Configs of programs: typed dataclasses from the command line, a dict or TOML.

A config is a tree of frozen dataclasses; a string under each field is its help text. The
command line overrides the file given with ``--config``, and the file the defaults.
"""

import dataclasses
import difflib
import logging
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import tyro

C = TypeVar("C")


class ConfigError(ValueError):
    """A config with an unknown key or a value of the wrong kind."""


def from_dict(cls: type[C], values: Mapping[str, Any], path: str = "") -> C:
    """A config from nested dicts; what they leave out has its default.

    Keys may be written with dashes or underscores.

    Args:
      cls: a dataclass.
      values: by field name.
      path: of `values` within a larger config, for errors.

    Raises:
      ConfigError: for an unknown key, naming the nearest known one, or a bad value.

    Example:
      >>> @dataclasses.dataclass(frozen=True)
      ... class Config:
      ...   steps: int = 1
      >>> from_dict(Config, {"steps": 3})
      Config(steps=3)
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    types = get_type_hints(cls)
    given = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1, 0.0)
            raise ConfigError(
                f"unknown key '{path}{key}' in the config; the nearest known one is"
                f" '{path}{near[0]}'"
            )
        kind = types[name]
        if dataclasses.is_dataclass(kind):
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"'{path}{key}' must be a table of options, got {value!r}"
                )
            value = from_dict(kind, value, f"{path}{key}.")  # type: ignore[arg-type]
        else:
            value = _convert(kind, value, f"{path}{key}")
        given[name] = value
    try:
        return cls(**given)
    except (TypeError, ValueError) as e:
        raise ConfigError(f"{path or 'config'}: {e}") from e


def _convert(kind: Any, value: Any, name: str) -> Any:
    """A TOML or Python value as the command line would read it."""
    words = [str(v) for v in value] if isinstance(value, list | tuple) else [str(value)]
    if value is None:
        words = ["None"]
    field = dataclasses.make_dataclass("value", [("value", kind)], frozen=True)
    try:
        return tyro.cli(field, args=["--value", *words], console_outputs=False).value
    except SystemExit:
        kind_name = getattr(kind, "__name__", str(kind))
        raise ConfigError(f"'{name}' must be {kind_name}, got {value!r}") from None


def from_toml(cls: type[C], path: str | Path) -> C:
    """A config from a TOML file.

    Raises:
      FileNotFoundError: if there is no such file.
      ConfigError: if it is not TOML or does not fit.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no config file {str(path)!r}")
    try:
        values = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"config file {str(path)!r} is not TOML: {e}") from e
    return from_dict(cls, values)


def from_command_line(
    cls: type[C], prog: str, description: str, args: Sequence[str] | None = None
) -> C:
    """A config from the command line, over ``--config FILE`` where it is given.

    Prints help or what is wrong, and exits, as command lines do.

    Args:
      cls: a dataclass of which every field has a default.
      prog: how the program is called.
      description: its first lines of help.
      args: None for those of the process.
    """
    words = list(sys.argv[1:] if args is None else args)
    default: Any = None
    for i, word in enumerate(words):
        if word == "--config" or word.startswith("--config="):
            last = i + 1 if "=" in word else i + 2
            file = word.partition("=")[2] or "".join(words[i + 1 : last])
            try:
                default = from_toml(cls, file)
            except (OSError, ConfigError) as e:
                raise SystemExit(f"{prog}: {e}") from None
            words[i:last] = []
            break
    try:
        return tyro.cli(
            cls,
            prog=prog,
            description=description + "\n\n--config FILE.toml: values for the options.",
            args=words,
            default=default,
        )
    except ValueError as e:
        raise SystemExit(f"{prog}: {e}") from None


def run_program(
    main: Callable[[C], Any], cls: type[C], module: str, doc: str | None
) -> Any:
    """Runs a program with a config from the command line; its log goes to stderr.

    What the user can mend, an OSError or a ValueError, ends it with one line.

    Args:
      main: of the config.
      cls: of the config.
      module: of the program, for messages, such as "experiments.ctr".
      doc: of the module: its first line is that of the help.

    Returns:
      What `main` returned.
    """
    logging.basicConfig(format="%(name)s: %(message)s", stream=sys.stderr)
    for ours in ("experiments", "shardjax"):
        logging.getLogger(ours).setLevel(logging.INFO)
    prog = f"python -m {module}"
    config = from_command_line(cls, prog, (doc or "").partition("\n")[0])
    try:
        return main(config)
    except (OSError, ValueError) as e:  # the rest is a fault
        logging.getLogger(module).debug("the error in full", exc_info=True)
        raise SystemExit(f"{prog}: {e}") from None


def to_dict(config: Any) -> dict[str, Any]:
    """The whole config as nested dicts of plain values."""
    return dataclasses.asdict(config)
