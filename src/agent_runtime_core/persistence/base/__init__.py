"""What each store must do: the six contracts."""
