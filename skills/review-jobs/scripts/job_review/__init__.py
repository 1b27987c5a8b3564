"""The parts of review_jobs.py: rules, what was read, and one module per language. Standard library only."""
