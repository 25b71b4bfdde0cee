"""The six stores, implemented once on documents."""
