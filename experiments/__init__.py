"""Programs built on shardjax: run one with `python -m experiments.NAME`."""
