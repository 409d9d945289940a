"""Supervision of processes: launcher, nodes, heartbeat, watchdog and hang diagnosis. Knows nothing of training."""
