"""How the ranks of one model add up, gather and agree on what each of them computed: one file per backend.

A new backend is one file here, a class that is a `Backend`, and a line in `base.MODULES`. The conformance tests in
`tests/engine/test_collectives.py` run over every one that works on the machine at hand.
"""
