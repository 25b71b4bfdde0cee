"""The six stores, written once over documents."""
