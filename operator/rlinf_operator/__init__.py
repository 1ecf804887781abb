"""The operator: watches RLJobs and makes the cluster what they say."""
