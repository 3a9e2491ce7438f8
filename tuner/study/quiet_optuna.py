"""Optuna, imported by whoever needs it (a third of a second) and told to keep its notes to itself."""

from __future__ import annotations

import warnings

import optuna

# Grouped TPE and constraints are what the search is built on; that Optuna still calls them experimental is known.
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
optuna.logging.set_verbosity(optuna.logging.WARNING)

__all__ = ["optuna"]
