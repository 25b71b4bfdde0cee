"""Texts with a key, a version and a rank, on each technology."""
