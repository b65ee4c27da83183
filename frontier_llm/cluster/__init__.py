"""Write, submit, check and monitor jobs on a cluster. Imports no torch."""
