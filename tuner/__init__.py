"""Finds, by measurement, the speculative-decoding settings that are fastest for one machine and its traffic."""

__version__ = "0.1.0"
