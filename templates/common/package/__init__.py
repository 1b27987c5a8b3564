"""{@ {'background-jobs': 'Background jobs that survive crashes, duplicates and outages.', 'async-flow': 'Answers at once, works in the background, shows its progress.', 'event-driven': 'Events that are neither lost nor duplicated, and a process that ends well or is taken back.'}[kind] @}"""

__version__ = "0.1.0"
