"""How each engine is started and spoken to, one file each."""
