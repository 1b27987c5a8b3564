"""The `queuesmith` command: proven pattern modules into new and existing projects. Python 3.11+, nothing else."""
