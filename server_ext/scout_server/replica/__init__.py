"""One model of one engine replica: block pool, batch scheduler, latency model; on any clock."""
