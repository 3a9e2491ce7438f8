"""A model of a machine in place of one: what is known of its speed, noise and faults. Never a measurement."""
