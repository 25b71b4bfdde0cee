"""What one claim does with one run."""
