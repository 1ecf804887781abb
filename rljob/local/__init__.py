"""Local mode: an in-memory API server (store.py) and a kubelet made of processes (kubelet.py) for `rljob run`.

Not for: containers, name spaces, cgroups, scheduling. Only runner.py, which wires both to the operator's loop, imports
the operator. Import the modules one by one, so that `rljob validate` pays for none of them.
"""
