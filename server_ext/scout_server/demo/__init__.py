"""`scout demo`: the examples, run against the same server with LRU and with Scout."""
