"""Programs that measured the figures of the documentation. They are not part of an installed wheel."""
