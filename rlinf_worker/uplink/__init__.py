"""The one stream that an agent or a worker has to its driver: the end that dials it, and what waits to be said."""
