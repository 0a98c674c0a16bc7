"""The `scout` command."""
