"""Cost models: FLOPs, bytes and seconds in closed form or from tables, for one layout or for thousands at once."""
