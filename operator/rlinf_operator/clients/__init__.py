"""The only I/O of the operator: object store, scheduler, drivers, certificate authority."""
