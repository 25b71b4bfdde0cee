"""Document stores on each backend: texts with a key, a version, a group and a rank."""
