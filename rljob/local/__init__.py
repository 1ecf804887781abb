"""Local mode: an in-memory API server (store.py) and a kubelet made of processes (kubelet.py) for `rljob run`.

For: running the very objects that the operator makes, on one Linux machine, with the semantics that the operator sees
on a cluster. Not for: containers, name spaces, cgroups, scheduling. `rljob/local/runner.py` wires both to the
operator's loop; nothing here imports the operator. Import the modules one by one, so that `rljob validate` pays for
none of them.
"""
