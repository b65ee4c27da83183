"""Where a process stands in a job and how jobs are written, sent, checked and followed; imports no torch."""
