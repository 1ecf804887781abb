"""The mathematics of the flows: pure functions over arrays and tensors.

For: advantages, losses, networks, keyed randomness. Not for: channels, processes, checkpoints, clocks, the loop that
calls them. Called by the role loops in `rlinf_worker.roles`. `advantage`, `policy_spec` and `sampling` need numpy only,
because env and rollout workers start without torch (its import alone is seconds); `policies` and `losses` need torch.
"""
