"""Workers of one study on a cluster: where there is room for them, starting them there, and what becomes of them."""
