"""Ray as the driver uses it: the connection, what the cluster has, processes, and what killed drivers leave behind."""
