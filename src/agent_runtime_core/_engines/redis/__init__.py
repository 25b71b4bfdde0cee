"""Redis servers: connections, batches of commits, scripts, and notification."""
