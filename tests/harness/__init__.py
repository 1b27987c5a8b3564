"""What the tests stand on: real servers in temporary directories, real processes, polls instead of sleeps."""
