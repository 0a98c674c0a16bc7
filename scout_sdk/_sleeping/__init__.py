"""Readers of commands that sleep: what they say about time, without running anything."""
