"""Who reaches a loss first? `real` asks on a real clock, `virtual` on a virtual one."""
