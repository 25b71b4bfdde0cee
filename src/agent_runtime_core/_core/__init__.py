"""Values and helpers without domain knowledge."""
