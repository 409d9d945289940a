"""Launchers on several nodes, one on each: rendezvous, handshake and messages. Free of torch."""
