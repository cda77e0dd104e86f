"""Real servers for tests and demos; never imported by the library itself."""
