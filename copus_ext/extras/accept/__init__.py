"""What a machine with GPUs must show before anybody trusts it: `copus accept`."""
