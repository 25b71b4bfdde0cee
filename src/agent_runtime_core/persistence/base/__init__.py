"""The contracts of the six stores."""
