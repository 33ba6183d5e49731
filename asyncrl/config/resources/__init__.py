"""What each process of a run gets: placement on nodes, the resources of the plan, threads."""
