"""Stages served by swarms of peers: wiring, exactly-once sums and rebalancing; free of torch."""
