"""The `gccomm` command."""
