"""Draft heads that ship, each named by the fingerprint of its target (`engine.model.head_file.fingerprint`)."""
