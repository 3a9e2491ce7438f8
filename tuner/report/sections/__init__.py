"""The sections of a report, each from the view alone: a question and its answer."""
