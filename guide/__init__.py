"""Everything that is written from the sources: the guide, derived text in pages, pictures, the start of a pattern."""
