"""FLOPs, bytes and seconds in closed form or by table."""
