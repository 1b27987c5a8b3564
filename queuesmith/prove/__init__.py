"""The fault suite as a command, for any service in any language: see prove.toml in `spec.py`.

Promises: every verdict comes from what was seen (effects, calls, exit codes), a fault that hit nothing is never
counted as held, and no process of a run outlives it.
Does not hold: a clean card is evidence, not proof; a fault hits one moment of many. Another seed hits others.
"""
