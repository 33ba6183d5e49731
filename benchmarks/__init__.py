"""One runnable command per figure that the README or the docs quote."""
