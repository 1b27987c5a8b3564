"""Everything generated from the sources: the guide, derived text in pages, pictures, the files of a new pattern."""
