"""StudyHall: a study assistant whose background work survives crashes, duplicates and outages."""
