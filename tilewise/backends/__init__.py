"""Backends: each executes problems; none imports another."""
