"""What all patterns share: errors, the job model, the clock, the store, connections. Imports no pattern."""
