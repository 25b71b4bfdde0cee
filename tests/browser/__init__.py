"""A package, so that pytest ends the fixtures of scope "package" before the tests of other directories."""
