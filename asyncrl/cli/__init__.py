"""The composition root: the command line, the run driver, and everything that may know all the parts."""
