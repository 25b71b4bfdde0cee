"""What each kind of store, and the documents below ours, must do, in functions of no test framework."""
