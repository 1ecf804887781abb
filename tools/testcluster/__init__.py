"""A genuine Kubernetes for tests: real API server, scheduler, kubelets and containers on one small machine.

`make testcluster-up` and the `cluster` fixture of tests/cluster use it; nothing that is shipped imports it.
docs/testcluster.md says what was measured and what is not like production. It is not a way to run jobs for real:
etcd does not sync to disk and every key lies in the state folder.
"""
