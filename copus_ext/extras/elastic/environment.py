"""What an elastic launcher tells its ranks by environment variables."""

PIPE_VARIABLE = "COPUS_ELASTIC_PIPE"
"""Environment variable of a rank: file number of its connection with the launcher, and its place,
as FD:NODE:LOCAL:RUN."""
RESIZE_VARIABLE = "COPUS_RESIZE_COMMAND"
"""Environment variable: the command that asks the cluster for more or fewer ranks."""
COPY_INTERVAL_VARIABLE = "COPUS_COPY_INTERVAL"
"""Environment variable: steps between two copies of the state."""
COPY_INTERVAL = 25
"""Steps between two copies of the state in memory (docs/decisions/043)."""
