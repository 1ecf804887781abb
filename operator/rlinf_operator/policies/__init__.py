"""Pure rules, one per file: what happens on failure, when a pod is replaced, how a job is suspended, when it goes."""
