"""FLOPs, bytes and seconds in closed form or by table: per rank, per stage, per action; for one layout or for
thousands at once.
"""
