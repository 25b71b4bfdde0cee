"""SQLite files: connections, transactions, group commit, and notification between processes."""
