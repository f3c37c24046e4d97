"""Saving a run while it trains, and going on from what has been saved."""
