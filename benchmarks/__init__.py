"""Programs that produced the figures of the documentation; not part of an installed wheel."""
