"""Ray clusters, and the placement of processes on the devices of their machines."""
