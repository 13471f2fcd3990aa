"""What every room uses: errors, optional packages, signals, devices, small collectives."""
