"""The engine on a PostgreSQL database."""
