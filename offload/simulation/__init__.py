"""A device that is not there, played on the CPU: streams, memory, races, virtual time."""
