"""Queuesmith beside what people would use instead: `make bench`, `make bench-full`. See README.md here."""
