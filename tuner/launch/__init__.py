"""A server and its whole process family: start, readiness, failure classes, teardown."""
