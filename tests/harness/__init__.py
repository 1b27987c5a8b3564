"""The basis of the tests: real servers in temporary directories, real processes, polls, not sleeps."""
