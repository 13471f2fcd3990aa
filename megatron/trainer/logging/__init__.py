"""What a run reports: the record, the log line, and other sinks."""
