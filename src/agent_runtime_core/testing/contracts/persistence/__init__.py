"""What each kind of store, and the documents below ours, must do: a suite for each, in functions of no test framework."""
