"""The macro flows: asynchronous functions over roles and channels, run by the driver."""
