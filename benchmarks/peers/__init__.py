"""Our queues and event buses beside those of others, in one run: `python -m benchmarks.peers`."""
