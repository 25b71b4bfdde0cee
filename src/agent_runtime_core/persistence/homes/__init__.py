"""Where the stores of each technology keep their documents."""
