"""Measures one concurrency level of a running server: prompts, load client, window, metrics, validity gates."""
