"""The log of one run: boundary records and the sequence numbers of its events."""
