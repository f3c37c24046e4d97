"""Saving and restoring a training run."""
