"""One runnable command for each figure that the README or the docs quote."""
