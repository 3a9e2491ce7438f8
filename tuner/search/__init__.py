"""What is expected of candidates that were not measured: a model of speculation, and what to try next by it.

Pure functions of records: no process, no database, no clock.
"""
